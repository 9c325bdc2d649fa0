# SPDX-License-Identifier: Apache-2.0
"""
Slots side by side, which take one request to a drive. Pure.

What is put in one batch lies side by side where there is room, and is fetched in the order in
which it was put. Small blocks then cost as few requests as large ones.
"""

from collections.abc import Sequence
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from ucm.backends.abc import Fetched, Sealed, Verdict
from ucm.backends.disk._extent import Slot
from ucm.backends.disk._stamp import PAGE, checksums_in, stamps_of
from ucm.backends.envelope import GARBAGE, headers_for

__all__ = ["cut_runs", "judged_by", "largest_of", "stamps_for", "tell_each"]

_LEAST_PAGES, _MOST_PAGES = 256, 1024
"""Of data of one request, where blocks are side by side; a larger one is one by itself. Each costs a
thread some Python, and a drive is as busy with few large ones: the kernel cuts them for it."""
_MOST_BLOCKS = 512
"""Of one request: each is two pieces of memory, of the 1024 that a call may have (``IOV_MAX``)."""
_With = TypeVar("_With")
_Told = TypeVar("_Told")


def cut_runs(
    pairs: Sequence[tuple[Slot, _With]], num_runs: int
) -> list[list[tuple[Slot, _With]]]:
    """
    Cut a batch into runs of slots side by side.

    Where there are so many slots, there are at least so many runs, of like size: requests in flight
    are worth more than long ones. But where they are half as long as they may be at least they are
    made as long as that.
    """
    fair = sum([slot.extent.mark.pages for slot, _ in pairs]) // num_runs
    most = min(max(fair, _LEAST_PAGES), _MOST_PAGES)
    if 2 * fair < _LEAST_PAGES:
        most = fair
    runs: list[list[tuple[Slot, _With]]] = []
    pages = 0
    for at, (slot, other) in enumerate(pairs):
        size = slot.extent.mark.pages
        before = pairs[at - 1][0]
        is_next = before.extent is slot.extent and (
            before.place + (size + 1) * PAGE == slot.place
        )
        is_full = at and (pages + size > most or len(runs[-1]) == _MOST_BLOCKS)
        if not at or not is_next or is_full:
            runs.append([])
            pages = 0
        runs[-1] += [(slot, other)]
        pages += size
    return runs


def largest_of(runs: Sequence[Sequence[tuple[Slot, object]]]) -> int:
    """Return how many bytes the largest run has, but for stamps; 0 without one."""
    sizes = [len(run) * run[0][0].extent.mark.pages for run in runs]
    return max(sizes, default=0) * PAGE


def tell_each(
    runs: Sequence[Sequence[object]], told: Sequence[list[_Told] | None], default: _Told
) -> list[_Told]:
    """Return what became of each slot of all runs; *default* where a run was not begun."""
    return [
        one
        for run, ends in zip(runs, told, strict=True)
        for one in (ends or [default] * len(run))
    ]


def stamps_for(
    run: Sequence[tuple[Slot, Sealed]], firsts: Sequence[memoryview]
) -> list[bytes]:
    """Return the page of each stamp of slots side by side, of which the first pages are given."""
    headers = headers_for([block for _, block in run])
    stamps = stamps_of(
        *(headers, run[0][0].extent.mark.serial),
        [slot.place for slot, _ in run],
        [slot.used for slot, _ in run],
        list(map(xxh3_64_intdigest, firsts)),
    )
    return [stamp.ljust(PAGE, b"\0") for stamp in stamps]


def judged_by(slots: Sequence[Slot], pages: Sequence[memoryview]) -> list[Fetched]:
    """Return what the pages of stamps say of the blocks that are to be in slots."""
    found = checksums_in(
        pages,
        [slot.place for slot in slots],
        [slot.key for slot in slots],
        [slot.nbytes for slot in slots],
    )
    return [GARBAGE if one is None else Fetched(Verdict.DONE, one) for one in found]
