# SPDX-License-Identifier: Apache-2.0
"""
Host buffers for transfers whose final place the device cannot reach.

A store without native buffers, or memory that could not be pinned, is copied by way of a
pool of fixed-size slots that are allocated, and pinned, once. A slot is in one of three
places::

    FREE ──borrow──▶ BORROWED ──end─────────────────────▶ FREE
                        └──end, a fence has not passed──▶ QUARANTINED ──passed──▶ FREE

A fence that never passes keeps its slots out for good: the device may write them at any
time, and no setting brings them back.

Threading: everything may be called from any thread; a lease belongs to one thread at a
time. One condition guards all fields. Fences are asked and given call-backs outside its
lock, because they have locks of their own, under which they may call us.
"""

import math
import mmap
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucm.devices.abc import Fence
from ucm.errors import ConfigError, DeviceError
from ucm.plan import HostSlots
from ucm.threads import SYSTEM, Threads

__all__ = ["StagingLease", "StagingPool"]

_LOOK_S = 0.01
"""How often a borrower looks at quarantined fences that call nobody."""

_Bytes = npt.NDArray[np.uint8]


class StagingLease:
    """
    Slots that one borrower has until it leaves the context.

    Made by ``StagingPool.borrow``.
    """

    __slots__ = ("fences", "is_told", "pool", "slots")

    def __init__(self, pool: "StagingPool", slots: HostSlots) -> None:
        self.pool = pool
        self.slots = slots
        self.fences: tuple[Fence, ...] = ()
        self.is_told = False
        """Whether every fence calls when it is over. Guarded by the pool."""

    def quarantine(self, fence: Fence) -> None:
        """
        Let nobody have the slots before *fence* has passed; for each copy submitted.

        To be called as soon as there is a fence, so that no error in between can give
        slots away that the device still uses. A fence that has passed when the lease
        ends costs nothing.

        Raises:
            DeviceError: The lease has ended, and the slots may be another's.
        """
        self.pool.check_lease(self)
        self.fences += (fence,)

    def close(self) -> None:
        """Give the slots back, or leave them in quarantine. Idempotent."""
        self.pool.end(self)

    def has_passed(self) -> bool:
        """Return whether no copy uses the slots. A fence that failed never passes."""
        try:
            return all(fence.is_done() for fence in self.fences)
        except DeviceError:
            return False

    def __enter__(self) -> HostSlots:
        return self.slots

    def __exit__(self, *_: object) -> None:
        self.close()


def _allocate(nbytes: int) -> _Bytes:
    """
    Return ``[nbytes]`` zeroes that begin at a page and share none.

    A mapping that forks share: were it private, a fork of the engine could leave the
    device with the pages of one process and us with a copy.
    """
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class StagingPool:
    """
    Fixed-size slots within a budget of bytes.

    Borrowers are served in the order in which they came: many small ones cannot keep
    a large one waiting for ever.

    Args:
        budget_bytes: At most so much is allocated.
        slot_bytes: Of one slot; no block is larger.
        pin: ``Device.pin``; called once, with all slots.
        allocate: Returns so many bytes of memory that the device may pin.
        threads: Where the clock and the condition come from.

    Raises:
        ConfigError: The budget is less than one slot.
    """

    def __init__(
        self,
        budget_bytes: int,
        slot_bytes: int,
        *,
        pin: Callable[[_Bytes], str] | None = None,
        allocate: Callable[[int], _Bytes] = _allocate,
        threads: Threads = SYSTEM,
    ) -> None:
        if slot_bytes < 1:
            raise ValueError(f"slots of {slot_bytes} bytes")
        self._slot_bytes = slot_bytes
        num_slots = budget_bytes // slot_bytes
        if num_slots < 1:
            raise ConfigError(
                "queue.staging_bytes",
                budget_bytes,
                f"a slot has {slot_bytes} bytes",
                f"Give at least {slot_bytes} bytes; many times that is useful.",
            )
        self.memory = allocate(num_slots * slot_bytes).reshape(num_slots, slot_bytes)
        """``[num_slots, slot_bytes]``; all that was ever pinned."""
        self.pin_problem = "" if pin is None else pin(self.memory)
        """What ``pin`` said: why the memory is not pinned; it is lent all the same."""
        self._clock = threads.monotonic
        self._changed = threads.condition()
        self._free = list(range(num_slots))  # in order: neighbours merge into one copy
        self._borrowed: set[StagingLease] = set()
        self._quarantined: set[StagingLease] = set()
        self._line: deque[object] = deque()
        self._news = 0
        self._is_closed = False

    def borrow(
        self, count: int, slot_bytes: int, timeout: float
    ) -> StagingLease | None:
        """
        Take slots, and block up to *timeout* seconds until there are enough.

        Args:
            count: Number of slots, at least 1.
            slot_bytes: Payload of each.
            timeout: A finite number of seconds; 0 does not wait.

        Returns:
            None if others had them all the time, or, at once, if there are not so many.

        Raises:
            DeviceError: The pool is closed.
            ValueError: Nothing is asked for, blocks larger than a slot, or a wait
                without end; a bug of the caller.
        """
        if count < 1 or slot_bytes < 1 or not timeout < math.inf:
            raise ValueError(f"{count} slots of {slot_bytes} bytes in {timeout} s")
        if slot_bytes > self._slot_bytes:
            raise ValueError(
                f"blocks of {slot_bytes} bytes for slots of {self._slot_bytes}"
            )
        if count > len(self.memory):
            return None
        limit = self._clock() + timeout
        me = object()
        with self._changed:
            self._line.append(me)
        try:
            while True:
                seen = self._look_at_fences()
                with self._changed:
                    if self._is_closed:
                        raise DeviceError("the staging pool is closed")
                    if self._is_my_turn(me, count):
                        return self._lend(count, slot_bytes)
                    left = limit - self._clock()
                    if left <= 0:
                        return None
                    self._wait(me, count, seen, left)
        finally:
            with self._changed:
                self._line.remove(me)
                self._changed.notify_all()

    def close(self) -> bool:
        """
        Lend nothing any more; whoever waits gets a ``DeviceError``.

        Returns:
            Whether no slot is borrowed or quarantined. Only then may the memory be
            unpinned or freed; until then keep the pool, and ask again.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._look_at_fences()
        with self._changed:
            return not self._borrowed and not self._quarantined

    def check_lease(self, lease: StagingLease) -> None:
        """Raise ``DeviceError`` if *lease* has ended."""
        with self._changed:
            if lease not in self._borrowed:
                raise DeviceError("the staging lease has ended")

    def end(self, lease: StagingLease) -> None:
        """Take the slots of *lease* back, unless that was done before."""
        has_passed = lease.has_passed()
        with self._changed:
            if lease not in self._borrowed:
                return
            self._borrowed.remove(lease)
            if has_passed:
                self._put_back(lease)
                return
            self._quarantined.add(lease)
        self._tell_news()
        is_told = all(fence.call_when_over(self._tell_news) for fence in lease.fences)
        with self._changed:
            lease.is_told = is_told

    def _is_my_turn(self, me: object, count: int) -> bool:
        return self._line[0] is me and len(self._free) >= count

    def _lend(self, count: int, slot_bytes: int) -> StagingLease:
        taken, self._free = self._free[:count], self._free[count:]
        slots = HostSlots(self.memory, np.array(taken, np.int64), slot_bytes)
        lease = StagingLease(self, slots)
        self._borrowed.add(lease)
        return lease

    def _put_back(self, lease: StagingLease) -> None:
        self._free.extend(lease.slots.slots.tolist())
        self._free.sort()
        self._changed.notify_all()

    def _wait(self, me: object, count: int, seen: int, left: float) -> None:
        """Block until there is something to look at that was not *seen*."""
        if not all(lease.is_told for lease in self._quarantined):
            left = min(left, _LOOK_S)
        self._changed.wait_for(
            lambda: (
                self._is_closed or self._news != seen or self._is_my_turn(me, count)
            ),
            left,
        )

    def _tell_news(self) -> None:
        """Let all who wait look at the fences."""
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def _look_at_fences(self) -> int:
        """Free the slots whose fences have passed; return the news it has seen."""
        with self._changed:
            seen = self._news
            waiting = list(self._quarantined)
        passed = [lease for lease in waiting if lease.has_passed()]
        with self._changed:
            for lease in passed:
                if lease in self._quarantined:  # or another thread was quicker
                    self._quarantined.remove(lease)
                    self._put_back(lease)
        return seen
