# SPDX-License-Identifier: Apache-2.0
"""What each reason of a miss, and of a load that failed, means, and what to do about it."""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["FAILED_LOADS", "MISSES", "Explained", "explain_failure", "explain_miss"]


class Explained(NamedTuple):
    """A reason in words."""

    meaning: str
    remedy: str


MISSES: Final[Mapping[str, Explained]] = {
    "never_offered": Explained(
        "Nobody has saved this block or tried to, as far as is remembered.",
        "Nothing: the first request with a prompt computes it. If it was asked before, "
        "compare the prompts: one other token changes all blocks behind it.",
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
        "Look at save_decoded, at kv_role, and at what the request asks of the store.",
    ),
    "failed": Explained(
        "Its save failed, or the load that this request had before.",
        "Look at the outcomes of saves: `ucm trace stats`; then at the store's medium.",
    ),
    "evicted": Explained(
        "The block was stored, and has made room for others since, or was deleted.",
        "Raise store.capacity, or retain what matters (`retain_seconds`). If the detail "
        "says forgotten or cleared, somebody had it deleted.",
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
        "The store was not asked: it had not answered before.",
        "Look at the store's medium, and at store.bypassed in the log.",
    ),
    "unavailable": Explained(
        "The store did not answer the look-up.",
        "Look at the store's medium, and whether the slab's files are still there.",
    ),
    "late": Explained(
        "What its key depends on, such as the weights, was not known in time.",
        "Look for weights.doubted in the log; a look-up waits for a moment only.",
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

FAILED_LOADS: Final[Mapping[str, Explained]] = {
    "overload": Explained(
        "The loads before it left too little time.",
        "Raise timeout.load, or use a faster medium.",
    ),
    "deadline": Explained(
        "The load's time was up.", "Look at which stage took long: `ucm trace show`."
    ),
    "corrupt": Explained(
        "A checksum did not hold; the block was computed instead.",
        "Check memory or disk of the slab.",
    ),
    "evicted": Explained(
        "The block was gone between look-up and load.", "Raise store.capacity."
    ),
    "unavailable": Explained("The store did not answer.", "Look at its medium."),
    "slow": Explained("The store answered too late.", "Look at its medium."),
    "store_hung": Explained(
        "A call of the store did not return.", "Look at its medium, then restart."
    ),
    "device": Explained(
        "The device refused or failed.", "Look at the error of its ticket."
    ),
    "stuck": Explained(
        "A device copy never ended.", "Look at the device; restart the engine."
    ),
}
"""By the words of ``load_failure`` that have more to say than their name."""

_OTHER_MISS: Final = Explained(
    "A later release of ucm gave this reason.", "Use the `ucm` of the engine's release."
)
_OTHER_FAILURE: Final = Explained(
    "The load ended without its blocks; they were computed.",
    "Look at the outcome and error of its tickets: `ucm trace show`.",
)


def explain_miss(reason: str) -> Explained:
    """Return what a miss's reason means."""
    return MISSES.get(reason, _OTHER_MISS)


def explain_failure(reason: str) -> Explained:
    """Return what the reason of a failed load means."""
    return FAILED_LOADS.get(reason, _OTHER_FAILURE)
