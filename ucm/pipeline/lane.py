# SPDX-License-Identifier: Apache-2.0
"""
One request's way through a chain.

A copy thread is given items at once, so that it does not stand still until the loop has
taken back the one before, and works on the items of all lanes in the order in which they
come. Other segments have one item of a lane at a time, and a line in front of them. What
is behind the device's copy holds none of the engine's blocks and leaves the window. Items
of a lane pass each stage in order; lanes do not know each other. A lane lives while it
has items. An item whose ticket has ended leaves, unless a copy under way is waited for.

All of it runs on the loop thread.
"""

from collections import deque
from collections.abc import Callable

from ucm.pipeline.items import Item
from ucm.pipeline.runner import Runner
from ucm.pipeline.stage import Segment
from ucm.pipeline.tickets import Direction, LaneKey
from ucm.reasons import Reason

__all__ = ["RequestLane"]


class RequestLane:
    """
    One request's items on their way.

    Args:
        key: Direction, request and life.
        segments: Of the chain.
        runner: Runs them.
        on_copied: Called with the direction of each item that needs the engine's
            blocks no more.
        on_empty: Called with the key when the last item has left the lane.
    """

    def __init__(
        self,
        key: LaneKey,
        segments: tuple[Segment, ...],
        runner: Runner,
        *,
        on_copied: Callable[[Direction], None],
        on_empty: Callable[[LaneKey], object],
    ) -> None:
        self.key = key
        self._segments = segments
        self._runner = runner
        self._on_copied = on_copied
        self._on_empty = on_empty
        behind = [at for at, each in enumerate(segments) if each.is_behind_copy]
        self._behind_copy = min(behind, default=len(segments))
        waits = [at for at, each in enumerate(segments) if each.awaits_copy]
        self._copy_wait = max(waits, default=-1)
        self._items: dict[Item, None] = {}
        self._waited_for: dict[int, Item] = {}
        """The item that each segment of the loop has."""
        self._lines: dict[int, deque[Item]] = {}
        """Those in front of them. Never longer than the window."""

    @property
    def num_items(self) -> int:
        """Items in the lane."""
        return len(self._items)

    def put_nowait(self, item: Item) -> None:
        """Let an item in."""
        item.lane = self
        self._items[item] = None
        self._arrive(item, 0)

    def over(self, item: Item) -> None:
        """Let an item that is handed back go on, and the next one in."""
        at = item.at
        self._waited_for.pop(at, None)
        self._go_on(item)
        self._let_in(at)

    def drop_ended(self) -> None:
        """Let items go whose tickets have ended, under no copy but one given up."""
        for item in list(self._items):
            ticket = item.ticket
            if item not in self._items or item.is_over or ticket.outcome is None:
                continue  # it left with one before it, or is about to be handed back
            if ticket.is_given_up or not ticket.guard.is_copying:
                self._drop(item)

    def _drop(self, item: Item) -> None:
        """Let an item go from wherever it is, and the next one in."""
        at = item.at
        if self._waited_for.get(at) is item:
            del self._waited_for[at]
        elif item in self._lines.get(at, ()):
            self._lines[at].remove(item)
        item.give_up()
        self._leave(item)
        self._let_in(at)

    def _arrive(self, item: Item, at: int) -> None:
        """Put an item in front of a segment, and through those that need no wait."""
        segment = self._segments[at]
        if at == self._behind_copy:
            self._on_copied(self.key[0])
        item.at, item.segment, item.is_over = at, segment, False
        if not segment.is_copy:
            if at in self._waited_for:
                self._lines.setdefault(at, deque()).append(item)
                return
            self._waited_for[at] = item
        if self._is_over(item):
            self._waited_for.pop(at, None)
            self._leave(item)
        elif self._runner.start(item):
            self._waited_for.pop(at, None)
            self._go_on(item)

    def _let_in(self, at: int) -> None:
        """Let the next items into a segment of the loop while it has room."""
        line = self._lines.get(at)
        while line and at not in self._waited_for:
            self._arrive(line.popleft(), at)

    def _is_over(self, item: Item) -> bool:
        """Return whether an item need not go on; a begun copy is waited for even then."""
        ticket = item.ticket
        if ticket.outcome is None and ticket.clock() > ticket.deadline:
            ticket.cancel(Reason.DEADLINE)
        return ticket.outcome is not None and not self._is_awaited(item, item.at)

    def _is_awaited(self, item: Item, at: int) -> bool:
        """Return whether the item's copy is under way and waited for at *at* or later."""
        is_begun = item.copy is not None and item.ticket.guard.is_copying
        return is_begun and at <= self._copy_wait

    def _go_on(self, item: Item) -> None:
        """Let an item go on to its next segment, or end."""
        at = item.at + 1
        is_over = item.has_failed and not self._is_awaited(item, at)
        if is_over or at == len(self._segments):
            self._leave(item)
        else:
            self._arrive(item, at)

    def _leave(self, item: Item) -> None:
        del self._items[item]
        if item.at < self._behind_copy:
            self._on_copied(self.key[0])
        item.ticket.give_back()  # nothing may write into its slots any more
        if not self._items:
            self._on_empty(self.key)
