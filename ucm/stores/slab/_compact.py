# SPDX-License-Identifier: Apache-2.0
"""
Giving back what nobody needs: slots of the dead, extents without a block, their memory.

Blocks stay where they are. Memory goes back to the system only while nobody uses the slab:
an engine may have pinned it, and a device would go on writing to pages that are no longer
the slab's.
"""

import contextlib
import os
from pathlib import Path

import attrs
import numpy as np

from ucm.errors import StoreUnavailableError
from ucm.stores.slab._extents import NOBODY
from ucm.stores.slab._facts import facts_of
from ucm.stores.slab._files import ARENA, DATA
from ucm.stores.slab._layout import FREE
from ucm.stores.slab._locks import are_bound, entered
from ucm.stores.slab._memory import punch
from ucm.stores.slab._opened import OpenedSlab
from ucm.stores.slab._survey import SlabSurvey, told_as_store_error

__all__ = ["Compacted", "compact"]

_TIMEOUT_S = 10.0
_BLOCK_BYTES = 512  # as ``stat`` counts, whatever the file system


@attrs.frozen
class Compacted:
    """
    What was given back.

    Args:
        slots: Reserved ones whose writers have died.
        extents: That had no block, and are nobody's now.
        nbytes: Of memory, to the system.
        kept_because: Why no memory went back to the system; empty if some could.
    """

    slots: int
    extents: int
    nbytes: int
    kept_because: str


def compact(path: Path, *, memory: bool) -> Compacted:
    """
    Give back what nobody needs of a slab; others may use it meanwhile.

    Args:
        path: Its directory.
        memory: Also the memory of extents that nobody has.

    Raises:
        StoreUnavailableError: There is no slab that is ours, or others held a lock for
            too long.
    """
    extents = 0
    with SlabSurvey(path) as survey, told_as_store_error(path):
        slots = sum(each.reserved_by_dead for each in facts_of(survey).classes)
        for surveyed in survey.classes:
            opened = OpenedSlab(
                path,
                surveyed.geometry,
                index_only=True,
                open_timeout=_TIMEOUT_S,
                lock_timeout=_TIMEOUT_S,
                joins_only=True,
            )  # which frees what the dead had reserved
            with contextlib.closing(opened):
                extents += _release_empty(opened)
        nbytes, kept = _return_memory(survey) if memory else (0, "")
    return Compacted(slots, extents, nbytes, kept)


def _release_empty(opened: OpenedSlab) -> int:
    """Make those extents of a class nobody's that have no block, and nobody writes to."""
    owners, geometry, released = opened.arena.owners, opened.geometry, 0
    for extent in np.flatnonzero(owners == geometry.slot_bytes).tolist():
        slots = geometry.slots_of(extent)
        if (opened.index.state[slots] != FREE).any():
            continue
        with opened.arena.lock.held():
            if owners[extent] == geometry.slot_bytes and opened.index.withdraw(
                slots, evicts=False
            ):
                owners[extent] = NOBODY
                released += 1
    return released


def _return_memory(survey: SlabSurvey) -> tuple[int, str]:
    with (
        contextlib.ExitStack() as end,
        entered(survey.path, _TIMEOUT_S, makes=False) as (directory, door),
    ):
        end.callback(door.close)
        if are_bound(survey.arena_fd):
            return 0, "the slab is in use, and a device may have its memory pinned"
        if not os.path.samestat(os.fstat(survey.fd), os.fstat(directory.fd)):
            raise StoreUnavailableError(f"{survey.path} was replaced meanwhile")
        arena_fd, data_fd = directory.open(ARENA), directory.open(DATA)
        end.callback(os.close, arena_fd)
        end.callback(os.close, data_fd)
        return _punch(survey, arena_fd, data_fd), ""


def _punch(survey: SlabSurvey, arena_fd: int, data_fd: int) -> int:
    """Give back the memory of what nobody has; return how much that was."""
    owners, _ = survey.arena()
    size, end = survey.cut.extent_bytes, survey.cut.data_bytes
    before = os.fstat(data_fd).st_blocks
    for extent in np.flatnonzero(owners == NOBODY).tolist():
        start = extent * size
        os.pwrite(arena_fd, b"\0", owners.nbytes + extent)  # it is not populated
        punch(data_fd, start, min(size, end - start))
    return _BLOCK_BYTES * (before - os.fstat(data_fd).st_blocks)
