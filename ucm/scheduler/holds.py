# SPDX-License-Identifier: Apache-2.0
"""
Our claims on the engine's blocks.

A hold says that a save still reads some blocks. It belongs to one ticket, and so to
every life of which the ticket carries blocks, and has one part per rank. The parts of a hold and their arrows::

    (none) --take--> held --release-----> released
                     held --quarantine--> quarantined

A part leaves *held* exactly once; any other arrow is a bug of ours and raises
``LedgerError``. The hold itself ends when every part has left. A quarantined part is a
device read that was never seen to end. It keeps the engine's blocks no longer: what it
still reads goes into slots that are never committed (docs/decisions/0008-quarantine.md).
"""

from collections.abc import Collection, Iterable

import attrs

from ucm.errors import LedgerError
from ucm.layout import KVLayout
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.requests import StepFacts

__all__ = ["HoldLedger", "Readers"]


@attrs.define
class _Hold:
    lives: tuple[tuple[str, int], ...]
    block_ids: tuple[int, ...]
    ranks_left: set[int]
    nbytes: int
    began: float
    is_quarantined: bool = False


@attrs.frozen
class Readers:
    """
    The tickets that read blocks which a step writes.

    Args:
        fenced: Those whose blocks the forward pass, or a load, overwrites.
        overwritten: Those of which the engine overwrites blocks by itself.
        lost: Of those of several lives, the positions of such blocks; not where it is
            all of them.
    """

    fenced: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    lost: dict[int, tuple[int, ...]] = attrs.Factory(dict)

    def __bool__(self) -> bool:
        return bool(self.fenced or self.overwritten)


_NOBODY = Readers()


class HoldLedger:
    """
    All holds, by ticket, by life of a request and by block.

    Used on the scheduler's thread only.
    """

    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}
        self._by_block: dict[int, int] = {}
        """The last ticket that reads each block."""
        self._shadowed: set[int] = set()
        """Tickets of which others read a block as well; they are looked at apart."""
        self._by_life: dict[tuple[str, int], int] = {}
        """How many tickets."""
        self.held_nbytes = 0
        """Bytes of all holds, for each rank once."""
        self.num_holds = 0
        """Holds that have not ended."""
        self.quarantined = 0
        """Holds that were given up on some rank, since the start."""

    def take(
        self,
        transfer_id: int,
        lives: Iterable[tuple[str, int]],
        block_ids: Iterable[int],
        ranks: Iterable[int],
        nbytes: int = 0,
        now: float = 0.0,
    ) -> None:
        """
        Hold blocks for a save until every rank has released them.

        Args:
            transfer_id: The ticket.
            lives: Request ids and generations.
            block_ids: What the ticket reads, in its order.
            ranks: Who reads it.
            nbytes: How much it is.
            now: The time; never less than the one before.

        Raises:
            LedgerError: The ticket holds already, or holds nothing.
        """
        hold = _Hold(tuple(lives), tuple(block_ids), set(ranks), nbytes, now)
        if transfer_id in self._holds:
            raise LedgerError(f"transfer {transfer_id} holds its blocks already")
        if not hold.block_ids or not hold.ranks_left:
            raise LedgerError(f"transfer {transfer_id} would hold nothing")
        self._holds[transfer_id] = hold
        self.num_holds += 1
        self.held_nbytes += nbytes
        for life in hold.lives:
            self._by_life[life] = self._by_life.get(life, 0) + 1
        held = self._by_block
        if not held.keys().isdisjoint(hold.block_ids):
            self._shadowed.update(held[each] for each in hold.block_ids if each in held)
        held.update(dict.fromkeys(hold.block_ids, transfer_id))

    def release(self, transfer_id: int, rank: int) -> None:
        """
        Take note that a rank reads the blocks no more; with the last one the hold ends.

        Raises:
            LedgerError: The rank does not hold, or not any more.
        """
        hold = self._holds.get(transfer_id)
        if hold is None or rank not in hold.ranks_left:
            raise LedgerError(
                f"rank {rank} does not hold the blocks of transfer {transfer_id}: "
                f"{hold or 'no such hold'}"
            )
        hold.ranks_left.remove(rank)
        if hold.ranks_left:
            return
        del self._holds[transfer_id]
        self.num_holds -= 1
        self.held_nbytes -= hold.nbytes
        for life in hold.lives:
            self._by_life[life] -= 1
            if not self._by_life[life]:
                del self._by_life[life]
        held = self._by_block
        for block_id in hold.block_ids:
            if held.get(block_id) == transfer_id:
                del held[block_id]
        self._shadowed.discard(transfer_id)
        for other in self._shadowed:
            for block_id in self._holds[other].block_ids:
                held.setdefault(block_id, other)

    def quarantine(self, transfer_id: int, rank: int) -> None:
        """
        Take note that a rank's read was never seen to end; it is not waited for.

        Raises:
            LedgerError: The rank does not hold, or not any more.
        """
        hold = self._holds.get(transfer_id)
        self.release(transfer_id, rank)
        if hold is not None and not hold.is_quarantined:
            hold.is_quarantined = True
            self.quarantined += 1

    def is_held(self, transfer_id: int) -> bool:
        """Return whether some rank has yet to release the ticket's blocks."""
        return transfer_id in self._holds

    def holds_of(self, life: tuple[str, int]) -> int:
        """Return how many tickets hold blocks for one life of a request."""
        return self._by_life.get(life, 0)

    def readers_of(self, block_ids: Collection[int]) -> set[int]:
        """Return the tickets that may still read one of the blocks."""
        held = self._by_block
        readers = set(map(held.__getitem__, held.keys() & block_ids))
        for transfer_id in self._shadowed:
            if any(map(block_ids.__contains__, self._holds[transfer_id].block_ids)):
                readers.add(transfer_id)
        return readers

    def readers_in(
        self, facts: StepFacts, layout: KVLayout, loads: Iterable[SpanOrder] = ()
    ) -> Readers:
        """
        Return which tickets read what a step writes, its loads included.

        Apart are those that also read what the engine overwrites by itself.
        """
        if not self._holds:
            return _NOBODY
        written = facts.written_blocks(layout, loads)
        torn = self.readers_of(facts.overwritten)
        fenced = self.readers_of(written) - torn
        if not (fenced or torn):
            return _NOBODY
        lost = {}
        for transfer_id in sorted(fenced | torn):
            hold = self._holds[transfer_id]
            if len(hold.lives) > 1:
                positions = tuple(
                    at
                    for at, block_id in enumerate(hold.block_ids)
                    if block_id in written
                )
                if len(positions) < len(hold.block_ids):
                    lost[transfer_id] = positions
        return Readers(tuple(sorted(fenced)), tuple(sorted(torn)), lost)

    @property
    def held_blocks(self) -> int:
        """Distinct blocks that some ticket reads."""
        return len(self._by_block)

    @property
    def oldest(self) -> float | None:
        """When the oldest hold began that has not ended, None without any; any thread."""
        holds = list(self._holds.values())  # at once, whatever the scheduler does
        return holds[0].began if holds else None
