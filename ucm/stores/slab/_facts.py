# SPDX-License-Identifier: Apache-2.0
"""What a slab is and how it fares, in numbers, for people; see the survey module."""

from pathlib import Path

import attrs
import numpy as np

from ucm.stores.slab._extents import NOBODY
from ucm.stores.slab._layout import MOST, NUM_TENANTS, RESERVED, Word
from ucm.stores.slab._locks import are_bound, holders_of, taken_bytes
from ucm.stores.slab._survey import ClassSurvey, SlabSurvey

__all__ = ["ClassFacts", "SlabFacts", "facts_of"]

_MOST_TENANTS = 16
_LOCKS = Path("/proc/locks")


@attrs.frozen(kw_only=True)
class ClassFacts:
    """One size of slots. Totals are since the slab was made."""

    slot_bytes: int
    extents: int
    slots: int
    """That there is memory for."""
    free_slots: int
    committed_blocks: int
    reserved_slots: int
    """That somebody is writing, or was when it died."""
    block_bytes: int
    """Of all committed blocks together."""
    retained_blocks: int
    evicted_blocks_total: int
    curbed_blocks_total: int
    over_share_blocks_total: int
    users: int
    """Who has joined and lives; this command does not join."""
    dead_writers: tuple[int, ...]
    """Owners that are gone and have left slots reserved."""
    reserved_by_dead: int
    tenants: tuple[tuple[int, int], ...]
    """Place in the table of tenants and slots, of those with most."""
    num_tenants: int
    locked_by: tuple[int, ...]
    """Processes that hold the lock of the index right now, as far as one can see."""
    is_unfinished: bool
    """A change is going on, or whoever began it died: the next one to change finishes."""


@attrs.frozen(kw_only=True)
class SlabFacts:
    """All of a slab."""

    path: str
    revision: int
    """How often it was cut anew."""
    data_bytes: int
    extent_bytes: int
    extents: int
    populated_extents: int
    populated_bytes: int
    unowned_extents: int
    is_in_use: bool
    locked_by: dict[str, tuple[int, ...]]
    """Processes that hold the directory's and the arena's lock right now."""
    keyspaces: int
    """That are described."""
    problem: str
    """Why key spaces are not described."""
    classes: tuple[ClassFacts, ...]


def facts_of(survey: SlabSurvey) -> SlabFacts:
    """
    Count what there is.

    Raises:
        StoreUnavailableError: A file was shortened, or cannot be asked.
    """
    owners, populated = survey.arena()
    cut = survey.cut
    keyspaces, problem = survey.keyspaces()
    there = int(np.count_nonzero(populated))
    return SlabFacts(
        path=str(survey.path),
        revision=survey.manifest.revision,
        data_bytes=cut.data_bytes,
        extent_bytes=cut.extent_bytes,
        extents=cut.num_extents,
        populated_extents=there,
        populated_bytes=min(there * cut.extent_bytes, cut.data_bytes),
        unowned_extents=int(np.count_nonzero(owners == NOBODY)),
        is_in_use=are_bound(survey.arena_fd),
        locked_by={
            "directory": holders_of(survey.fd, _LOCKS),
            "arena": holders_of(survey.arena_fd, _LOCKS),
        },
        keyspaces=len(keyspaces),
        problem=problem,
        classes=tuple(
            _class_facts(each, int(np.count_nonzero(owners == _size_of(each))))
            for each in survey.classes
        ),
    )


def _size_of(surveyed: ClassSurvey) -> int:
    return surveyed.geometry.slot_bytes


def _class_facts(surveyed: ClassSurvey, extents: int) -> ClassFacts:
    header = surveyed.header()
    alive = set(taken_bytes(surveyed.fd))
    nbytes = retained = 0
    for blocks in surveyed.blocks():
        nbytes += int(blocks.records["nbytes"].sum())
        retained += int(np.count_nonzero(blocks.ages_ns < 0))
    writers = _writers(surveyed)
    dead = {owner: count for owner, count in writers.items() if owner not in alive}
    shares = surveyed.read("shares", 0, NUM_TENANTS)
    places = np.flatnonzero(shares > 0)
    most = places[np.argsort(-shares[places], kind="stable")][:_MOST_TENANTS]
    counts = [int(header[word]) for word in _COUNTED]
    free, committed, reserved = counts
    return ClassFacts(
        slot_bytes=_size_of(surveyed),
        extents=extents,
        slots=sum(counts),
        free_slots=free,
        committed_blocks=committed,
        reserved_slots=reserved,
        block_bytes=nbytes,
        retained_blocks=retained,
        evicted_blocks_total=int(header[Word.NUM_EVICTED]),
        curbed_blocks_total=int(header[Word.NUM_CURBED]),
        over_share_blocks_total=int(header[Word.NUM_OVER_SHARE]),
        users=len(alive),
        dead_writers=tuple(sorted(dead)),
        reserved_by_dead=sum(dead.values()),
        tenants=tuple((int(place), int(shares[place])) for place in most),
        num_tenants=len(places),
        locked_by=holders_of(surveyed.fd, _LOCKS),
        is_unfinished=bool(header[Word.VERSION] & 1),
    )


_COUNTED = (Word.NUM_FREE, Word.NUM_COMMITTED, Word.NUM_RESERVED)


def _writers(surveyed: ClassSurvey) -> dict[int, int]:
    """Return who has how many slots reserved."""
    found: dict[int, int] = {}
    for start in range(0, surveyed.geometry.num_slots, MOST):
        states = surveyed.read("states", start, MOST)[
            : surveyed.geometry.num_slots - start
        ]
        if (states == RESERVED).any():
            records = surveyed.read("records", start, len(states))
            owners, counts = np.unique(
                records["owner"][states == RESERVED], return_counts=True
            )
            for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
                found[owner] = found.get(owner, 0) + count
    return found
