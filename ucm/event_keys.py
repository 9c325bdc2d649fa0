# SPDX-License-Identifier: Apache-2.0
"""The keys of the log's lines: unit and meaning of each, the same wherever it stands."""

from collections.abc import Mapping
from typing import Final

__all__ = ["COMMON", "KEYS"]

_OF_TICKET: Final = (
    "Of a ticket `[stage, begin_s, end_s]`: seconds after `accepted_s`, of each stage its "
    "first begin and its last end, or the ticket's if it had none."
)
_OF_RING: Final = (
    "Of a ring `[t_s, ticket, stage, begin or end]`: seconds before the line."
)
_TICKET_ENDS: Final = (
    "Of a ticket `committed`, `skipped`, `refused`, `failed` or `cancelled`."
)
_REQUEST_ENDS: Final = "Of a request `finished` or `aborted`."

COMMON: Final = ("v", "event", "timestamp_s", "level", "role", "rank")
"""Keys of any line; ``rank`` where a process has one."""

KEYS: Final[Mapping[str, tuple[str, str]]] = {
    # Any line.
    "v": ("number", "Version of this table."),
    "event": ("name", "What has happened."),
    "timestamp_s": ("unix s", "When the line was written."),
    "level": ("word", "`debug`, `info`, `warning` or `error`."),
    "role": ("name", "Which process: `scheduler`, `worker-0`, `cache-0`, `agent`."),
    "rank": ("number", "Which of the engine's ranks."),
    # Tickets.
    "transfer_id": ("number", "The ticket; the same on all ranks."),
    "ticket": ("number", "The same."),
    "hold_id": ("number", "The ticket for which blocks are held: `transfer_id`."),
    "direction": ("word", "`save` or `load`."),
    "request_id": ("id", "Whose, where there is one owner."),
    "generation": ("number", "Which stay of any request in the engine's memory."),
    "requests": ("ids", "Whose blocks; at most four are named."),
    "num_requests": ("number", "Of how many requests."),
    "group": ("number", "The engine's group of layers."),
    "step": ("number", "The engine's step that ordered it."),
    "stage": ("name", "Of the ticket's way: `gather`, `fetch`, ..., or `queue`."),
    "stages": ("names", "Where the ticket's rows are."),
    "rows": ("number or ids", "How many rows, or which, if not all."),
    "edges": ("lists", f"{_OF_TICKET} {_OF_RING}"),
    "accepted_s": ("unix s", "When the ticket was asked for."),
    "released_s": ("s", "From then until the engine had its blocks back."),
    "total_s": ("s", "From then until its end."),
    "elapsed_s": ("s", "How long it took."),
    "<stage>_s": ("s", "Time in one stage, added up over rows."),
    "blocks": ("blocks", "Of the engine."),
    "committed": ("blocks", "Moved, and counting."),
    "skipped": ("blocks", "Not moved: the store had them."),
    "lost": ("blocks", "Overwritten by the engine before they counted."),
    "torn": ("word", "Why the copy does not count; empty if it does."),
    "nbytes": ("bytes", "How much; of a store, how much it has by now."),
    "queue_tickets": ("tickets", "That wait in the queue."),
    "queue_nbytes": ("bytes", "Of these."),
    "ranks_left": ("number", "Ranks that have not released the blocks."),
    "left_out": ("lines", "That were alike and are not written."),
    # Requests.
    "life": ("number", "How often the request has got blocks."),
    "trace_id": ("hex", "Of the W3C trace that the request belongs to."),
    "began_s": ("unix s", "When the request was first looked at."),
    "prompt_tokens": ("tokens", "Of its prompt."),
    "computed_tokens": ("tokens", "That the engine's own cache had."),
    "external_tokens": ("tokens", "Found beyond these, and being loaded."),
    "found_tokens": ("tokens", "Found beyond these by one look-up."),
    "wanted_tokens": ("tokens", "Of whole blocks beyond these."),
    "block": ("number", "Index of the first block that is missing."),
    "detail": ("object", "What else is known; of another key space, what differs."),
    "matched_tokens": ("tokens", "The same, over all its stays."),
    "loaded_tokens": ("tokens", "Of these, that it went on with."),
    "saved_blocks": (
        "blocks",
        "Of it that its saves left in the store, or found there.",
    ),
    "dropped_blocks": ("blocks", "Complete blocks of it that no save has stored."),
    "unsettled_blocks": ("blocks", "Of it whose saves were not over at the line."),
    "preemptions": ("number", "How often the engine took its blocks away."),
    "load_s": ("s", "That it waited for loads."),
    "hit_tokens": (
        "object",
        "Tokens that were found, by where they were: `slab`, or a tier's `medium`.",
    ),
    "load_failure": ("word", "Why a load of it came to nothing."),
    "miss": ("word", "Why its look-up fell short."),
    "first_missing": ("number", "Index of the first block that was missing."),
    # How it came out.
    "outcome": ("word", f"{_TICKET_ENDS} {_REQUEST_ENDS}"),
    "reason": ("word", "Why; one of a closed list where a metric has it as a label."),
    "error": ("text", "For people."),
    "equivalent": ("object", "The same as settings of ours."),
    "untranslated": ("object", "Settings that have no equivalent, and why."),
    "remedy": ("text", "What to do about it."),
    # Processes.
    "store": ("name", "Class of the store."),
    "device": ("name", "Class of the device layer."),
    "model": ("name", "Of the accelerator."),
    "copies": ("word", "`batched` or `one by one`."),
    "driver_cuda": ("version", "Of the driver."),
    "checksums": (
        "text",
        "Who computes those of whole blocks: device or host, and why.",
    ),
    "torch_cuda": ("version", "For which torch was built."),
    "torch_npu": ("version", "Of torch_npu."),
    "cann": ("version", "Of CANN."),
    "mode": ("name", "How blocks are saved and loaded."),
    "cpus": ("list", "CPUs of the thread."),
    "abandoned": ("tickets", "That were open at the end."),
    "quiet": (
        "flag",
        "Whether nothing uses the engine's or the store's memory any more.",
    ),
    "holds": ("number", "Saves whose blocks were still held."),
    "total_bytes": ("bytes", "What the store is to have."),
    "seconds": ("s", "How long."),
    "media": ("words", "Of the tiers, in the order in which they are asked."),
    "medium": ("word", "Of a tier."),
    "tier": ("number", "Which of `tiers`, from 0."),
    "server": (
        "name",
        "Of one of a tier's servers, such as `10.0.0.1:6379`; of one of several drives its directory.",
    ),
    "pid": ("number", "Of the process."),
    "lines": ("lines", "That could not be written in time."),
    "totals": ("object", "By metric and labels: the increase since the last summary."),
    "key": ("name", "Of a setting or a wish; of a block, in hex: its first part's."),
    "value": ("any", "What it was given."),
    "path": ("path", "Of the adapter."),
    "counter": ("name", "Of the metric that counts the case."),
    "epoch": ("number", "How often the weights may have changed."),
    "weights": ("text", "Which weights they are."),
}
"""Unit and meaning of each key."""
