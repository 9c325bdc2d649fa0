# SPDX-License-Identifier: Apache-2.0
"""What the tests of the pipeline share: tickets, fences and an asynchronous device."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from tests.rig import BLOCK_BYTES, keys_of, null_log
from ucm.blocks import (
    BlockId,
    BlockSpan,
    GroupId,
    Owner,
    RowId,
    TransferId,
)
from ucm.devices._paged import PagedBlocks, PagedCopy
from ucm.devices.abc import Fence
from ucm.devices.cpu import CPUDevice
from ucm.devices.driver import Direction as CopyDirection
from ucm.devices.events import DoneFence
from ucm.errors import DeviceError
from ucm.pipeline.items import Item
from ucm.pipeline.tickets import Direction, Listener, Outcome, Ticket
from ucm.tracing import Log

TIMEOUT = 60.0


class Told(Listener):
    """Tells functions of the test what a ticket tells; slots are given back at once."""

    def __init__(
        self,
        on_release: Callable[[Ticket], None] = lambda _: None,
        on_settle: Callable[[Ticket], None] = lambda _: None,
    ) -> None:
        self._on_release = on_release
        self._on_settle = on_settle

    def released(self, ticket: Ticket) -> None:
        """Tell of the release."""
        self._on_release(ticket)

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """Tell of the end."""
        self._on_settle(ticket)


def make_ticket(
    transfer_id: int = 1,
    direction: Direction = Direction.SAVE,
    request: str = "r",
    *,
    owners: tuple[Owner, ...] = (),
    num_blocks: int = 1,
    block_bytes: int = BLOCK_BYTES,
    row_ids: Sequence[int] = (0,),
    lasts: float = 60.0,
    on_release: Callable[[Ticket], None] = lambda _: None,
    on_settle: Callable[[Ticket], None] = lambda _: None,
    listener: Listener | None = None,
    log: Log | None = None,
) -> Ticket:
    """Return a ticket that ends in *lasts* seconds."""
    blocks = range(transfer_id, transfer_id + num_blocks)
    return Ticket(
        transfer_id=TransferId(transfer_id),
        direction=direction,
        owners=owners or (Owner(request, 1, num_blocks),),
        span=BlockSpan(GroupId(0), tuple(map(BlockId, blocks)), keys_of(*blocks)),
        row_ids=tuple(map(RowId, row_ids)),
        block_bytes=block_bytes,
        accepted_at=time.monotonic(),
        deadline=time.monotonic() + lasts,
        listener=listener or Told(on_release, on_settle),
        log=log or null_log(),
    )


def make_item(ticket: Ticket) -> Item:
    """Return the one item of a whole-block ticket, ready to go."""
    return Item(ticket, ticket.row_ids, DoneFence())


class HandFence(Fence):
    """
    A fence that the test opens.

    Args:
        copy: What happens on the device just before it opens.
    """

    def __init__(self, copy: Callable[[], object] = lambda: None) -> None:
        self._copy = copy
        self._done = threading.Event()
        self._error: DeviceError | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def open(self) -> None:
        """Let the device come to this fence."""
        self._copy()
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def fail(self, error: DeviceError) -> None:
        """Let the device fail before it comes to this fence."""
        self._copy, self._error = (lambda: None), error
        self.open()

    def is_done(self) -> bool:
        """Return whether it was opened; raise why it failed."""
        if self._error is not None:
            raise self._error
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Block until it is opened."""
        return self._done.wait(timeout)

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """Call on the thread that opens it, or at once."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return True
        callback()
        return True


class AsyncDevice(CPUDevice):
    """
    A device whose copies happen when their fence is opened.

    Args:
        num_blocks: Blocks in the engine's pool.
        on_fence: Called with each new fence; otherwise the test takes them from
            ``next_fence``.
    """

    is_synchronous = False

    def __init__(
        self, num_blocks: int, on_fence: Callable[[HandFence], None] | None = None
    ) -> None:
        super().__init__(num_blocks)
        self.tells_digests = False
        self._fences: SimpleQueue[HandFence] = SimpleQueue()
        self._on_fence = on_fence or self._fences.put
        self.on_copy: Callable[[], None] = lambda: None
        """Called on the copy thread when a copy has begun."""

    @property
    def was_asked(self) -> bool:
        """Whether there is a fence that the test has not taken."""
        return not self._fences.empty()

    def next_fence(self) -> HandFence:
        """Block the test until the device was asked for a copy; return its fence."""
        return self._fences.get(timeout=TIMEOUT)

    def _copy(self, copy: PagedCopy[Any], direction: CopyDirection) -> Fence:
        """Copy when the fence opens."""
        now = super()._copy
        return self._later(lambda: now(copy, direction))

    def _clear(self, pages: PagedBlocks[Any]) -> Fence:
        """Zero when the fence opens."""
        now = super()._clear
        return self._later(lambda: now(pages))

    def _later(self, copy: Callable[[], object]) -> Fence:
        fence = HandFence(copy)
        self.on_copy()
        self._on_fence(fence)
        return fence
