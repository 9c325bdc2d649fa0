# SPDX-License-Identifier: Apache-2.0
"""
What a save or load of a host comes to, out of its tickets' ends. Moves nothing.

Threading: ``hear`` under the lock of who calls it, ``look`` on any thread.
"""

from collections.abc import Sequence

import attrs

from ucm.cache.pending import Pending
from ucm.errors import DeviceTimeoutError
from ucm.pipeline.outcomes import Outcome, OutcomeKind
from ucm.pipeline.tickets import Direction
from ucm.reasons import Reason
from ucm.scheduler.messages import SpanOrder
from ucm.stores.abc import StoreStats
from ucm.threads import Lock

__all__ = ["Result", "Statistics", "Transfer"]

_WHOLE = (OutcomeKind.COMMITTED, OutcomeKind.SKIPPED)


@attrs.frozen(kw_only=True)
class Result:
    """
    What a save or a load came to; a bad end is a value too.

    Args:
        kind: ``COMMITTED``: moved now. ``SKIPPED``: a save of what was stored already, or
            being stored. Otherwise how the first part ended that did not succeed.
        reason: Why; empty for a success.
        num_blocks: Blocks asked for.
        leading: How many of them, from the first on, are loaded for certain; or stored,
            or being stored just now by somebody else.
        committed: Blocks that were stored, or loaded, by this call, wherever they are.
        error: Text of the exception behind a failure.
    """

    kind: OutcomeKind
    reason: Reason
    num_blocks: int
    leading: int
    committed: int
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether ``leading`` is all of them."""
        return self.leading == self.num_blocks


@attrs.frozen(kw_only=True)
class Statistics:
    """
    How things stand.

    Args:
        store: Occupancy in blocks, and what was evicted.
        open_transfers: Saves and loads that are not over.
        waiting_parts: Parts of saves that wait for room in the queue.
        saved_blocks: Stored since the start.
        loaded_blocks: Loaded since the start.
        failure: Why nothing is served any more; empty while all is well.
    """

    store: StoreStats
    open_transfers: int
    waiting_parts: int
    saved_blocks: int
    loaded_blocks: int
    failure: str


class Transfer:
    """
    One save or load of a host, of any number of tickets.

    Args:
        direction: Which way.
        lock: See ``Pending``.
    """

    __slots__ = ("_ends", "_unreleased", "is_load", "orders", "over", "released")

    def __init__(self, direction: Direction, lock: Lock) -> None:
        self.is_load = direction is Direction.LOAD
        self.orders: dict[int, SpanOrder] = {}
        self._ends: dict[int, Outcome] = {}
        self._unreleased: set[int] = set()
        self.released: Pending[None] = Pending(lock)
        """Ends when nothing of ours touches the blocks any more."""
        self.over: Pending[Result] = Pending(lock)
        """Ends with the last word; a load's not before its blocks are released."""

    def begin(self, orders: Sequence[SpanOrder]) -> None:
        """Say of which tickets it consists; without any it is over."""
        self.orders = {order.transfer_id: order for order in orders}
        self._unreleased.update(self.orders)
        if not orders:
            self.look()

    def hear(self, transfer_id: int, outcome: Outcome | None) -> bool:
        """
        Take note of a ticket's release, or of its last word; ``look`` tells of it.

        Returns:
            Whether nothing more is to come of the ticket.
        """
        if outcome is None:
            self._unreleased.discard(transfer_id)
        else:
            self._ends[transfer_id] = outcome
        return transfer_id in self._ends and transfer_id not in self._unreleased

    def give_up(self) -> None:
        """End it now: of what goes on nobody will see the end."""
        for transfer_id in self.orders:
            self._ends.setdefault(
                transfer_id, Outcome(OutcomeKind.CANCELLED, Reason.CLOSED)
            )
        if self._unreleased and self.is_load:
            stuck = DeviceTimeoutError(
                "a copy that does not end may still write to blocks of this load"
            )
            self.released.end(None, stuck)
            self.over.end(None, stuck)
        self._unreleased.clear()
        self.look()

    def look(self) -> None:
        """Tell those who wait what has ended."""
        if not self._unreleased:
            self.released.end(None)
        is_settled = len(self._ends) == len(self.orders)
        if is_settled and not (self.is_load and self._unreleased):
            self.over.end(self._result())

    def _result(self) -> Result:
        leading = committed = num_blocks = 0
        worst: Outcome | None = None
        for transfer_id, order in self.orders.items():
            end = self._ends[transfer_id]
            committed += end.committed
            num_blocks += len(order.block_ids)
            if worst is None and end.kind in _WHOLE:
                leading += len(order.block_ids)
            else:
                worst = worst or end
        plain = OutcomeKind.COMMITTED if committed else OutcomeKind.SKIPPED
        return Result(
            kind=plain if worst is None else worst.kind,
            reason=Reason.NONE if worst is None else worst.reason,
            num_blocks=num_blocks,
            leading=leading,
            committed=committed,
            error="" if worst is None else worst.error,
        )
