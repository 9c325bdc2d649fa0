# SPDX-License-Identifier: Apache-2.0
"""
Our claims on the engine's blocks.

A hold says that a save still reads some blocks. It belongs to one ticket and has one
part per rank. The parts of a hold and their arrows::

    (none) --take--> held --release-----> released
                     held --quarantine--> quarantined

A part leaves *held* exactly once; any other arrow is a bug of ours and raises
``LedgerError``. The hold itself ends when every part is released. With a quarantined
part (a device read that was never seen to end) it stays for good: nobody knows when
its blocks may be overwritten.
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
    quarantined: set[int] = attrs.Factory(set)


class HoldLedger:
    """
    All holds, by ticket, by life of a request and by block.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_by_block", "_by_life", "_holds", "_quarantined")

    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}
        self._by_block: dict[int, set[int]] = {}
        self._by_life: dict[tuple[str, int], set[int]] = {}
        self._quarantined = 0

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
        hold = self._part_of(transfer_id, rank)
        if hold.ranks_left or hold.quarantined:
            return False
        del self._holds[transfer_id]
        _drop(self._by_life, hold.life, transfer_id)
        for block_id in hold.block_ids:
            _drop(self._by_block, block_id, transfer_id)
        return True

    def quarantine(self, transfer_id: int, rank: int) -> None:
        """
        Take note that a rank's read was never seen to end; the hold stays for good.

        Raises:
            LedgerError: The rank does not hold, or not any more.
        """
        self._part_of(transfer_id, rank).quarantined.add(rank)
        self._quarantined += 1

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

    @property
    def held_blocks(self) -> int:
        """Distinct blocks that some ticket reads."""
        return len(self._by_block)

    @property
    def num_holds(self) -> int:
        """Holds that have not ended."""
        return len(self._holds)

    @property
    def quarantined(self) -> int:
        """Parts of holds that will never be released."""
        return self._quarantined

    def validate(self) -> None:
        """
        Compare the indexes with the holds; for tests.

        Raises:
            LedgerError: They disagree.
        """
        by_block: dict[int, set[int]] = {}
        by_life: dict[tuple[str, int], set[int]] = {}
        for transfer_id, hold in self._holds.items():
            if hold.ranks_left & hold.quarantined or not (
                hold.ranks_left or hold.quarantined
            ):
                raise LedgerError(f"transfer {transfer_id}: impossible {hold}")
            by_life.setdefault(hold.life, set()).add(transfer_id)
            for block_id in hold.block_ids:
                by_block.setdefault(block_id, set()).add(transfer_id)
        parts = sum(len(hold.quarantined) for hold in self._holds.values())
        if (by_block, by_life, parts) != (
            self._by_block,
            self._by_life,
            self._quarantined,
        ):
            raise LedgerError("the indexes of the ledger do not fit its holds")

    def _part_of(self, transfer_id: int, rank: int) -> _Hold:
        """Take a rank's part out of *held* and return its hold."""
        hold = self._holds.get(transfer_id)
        if hold is None or rank not in hold.ranks_left:
            raise LedgerError(
                f"rank {rank} does not hold the blocks of transfer {transfer_id}: "
                f"{hold or 'no such hold'}"
            )
        hold.ranks_left.remove(rank)
        return hold


def _drop(index: dict[_Key, set[int]], key: _Key, transfer_id: int) -> None:
    """Take a ticket out of an index, and its key when nobody is left."""
    index[key].remove(transfer_id)
    if not index[key]:
        del index[key]
