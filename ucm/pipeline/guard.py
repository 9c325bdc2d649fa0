# SPDX-License-Identifier: Apache-2.0
"""
Who may touch a ticket's blocks: the copy threads or the engine.

States of a ``BlockGuard``, which stands between the two::

    FREE ──begin──▶ COPYING ──end(last)──▶ RELEASED
      ▲                │ └──quarantine──▶ QUARANTINED (the copy never ended in time)
      │                └──end──┐
      └────────────────────────┤ more rows are to come
      └──revoke──▶ RELEASED (nothing is copied any more)

A load writes before anybody knows that the bytes are right: it tells ``soil`` how its
blocks are zeroed. The end of the copy does not release them then, ``publish`` does, once
they are right. Whoever takes them back before, or ends a copy that was torn, has them
zeroed first::

    FREE ──publish──▶ RELEASED
      └──revoke──▶ CLEARING ──(they are zero)──▶ RELEASED

If they cannot be zeroed they are never released, and ``on_unclean`` is told: as with a
copy that is stuck, nobody else would notice.

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

from ucm.devices.abc import Fence
from ucm.errors import PipelineError
from ucm.pipeline.waiting import Changes, has_passed
from ucm.reasons import Reason

__all__ = ["BlockGuard", "TicketOverError"]

_Clear = Callable[[], Fence]
"""Zeroes blocks; the fence calls back."""


class TicketOverError(PipelineError):
    """
    A stage came too late: the ticket was settled, or its blocks were taken back.

    Args:
        reason: Why.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def _nobody() -> None:
    """Hear of nothing any more."""


class _Guarded(enum.Enum):
    FREE = "free"
    COPYING = "copying"
    CLEARING = "clearing"
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
        on_unclean: Called once, on any thread, if they cannot be zeroed.
    """

    __slots__ = (
        "_changed",
        "_clear",
        "_copies",
        "_num_blocks",
        "_on_release",
        "_on_unclean",
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
        changed: Changes | None = None,
        num_blocks: int = 1,
        on_unclean: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = changed or Changes()
        self._num_blocks = num_blocks
        self._on_release = on_release
        self._on_unclean = on_unclean
        self._state = _Guarded.FREE
        self._copies = 0
        self._clear: _Clear | None = None
        self.is_confirmed = False
        """Whether the engine's thread has seen that the blocks were released."""
        self.revoked = Reason.NONE
        self.torn = Reason.NONE
        self.lost: frozenset[int] = frozenset()
        """Positions of blocks that count for nothing; final once the copy's end is."""
        self.lost_as = Reason.NONE
        """Why, of the first of them."""

    @property
    def taken_back(self) -> Reason:
        """Why what is copied does not count, if so."""
        return self.torn or self.revoked

    @property
    def is_released(self) -> bool:
        """Whether the engine may reuse the blocks."""
        return self._state is _Guarded.RELEASED

    @property
    def is_copying(self) -> bool:
        """Whether a copy touches the blocks right now."""
        return self._state is _Guarded.COPYING

    @property
    def is_touched(self) -> bool:
        """Whether somebody copies or zeroes, who was not given up."""
        return self._state in (_Guarded.COPYING, _Guarded.CLEARING)

    @property
    def is_clearing(self) -> bool:
        """Whether the blocks are being zeroed before they are released."""
        return self._state is _Guarded.CLEARING

    @property
    def is_quarantined(self) -> bool:
        """Whether a copy was given up that may still touch blocks and slots."""
        return self._state is _Guarded.QUARANTINED

    def begin(self) -> bool:
        """Ask to touch the blocks; False when they were taken back."""
        with self._changed.lock:
            if self.torn or self._state not in (_Guarded.FREE, _Guarded.COPYING):
                return False
            self._state = _Guarded.COPYING
            self._copies += 1
            return True

    def soil(self, clear: _Clear) -> None:
        """
        Tell, before the end of a copy, that it may leave wrong bytes in the blocks.

        Args:
            clear: Zeroes them; on the thread that takes them back.
        """
        with self._changed.lock:
            self._clear = clear

    def end(self, *, last: bool = True) -> None:
        """
        Tell that a copy is over; nothing once the blocks are released.

        Args:
            last: No other will follow.
        """
        with self._changed.lock:
            if self._state not in (_Guarded.FREE, _Guarded.COPYING):
                return
            self._copies = max(0, self._copies - 1)
            if self._copies:
                return
            if not self.torn and (not last or self._clear is not None):
                self._state = _Guarded.FREE
                return
            clear = self._take_back(Reason.NONE)
        self._give_back(clear)

    def publish(self) -> bool:
        """
        Release blocks whose bytes are right, if that is not done.

        Returns:
            False when what was copied does not count: they were taken back.
        """
        with self._changed.lock:
            if self.torn or self.revoked or self._copies:
                return False
            if self._clear is None:
                return True
            self._clear = None
            self._take_back(Reason.NONE)
        self._tell_released()
        return True

    def revoke(self, reason: Reason, positions: Collection[int] = ()) -> bool:
        """
        Take blocks back without waiting.

        Args:
            reason: Why.
            positions: Which blocks; all if none are named.

        Returns:
            True when no copy touches them; False while one does, which is then marked
            torn if it is to lose all.
        """
        with self._changed.lock:
            is_over = self._state is _Guarded.RELEASED
            if positions and not is_over and not self._lose(reason, positions):
                return self._state is _Guarded.FREE
            if self._state in (_Guarded.COPYING, _Guarded.QUARANTINED):
                self.torn = self.torn or reason
                return False
            if self._state is not _Guarded.FREE:
                return True
            clear = self._take_back(reason)
        self._give_back(clear)
        return True

    def tear(self, reason: Reason, positions: Collection[int] = ()) -> None:
        """Let nothing count that was copied, or no such blocks, unless it was confirmed."""
        with self._changed.lock:
            if self.is_confirmed:
                return
            if positions and not self._lose(reason, positions):
                return
            self.torn = self.torn or reason
        self.revoke(reason)

    def quarantine(self) -> bool:
        """Give a copy up that does not end; False when none is under way."""
        with self._changed.lock:
            if self._state is not _Guarded.COPYING:
                return False
            self._state = _Guarded.QUARANTINED
            self.torn = self.torn or Reason.STUCK  # for rows that come too late
            self._changed.notify()
        return True

    def wait_released(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether it is released."""
        return self._changed.wait_for(lambda: self._state is _Guarded.RELEASED, timeout)

    def _lose(self, reason: Reason, positions: Collection[int]) -> bool:
        """Lose blocks; return whether none is left."""
        self.lost = self.lost.union(positions)
        self.lost_as = self.lost_as or reason
        return len(self.lost) >= self._num_blocks

    def _take_back(self, reason: Reason) -> _Clear | None:
        """Let nobody copy any more; return what comes before the release."""
        clear, self._clear = self._clear, None
        self.revoked = reason if clear is None else reason or Reason.OVER
        self._state = _Guarded.RELEASED if clear is None else _Guarded.CLEARING
        self._changed.notify()
        return clear

    def _give_back(self, clear: _Clear | None) -> None:
        """Release the blocks, once they are zero."""
        if clear is None:
            self._tell_released()
            return
        try:
            fence = clear()
            fence.call_when_over(lambda: self._cleared(fence))
        except Exception:  # noqa: BLE001 - no device's error may keep the ticket from its end
            self._on_unclean()  # what is in them nobody knows: they are never released

    def _cleared(self, fence: Fence) -> None:
        if not has_passed(fence):
            self._on_unclean()
            return
        with self._changed.lock:
            self._state = _Guarded.RELEASED
            self._changed.notify()
        self._tell_released()

    def _tell_released(self) -> None:
        """Tell it, and forget whom: a ticket and its guard need not outlive their use."""
        tell, self._on_release = self._on_release, _nobody
        self._on_unclean = _nobody
        tell()
