# SPDX-License-Identifier: Apache-2.0
"""
Slots side by side, which take one request to a drive. Pure.

What is put in one batch lies side by side where there is room, and is fetched in the order in
which it was put. Small blocks then cost as few requests as large ones.
"""

from collections.abc import Sequence
from typing import TypeVar

from ucm.backends.disk._extent import Slot
from ucm.backends.disk._stamp import PAGE

__all__ = ["cut_runs", "tell_each"]

_RUN_PAGES = 256
"""Of one request; a larger block is one by itself."""
_With = TypeVar("_With")
_Told = TypeVar("_Told")


def cut_runs(
    pairs: Sequence[tuple[Slot, _With]], num_runs: int
) -> list[list[tuple[Slot, _With]]]:
    """
    Cut a batch into runs of slots side by side.

    Where there are so many slots, there are at least so many runs: requests in flight are worth
    more than long ones.
    """
    total = sum(slot.extent.mark.pages + 1 for slot, _ in pairs)
    most = min(_RUN_PAGES, total // num_runs)
    runs: list[list[tuple[Slot, _With]]] = []
    pages = 0
    for at, (slot, other) in enumerate(pairs):
        size = slot.extent.mark.pages + 1
        before = pairs[at - 1][0]
        is_next = before.extent is slot.extent and (
            before.place + size * PAGE == slot.place
        )
        if not at or not is_next or pages + size > most:
            runs.append([])
            pages = 0
        runs[-1].append((slot, other))
        pages += size
    return runs


def tell_each(
    runs: Sequence[Sequence[object]], told: Sequence[list[_Told] | None], default: _Told
) -> list[_Told]:
    """Return what became of each slot of all runs; *default* where a run was not begun."""
    return [
        one
        for run, ends in zip(runs, told, strict=True)
        for one in (ends or [default] * len(run))
    ]
