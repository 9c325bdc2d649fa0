# SPDX-License-Identifier: Apache-2.0
"""
Where the engine's thread waits for tickets, and what it takes back from them.

Threading: everything runs on the engine's thread. Every wait ends within its time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ucm.blocks import RowId, TransferId
from ucm.config import TimeoutConfig
from ucm.errors import DeviceTimeoutError
from ucm.metrics import Counters
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.tickets import Direction, OutcomeKind, Ticket
from ucm.pipeline.waiting import Changes
from ucm.reasons import Reason

__all__ = ["EngineWaits"]

_MARGIN_S = 1.0
_WHOLE: Final[Mapping[int, Collection[int]]] = MappingProxyType({})
"""No save loses less than all its blocks."""


class EngineWaits:
    """
    Waits for open tickets.

    Args:
        tickets: Those that are open, by number.
        queue: Where the saves wait that have not begun.
        counters: Told how long the engine has waited for saves.
        changed: Shared by all tickets.
        timeout: How long it waits.
        clock: In seconds.
        wake: Lets the loop look at the queue again.
    """

    def __init__(
        self,
        tickets: Mapping[TransferId, Ticket],
        queue: DumpQueue,
        counters: Counters,
        *,
        changed: Changes,
        timeout: TimeoutConfig,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._tickets = tickets
        self._queue = queue
        self._counters = counters
        self._changed = changed
        self._timeout = timeout
        self._clock = clock
        self._wake = wake

    def for_saves(
        self,
        transfer_ids: Iterable[int],
        has_failed: Callable[[], object],
        lost: Mapping[int, Collection[int]] = _WHOLE,
    ) -> None:
        """
        Block until saves have read their blocks; drop or tear those that take too long.

        Args:
            transfer_ids: The saves; unknown ones are over already.
            has_failed: Tells that nothing is to be waited for any more.
            lost: Of some, the positions of the blocks that are overwritten: the others
                are stored even so. Of those that are not named, all are.
        """
        found = (self._tickets.get(TransferId(each)) for each in transfer_ids)
        tickets = [each for each in found if each and not each.guard.is_released]
        if not tickets:
            return
        started = self._clock()
        for ticket in tickets:
            self._queue.promote(ticket.lane_key)
        self._wake()
        self._changed.wait_for_all(
            tickets,
            lambda ticket: ticket.guard.is_released or bool(has_failed()),
            self._timeout.fence,
        )
        for ticket in tickets:
            if not ticket.guard.is_released:
                positions = lost.get(ticket.transfer_id, ())
                ticket.guard.revoke(Reason.RECYCLED, positions)
        self._wake()
        self._counters.observe("ucm_fence_wait_seconds", self._clock() - started)

    def tear(
        self,
        transfer_ids: Sequence[int],
        lost: Mapping[int, Collection[int]] = _WHOLE,
    ) -> None:
        """
        Let saves count for nothing whose blocks may be overwritten already.

        Args:
            transfer_ids: The saves; unknown ones are over already.
            lost: See ``for_saves``.
        """
        for transfer_id in transfer_ids:
            ticket = self._tickets.get(TransferId(transfer_id))
            if ticket is not None:
                ticket.guard.tear(Reason.OVERWRITTEN, lost.get(transfer_id, ()))
        if transfer_ids:
            self._wake()

    def unconfirmed(self) -> list[int]:
        """Return the saves whose release the engine's thread has not seen."""
        return [
            ticket.transfer_id
            for ticket in self._tickets.values()
            if ticket.direction is Direction.SAVE and not ticket.guard.is_confirmed
        ]

    def for_ends(self, timeout: float) -> bool:
        """Block until the end of every ticket was told; False after *timeout* seconds."""
        tickets = list(self._tickets.values())
        return self._changed.wait_for_all(tickets, lambda each: each.is_told, timeout)

    def for_blocks(self, has_failed: Callable[[], object]) -> bool:
        """Take all blocks back; False if a copy still touches some."""
        tickets = [
            each for each in self._tickets.values() if not each.guard.is_released
        ]
        self.for_saves([each.transfer_id for each in tickets], has_failed)
        return self._changed.wait_for_all(
            tickets, lambda each: each.guard.is_released, self._timeout.stuck
        )

    def for_loads(
        self, transfer_ids: Iterable[int], row_ids: Sequence[RowId] | None = None
    ) -> list[int]:
        """
        Block until rows of loads are there; or all are over, and nothing writes their blocks.

        Returns:
            Those that ended without success.

        Raises:
            DeviceTimeoutError: A copy goes on that was given up long ago.
        """
        limit = self._clock() + self._timeout.load + self._timeout.stuck + _MARGIN_S
        failed = []
        for transfer_id in transfer_ids:
            ticket = self._tickets.get(TransferId(transfer_id))
            if ticket is None:
                failed.append(transfer_id)
                continue
            left = max(0.0, limit - self._clock())
            if row_ids is None:
                is_over = ticket.wait_told(left) and ticket.guard.wait_released(left)
            else:
                is_over = ticket.wait_copied(row_ids, left)
            if not is_over:
                raise DeviceTimeoutError(
                    f"transfer {transfer_id} still writes blocks of request "
                    f"{ticket.request_id} that the engine is about to use"
                )
            outcome = ticket.outcome
            if outcome is not None and outcome.kind is not OutcomeKind.COMMITTED:
                failed.append(transfer_id)
        return failed
