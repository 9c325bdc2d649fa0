# SPDX-License-Identifier: Apache-2.0
"""
Our claims on the engine's blocks.

A hold says that a save still reads some blocks. It belongs to one ticket and has one
part per rank. The parts of a hold and their arrows::

    (none) --take--> held --release-----> released
                     held --quarantine--> quarantined

A part leaves *held* exactly once; any other arrow is a bug of ours and raises
``LedgerError``. The hold itself ends when every part has left. A quarantined part is a
device read that was never seen to end. It keeps the engine's blocks no longer: what it
still reads goes into slots that are never committed (docs/decisions/0008-quarantine.md).
"""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import attrs

from ucm.errors import LedgerError

__all__ = ["HoldLedger"]

_Key = TypeVar("_Key", bound=Hashable)


@attrs.define
class _Hold:
    life: tuple[str, int]
    block_ids: frozenset[int]
    ranks_left: set[int]
    is_quarantined: bool = False


class HoldLedger:
    """
    All holds, by ticket, by life of a request and by block.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_by_block", "_by_life", "_holds", "quarantined")

    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}
        self._by_block: dict[int, set[int]] = {}
        self._by_life: dict[tuple[str, int], set[int]] = {}
        self.quarantined = 0
        """Holds that were given up on some rank, since the start."""

    def take(
        self,
        transfer_id: int,
        life: tuple[str, int],
        block_ids: Iterable[int],
        ranks: Iterable[int],
    ) -> None:
        """
        Hold blocks for a save until every rank has released them.

        Args:
            transfer_id: The ticket.
            life: Request id and generation.
            block_ids: What the ticket reads.
            ranks: Who reads it.

        Raises:
            LedgerError: The ticket holds already, or holds nothing.
        """
        hold = _Hold(life, frozenset(block_ids), set(ranks))
        if transfer_id in self._holds:
            raise LedgerError(f"transfer {transfer_id} holds its blocks already")
        if not hold.block_ids or not hold.ranks_left:
            raise LedgerError(f"transfer {transfer_id} would hold nothing")
        self._holds[transfer_id] = hold
        self._by_life.setdefault(life, set()).add(transfer_id)
        for block_id in hold.block_ids:
            self._by_block.setdefault(block_id, set()).add(transfer_id)

    def release(self, transfer_id: int, rank: int) -> bool:
        """
        Take note that a rank reads the blocks no more.

        Returns:
            Whether it was the last rank, so that the hold has ended.

        Raises:
            LedgerError: The rank does not hold, or not any more.
        """
        return self._leave(transfer_id, rank) is None

    def quarantine(self, transfer_id: int, rank: int) -> bool:
        """
        Take note that a rank's read was never seen to end; it is not waited for.

        Returns:
            Whether it was the last rank, so that the hold has ended.

        Raises:
            LedgerError: The rank does not hold, or not any more.
        """
        hold = self._holds.get(transfer_id)
        left = self._leave(transfer_id, rank)
        if hold is not None and not hold.is_quarantined:
            hold.is_quarantined = True
            self.quarantined += 1
        return left is None

    def is_held(self, transfer_id: int) -> bool:
        """Return whether some rank has yet to release the ticket's blocks."""
        return transfer_id in self._holds

    def holds_of(self, life: tuple[str, int]) -> frozenset[int]:
        """Return the tickets that hold blocks for one life of a request."""
        return frozenset(self._by_life.get(life, ()))

    def readers_of(self, block_ids: Iterable[int]) -> set[int]:
        """Return the tickets that may still read one of the blocks."""
        readers: set[int] = set()
        for block_id in block_ids:
            readers.update(self._by_block.get(block_id, ()))
        return readers

    def readers_apart(
        self, written: Iterable[int], overwritten: Iterable[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the readers of blocks, and apart those that also read overwritten ones."""
        torn = self.readers_of(overwritten)
        return tuple(sorted(self.readers_of(written) - torn)), tuple(sorted(torn))

    @property
    def held_blocks(self) -> int:
        """Distinct blocks that some ticket reads."""
        return len(self._by_block)

    @property
    def num_holds(self) -> int:
        """Holds that have not ended."""
        return len(self._holds)

    def validate(self) -> None:
        """
        Compare the indexes with the holds; for tests.

        Raises:
            LedgerError: They disagree.
        """
        by_block: dict[int, set[int]] = {}
        by_life: dict[tuple[str, int], set[int]] = {}
        for transfer_id, hold in self._holds.items():
            if not hold.ranks_left:
                raise LedgerError(f"transfer {transfer_id}: impossible {hold}")
            by_life.setdefault(hold.life, set()).add(transfer_id)
            for block_id in hold.block_ids:
                by_block.setdefault(block_id, set()).add(transfer_id)
        if (by_block, by_life) != (self._by_block, self._by_life):
            raise LedgerError("the indexes of the ledger do not fit its holds")

    def _leave(self, transfer_id: int, rank: int) -> _Hold | None:
        """Take a rank's part out of *held*; return the hold unless it has ended."""
        hold = self._holds.get(transfer_id)
        if hold is None or rank not in hold.ranks_left:
            raise LedgerError(
                f"rank {rank} does not hold the blocks of transfer {transfer_id}: "
                f"{hold or 'no such hold'}"
            )
        hold.ranks_left.remove(rank)
        if hold.ranks_left:
            return hold
        del self._holds[transfer_id]
        _drop(self._by_life, hold.life, transfer_id)
        for block_id in hold.block_ids:
            _drop(self._by_block, block_id, transfer_id)
        return None


def _drop(index: dict[_Key, set[int]], key: _Key, transfer_id: int) -> None:
    """Take a ticket out of an index, and its key when nobody is left."""
    index[key].remove(transfer_id)
    if not index[key]:
        del index[key]
