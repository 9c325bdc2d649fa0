# SPDX-License-Identifier: Apache-2.0
"""What a step saves of one request, on its way into tickets. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ucm.layout import GroupLayout, KVLayout
from ucm.scheduler.requests import NULL_BLOCK

__all__ = ["Run", "Share", "Stay", "joined", "run_of", "there"]


class Stay(msgspec.Struct, frozen=True, gc=False):
    """
    A life of a request, as its saves name it.

    Args:
        request_id: Whose.
        generation: Which.
        moment: When its first block counts as used; see ``Uses``.
        tenant: Whose share of the store its blocks take.
    """

    request_id: str
    generation: int
    moment: int = 0
    tenant: int = 0


class Run(msgspec.Struct, frozen=True, gc=False):
    """
    Consecutive blocks of a request on their way into orders.

    Args:
        start: Position of the first in the request's block table.
        block_ids: Slots in the engine's pool.
        hashes: As many; the engine's.
    """

    start: int
    block_ids: Sequence[int]
    hashes: Sequence[bytes]

    def part(self, start: int, stop: int) -> "Run":
        """Return those from the *start*-th to before the *stop*-th, some if few."""
        return Run(
            self.start + start, self.block_ids[start:stop], self.hashes[start:stop]
        )

    @property
    def at(self) -> range:
        """Their positions."""
        return range(self.start, self.start + len(self.block_ids))

    def then(self, other: "Run") -> "Run":
        """Return both as one; the other one's blocks follow."""
        ids, hashes = [*self.block_ids, *other.block_ids], [*self.hashes, *other.hashes]
        return Run(self.start, ids, hashes)

    def without(self, unwanted: Iterable[bool]) -> Iterator["Run"]:
        """Yield the runs that are left where some blocks are not wanted."""
        positions = [
            range(at, at + 1) for at, is_out in enumerate(unwanted) if not is_out
        ]
        for each in joined(positions):
            yield self.part(each.start, each.stop)


Share = tuple[Stay, Run]
"""A life, and consecutive blocks that a step saves of it in one group."""


def run_of(
    layout: KVLayout,
    group: GroupLayout,
    at: range,
    table: Sequence[int],
    hashes: Sequence[bytes],
) -> Run:
    """Return blocks of a request by their positions in a group's table."""
    named = layout.hashes_of(group, hashes, at.start, at.stop)
    return Run(at.start, table[at.start : at.stop], named)


def joined(ranges: Iterable[range]) -> list[range]:
    """Return the same positions, in ascending order, with neighbours put together."""
    runs: list[range] = []
    for each in ranges:
        if runs and runs[-1].stop == each.start:
            runs[-1] = range(runs[-1].start, each.stop)
        else:
            runs.append(each)
    return runs


def there(table: Sequence[int], run: range) -> list[range]:
    """Return the runs of blocks that a table has within one run."""
    if not run:
        return []
    if NULL_BLOCK not in table[run.start : run.stop]:
        return [run]
    return joined(range(i, i + 1) for i in run if table[i] != NULL_BLOCK)
