# SPDX-License-Identifier: Apache-2.0
"""
Who may touch a ticket's blocks: the copy threads or the engine.

States of a ``BlockGuard``, which stands between the two::

    FREE ──begin──▶ COPYING ──end(last)──▶ RELEASED
      ▲                │ └──quarantine──▶ QUARANTINED (the copy never ended in time)
      │                └──end──┐
      └────────────────────────┤ more rows are to come
      └──revoke──▶ RELEASED (nothing is copied any more)

Copies of several rows may be under way at once; the guard is COPYING until all are over.
``revoke`` on COPYING does not stop them; it marks the guard *torn*: the engine may
overwrite the blocks meanwhile, so what was copied must never be committed, and the
blocks are released as soon as the copies are over.

A ticket's blocks may be several requests', of which the engine overwrites one. What it
takes back then are *positions*: these blocks are *lost*, the ticket goes on with the
others, and a copy that begins later does not touch them. Nothing is lost any more once
the copies are over, nor by ``tear`` once that is confirmed; a guard that has lost all
its blocks is taken back whole.

Some engines overwrite blocks before they call any hook. A copy that was over when the
engine's thread last looked is *confirmed*: what is overwritten later cannot have torn
it. ``tear`` takes blocks back that may be overwritten already: it tears also what is
released and not confirmed.

Threading: guards are used from engine, loop and copy threads, under one lock.
"""

import enum
from collections.abc import Callable, Collection

from ucm.errors import PipelineError
from ucm.reasons import Reason
from ucm.threads import SYSTEM, Condition

__all__ = ["BlockGuard", "TicketOverError"]


class TicketOverError(PipelineError):
    """
    A stage came too late: the ticket was settled, or its blocks were taken back.

    Args:
        reason: Why.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Guarded(enum.Enum):
    FREE = "free"
    COPYING = "copying"
    RELEASED = "released"
    QUARANTINED = "quarantined"


class BlockGuard:
    """
    Who may touch a ticket's blocks in the engine's pool.

    Args:
        on_release: Called once, on the thread that releases, when the blocks are free
            of us. Must not block.
        changed: Shared by all guards of a runtime; its own if none is given.
        num_blocks: How many there are.
    """

    __slots__ = (
        "_changed",
        "_copies",
        "_num_blocks",
        "_on_release",
        "_state",
        "is_confirmed",
        "lost",
        "lost_as",
        "revoked",
        "torn",
    )

    def __init__(
        self,
        on_release: Callable[[], None],
        changed: Condition | None = None,
        num_blocks: int = 1,
    ) -> None:
        self._changed = changed or SYSTEM.condition()
        self._num_blocks = num_blocks
        self._on_release = on_release
        self._state = _Guarded.FREE
        self._copies = 0
        self.is_confirmed = False
        """Whether the engine's thread has seen that the blocks were released."""
        self.revoked = Reason.NONE
        self.torn = Reason.NONE
        self.lost: frozenset[int] = frozenset()
        """Positions of blocks that count for nothing; final once the copy's end is."""
        self.lost_as = Reason.NONE
        """Why, of the first of them."""

    @property
    def is_released(self) -> bool:
        """Whether the engine may reuse the blocks."""
        return self._state is _Guarded.RELEASED

    @property
    def is_copying(self) -> bool:
        """Whether a copy touches the blocks right now."""
        return self._state is _Guarded.COPYING

    @property
    def is_quarantined(self) -> bool:
        """Whether a copy was given up that may still touch blocks and slots."""
        return self._state is _Guarded.QUARANTINED

    def begin(self) -> bool:
        """Ask to touch the blocks; False when they were taken back."""
        with self._changed:
            if self.torn or self._state not in (_Guarded.FREE, _Guarded.COPYING):
                return False
            self._state = _Guarded.COPYING
            self._copies += 1
            return True

    def end(self, *, last: bool = True) -> None:
        """
        Tell that a copy is over; nothing once the blocks are released.

        Args:
            last: No other will follow.
        """
        with self._changed:
            if self._state in (_Guarded.RELEASED, _Guarded.QUARANTINED):
                return
            self._copies = max(0, self._copies - 1)
            if self._copies:
                return
            if not (last or self.torn):
                self._state = _Guarded.FREE
                return
            self._mark_released(Reason.NONE)
        self._on_release()

    def revoke(self, reason: Reason, positions: Collection[int] = ()) -> bool:
        """
        Take blocks back without waiting.

        Args:
            reason: Why.
            positions: Which blocks; all if none are named.

        Returns:
            True when nothing touches them; False while a copy does, which is then
            marked torn if it is to lose all.
        """
        with self._changed:
            is_over = self._state is _Guarded.RELEASED
            if positions and not is_over and not self._lose(reason, positions):
                return self._state is _Guarded.FREE
            if self._state in (_Guarded.COPYING, _Guarded.QUARANTINED):
                self.torn = self.torn or reason
                return False
            if self._state is _Guarded.RELEASED:
                return True
            self._mark_released(reason)
        self._on_release()
        return True

    def tear(self, reason: Reason, positions: Collection[int] = ()) -> None:
        """Let nothing count that was copied, or no such blocks, unless it was confirmed."""
        with self._changed:
            if self.is_confirmed:
                return
            if positions and not self._lose(reason, positions):
                return
            self.torn = self.torn or reason
        self.revoke(reason)

    def quarantine(self) -> bool:
        """Give a copy up that does not end; False when none is under way."""
        with self._changed:
            if self._state is not _Guarded.COPYING:
                return False
            self._state = _Guarded.QUARANTINED
            self._changed.notify_all()
        return True

    def wait_released(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether it is released."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state is _Guarded.RELEASED, timeout
            )

    def _lose(self, reason: Reason, positions: Collection[int]) -> bool:
        """Lose blocks; return whether none is left."""
        self.lost = self.lost.union(positions)
        self.lost_as = self.lost_as or reason
        return len(self.lost) >= self._num_blocks

    def _mark_released(self, reason: Reason) -> None:
        self._state = _Guarded.RELEASED
        self.revoked = reason
        self._changed.notify_all()
