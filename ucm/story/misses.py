# SPDX-License-Identifier: Apache-2.0
"""What each reason of a miss, and of a load that failed, means, and what to do about it."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from ucm.settings import seconds_text
from ucm.story.lines import Missed

__all__ = [
    "DETAILS",
    "ENDS",
    "MISSES",
    "Explained",
    "explain_end",
    "explain_failure",
    "explain_miss",
    "explain_missed",
]

_MOST_DETAIL: Final = 1000


class Explained(NamedTuple):
    """A reason in words."""

    meaning: str
    remedy: str


MISSES: Final[Mapping[str, Explained]] = {
    "never_offered": Explained(
        "Nobody has saved this block or tried to, as far as is remembered.",
        "Nothing: the first request with a prompt computes and saves it, unless its engine is a "
        "kv_consumer. If it was asked before, compare cache salt, adapter, block size and "
        "prompt: one other token changes all behind it.",
    ),
    "queue": Explained(
        "Its save, or this load, was refused or dropped: too many waited.",
        "Raise queue.tickets or queue.nbytes, or use a faster medium for the slab.",
    ),
    "too_short": Explained(
        "The request has no whole block, and only whole blocks are stored.",
        "Nothing, or a smaller block_size of the engine.",
    ),
    "admission": Explained(
        "A setting or a wish of the request keeps it from being saved or looked up.",
        "Look at the detail, at kv_role, and at what the request asks of the store.",
    ),
    "failed": Explained(
        "Its save failed, or the load that this request had before.",
        "Look at the outcomes of saves: `ucm trace stats`; then at the store's medium.",
    ),
    "evicted": Explained(
        "The block was stored, and has made room for others since, or was deleted.",
        "Raise store.capacity, or retain what matters (`retain_seconds`).",
    ),
    "other_key_space": Explained(
        "The block is stored by an engine with other settings or another model.",
        "Make the settings equal that the detail names, if they may be.",
    ),
    "corrupt": Explained(
        "Its bytes were not those that had been saved, so the block was dropped.",
        "Check memory or disk of the slab. It is saved again with the next request.",
    ),
    "not_committed": Explained(
        "The block was being saved when it was asked for.",
        "Nothing: the next request finds it. If it is often so, look at how long saves "
        "take: `ucm trace stats`.",
    ),
    "denied": Explained(
        "A load of the block failed a short time ago, so it is not tried again yet.",
        "Look at the failed loads: `ucm trace why REQUEST` of those before.",
    ),
    "bypassed": Explained(
        "The store was not asked.",
        "Look at the store's medium, and at store.bypassed in the log.",
    ),
    "unavailable": Explained(
        "The store, or a tier below it, did not answer.",
        "Look for store.bypassed in the log, which says why, as that the slab's files were "
        "removed; of tiers, look for agent.lost and tier.silent in the log.",
    ),
    "late": Explained(
        "What there is of it was not known in time: by the tiers, or by its adapter's files.",
        "Raise timeout.fetch if tiers are slow; keep adapters on a fast disk.",
    ),
    "slower": Explained(
        "It was there, and predicted to be loaded later than computing takes.",
        "Nothing: up to 64 tokens a step computes beside its last one. For more, faster memory "
        "or tiers; predict_loads: false loads whatever it takes.",
    ),
    "unkeyed": Explained(
        "It is not known what its key depends on, such as the request's adapter.",
        "Leave adapters where they are; see immutable_adapters.",
    ),
    "unknown": Explained(
        "The block is not there, and what is remembered, which is bounded, has no reason.",
        "Ask soon after the miss, or look further back in the log.",
    ),
}
"""By the words of ``miss`` and ``prefix.missed``; a closed list."""

_LOOK: Final = "Look at the outcome and error of its tickets: `ucm trace show`."
ENDS: Final[Mapping[str, Explained]] = {
    "queue_tickets": Explained("As many saves waited as may.", "Raise queue.tickets."),
    "queue_bytes": Explained("As many bytes waited as may.", "Raise queue.nbytes."),
    "store_behind": Explained(
        "As much had been copied, and was not stored yet, as may be.",
        "Raise queue.nbytes or queue.tickets, or use a faster medium for the slab.",
    ),
    "overload": Explained(
        "The loads before it left too little time.",
        "Raise timeout.load, or use a faster medium.",
    ),
    "store_full": Explained("The store had no slot.", "Raise store.capacity."),
    "deadline": Explained(
        "Its time was up.", "Look at which stage took long: `ucm trace show`."
    ),
    "recycled": Explained(
        "The engine overwrote the blocks first.",
        "Give the engine more blocks, or raise timeout.fence.",
    ),
    "corrupt": Explained(
        "A checksum did not hold.", "Check memory or disk of the slab."
    ),
    "evicted": Explained(
        "The block was gone between look-up and load.", "Raise store.capacity."
    ),
    "unavailable": Explained("The store did not answer.", "Look at its medium."),
    "slow": Explained("The store answered too late.", "Look at its medium."),
    "store_hung": Explained(
        "A call of the store did not return.", "Look at its medium, then restart."
    ),
    "admission": Explained(
        "A tier takes only what is stored a second time.", "Set its admission to all."
    ),
    "kept": Explained(
        "A tier may still have what was to be forgotten.",
        "Forget it again once the tier answers.",
    ),
    "slower": Explained(
        "A tier would have brought it later than computing takes.",
        "Nothing, or a faster tier; predict_loads: false fetches whatever it takes.",
    ),
    "device": Explained("The device refused or failed.", _LOOK),
    "stuck": Explained(
        "A device copy never ended.", "Look at the device; restart the engine."
    ),
    "failed": Explained("The runtime had failed before.", "Restart the engine."),
    "runtime_failed": Explained("The runtime failed meanwhile.", "Restart the engine."),
    "worker_died": Explained("A copy thread has died.", "Restart the engine."),
    "closed": Explained("The engine had been closed before.", "Nothing."),
    "late": Explained("The engine was closed while it was offered.", "Nothing."),
    "shutdown": Explained(
        "It still waited when the engine was closed.", "Raise timeout.shutdown."
    ),
    "unconfirmed": Explained(
        "The engine was closed before the copy's end was seen.", "Nothing."
    ),
    "overwritten": Explained(
        "The engine may have overwritten the blocks before the copy's end was seen.",
        "Nothing: the next request saves them.",
    ),
    "unfinished": Explained("The step ended before it wrote all rows.", _LOOK),
    "unsubmitted": Explained("Its step ended before it was carried out.", _LOOK),
    "unasked": Explained("A layer ran without having waited for its row.", _LOOK),
    "row_failed": Explained("Another load of its request failed.", _LOOK),
    "withdrawn": Explained("Whoever asked for it wanted it no more.", "Nothing."),
    "stored": Explained("The store had it already.", "Nothing."),
    "absent": Explained("No tier had it.", "Nothing, or a larger tier."),
    "over": Explained("It had come to its end elsewhere.", _LOOK),
    "error": Explained("There was an error that has no word.", _LOOK),
}
"""Of a save or a load, by the words of ``ucm.reasons.Reason``; a closed list."""

DETAILS: Final[Mapping[str, Explained]] = {
    "wish": Explained(
        "The request that computed it asked for it not to be stored.",
        "Leave `store: false`, `forget` and `max_offload_tokens` out of its "
        "`kv_transfer_params`.",
    ),
    "shortest_saved_tokens": Explained(
        "The request that computed it was too short to be saved.",
        "Lower shortest_saved_tokens.",
    ),
    "save_decoded": Explained(
        "It was decoded, and the setting keeps what is decoded out.",
        "Set save_decoded to at_end or each_block.",
    ),
    "the request limits what is loaded": Explained(
        "The request limits what is loaded.",
        "Leave max_load_tokens out of its `kv_transfer_params`, and prompt_logprobs and "
        "skip_reading_prefix_cache out of its sampling parameters.",
    ),
    "it was not looked up": Explained(
        "It was not looked up: the engine is a kv_producer, or the request skips the "
        "prefix cache.",
        "Use kv_both if the engine is to load as well; leave prompt_logprobs and "
        "skip_reading_prefix_cache out of the request's sampling parameters.",
    ),
    "the request's id is too long": Explained(
        "The request's id is too long.", "Use ids of at most 65536 characters."
    ),
    "not_taken": Explained(
        "No step had room to order its save in time.",
        "Raise queue.tickets or timeout.save.",
    ),
    "load_failed": Explained(
        "The request that computed it ended as its own load failed.",
        "Nothing: who computes it next saves it.",
    ),
    "a load of this request failed": Explained("A load of this request failed.", _LOOK),
    "the engine has no room to load more": Explained(
        "The engine's memory is hardly larger than the request, which took up less of its hit.",
        "Give the engine more blocks: raise --gpu-memory-utilization.",
    ),
    "the loads of others fill the step's plan": Explained(
        "The loads of other requests filled the step.",
        "Nothing: the next step has room again.",
    ),
    "the tiers did not answer in time": Explained(
        "The tiers did not answer in time.",
        "Raise timeout.fetch if they are slow; look for tier.silent in the agent's log.",
    ),
    "a tier could not be asked": Explained(
        "A tier, or the node's agent, could not be asked.",
        "Look for agent.lost in the engine's log, and for tier.silent and tier.failed in "
        "the agent's.",
    ),
    "fetches had their share of the slab": Explained(
        "Fetches may have an eighth of the slab's slots, and had them.",
        "Raise store.capacity.",
    ),
    "a tier brought other bytes": Explained(
        "A tier brought other bytes than those that were put there.",
        "Look for tier.failed in the agent's log, and at that tier's medium.",
    ),
    "fetching was predicted to be slower": Explained(
        "Tiers were predicted to bring it later than computing takes.",
        "Nothing, or a faster tier; predict_loads: false fetches whatever it takes.",
    ),
    "there was no room to ask the tiers": Explained(
        "As many asked the tiers as may.",
        "Nothing: the request was computed, and the next one asks.",
    ),
    "no tier takes what was seen once": Explained(
        "A tier takes only what is stored a second time.",
        "Set the tier's admission to all.",
    ),
    "a rank on another machine lacks its part": Explained(
        "A rank on another machine lacks its part of the block.",
        "Look at that machine: `ucm store stat` of its slab, and agent.lost and tier.silent in its log.",
    ),
    "the store keeps no such things": Explained(
        "The store does not tell what became of its blocks; one of type null has none.",
        "Leave store.type out, or set it to slab.",
    ),
    "forgotten": Explained(
        "Somebody had it deleted.", "Look who calls `ucm store rm`, or asks to forget."
    ),
    "cleared": Explained(
        "Somebody had all of its key space deleted.",
        "Look who calls `ucm store rm`, or resets the connector's cache.",
    ),
    "the engine's own hit ends inside a block": Explained(
        "What the engine had itself ends inside a block of the store.",
        "Make the engine's blocks as large as those of its largest group, or smaller.",
    ),
    "the store is not asked for a while": Explained(
        "It had not answered before, and is tried again later.",
        "Look at the store's medium, and at store.bypassed in the log.",
    ),
    "the runtime of a rank has failed": Explained(
        "The runtime of a rank has failed; nothing is saved or loaded any more.",
        "Look for runtime.failed in the log, and restart the engine.",
    ),
    "it is not known what the ranks store under": Explained(
        "The weights may have changed, and not all ranks have said what they hold.",
        "Look for weights.doubted in the log; reset the engine's prefix cache.",
    ),
    "its adapter: changed": Explained(
        "The files of its adapter have changed since the engine started.",
        "Give each version of an adapter a path of its own; see immutable_adapters.",
    ),
    "its adapter: shared": Explained(
        "Two adapters have the same number.",
        "Give each adapter, and each version of one, a lora_int_id of its own.",
    ),
    "its adapter: unreadable": Explained(
        "The files of its adapter cannot be read.",
        "Give the adapter as a local directory.",
    ),
    "its adapter: crowded": Explained(
        "As many adapters were being read as may be.",
        "Look whether the disk hangs on which adapters are.",
    ),
    "its adapter: late": Explained(
        "The files of its adapter were not read in time.",
        "Nothing: the next request finds them read, unless their disk hangs.",
    ),
}
"""Of a miss, by the text of its detail, beside the words of ``ENDS``."""

_OTHER_MISS: Final = Explained(
    "A later release of ucm gave this reason.", "Use the `ucm` of the engine's release."
)
_OTHER_FAILURE: Final = Explained(
    "The load ended without its blocks; they were computed.",
    _LOOK,
)


def explain_miss(reason: str) -> Explained:
    """Return what a miss's reason means."""
    return MISSES.get(reason, _OTHER_MISS)


def explain_missed(missed: Missed) -> tuple[Explained, str]:
    """Return what a miss means, the remedy that fits best, and its detail in words."""
    general = explain_miss(missed.reason)
    try:
        detail = msgspec.json.decode(missed.detail)
    except (ValueError, RecursionError):
        return general, ""
    if not isinstance(detail, dict):
        return general, str(detail or "")[:_MOST_DETAIL]
    text = str(detail.pop("text", ""))
    age_s, slower = detail.pop("age_s", None), detail.pop("slower_tokens", None)
    if text == missed.reason:
        text = ""
    known = DETAILS.get(text) or ENDS.get(text) or Explained(_sentence(text), "")
    words = [known.meaning]
    if isinstance(age_s, int | float):
        words.append(f"That was {seconds_text(age_s)} before.")
    if slower:
        words.append(
            f"The {slower} tokens before it were computed: faster than loaded."
        )
    words += _differences(detail)
    explained = Explained(general.meaning, known.remedy or general.remedy)
    return explained, " ".join(filter(None, words))[:_MOST_DETAIL]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}." if text else ""


def _differences(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield how settings differ under which a block is stored."""
    for name, values in fields.items():
        if isinstance(values, list) and len(values) == 2:
            yield f"{name} is {values[0]!r} here, and {values[1]!r} where it is stored."
        else:
            yield f"{name}: {values}."


def explain_end(reason: str) -> Explained | None:
    """Return what the reason of a ticket's end means; None of one that is not known."""
    return ENDS.get(reason)


def explain_failure(reason: str) -> Explained:
    """Return what the reason of a failed load means."""
    return ENDS.get(reason, _OTHER_FAILURE)
