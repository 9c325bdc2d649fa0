# SPDX-License-Identifier: Apache-2.0
"""
How a device comes to reach a store's slots: staged at first, directly once they are pinned.

Pinning touches every page. Of a large slab that takes longer than an engine's start may, and
before its memory is there it would fault all of it in, whatever a container allows. So copies go
by way of staging memory until the store has all of its own, and a thread has pinned that.

Threading: ``begin`` and ``close`` belong to the thread that owns the runtime; a store tells of
its growth on any.
"""

from ucm.devices.abc import Device
from ucm.errors import DeviceError
from ucm.stores.abc import Store, StoreGrowth
from ucm.stores.opening import growth_teller
from ucm.threads import Thread, Threads
from ucm.tracing import MEMORY_PINNED, MEMORY_UNPINNED, Log

__all__ = ["Pinning"]


class Pinning:
    """
    Stages, and pins behind the start; a device that copies by itself needs neither.

    Args:
        store: Whose slots are copied to and from.
        device: What copies.
        staging_bytes: Memory for copies whose slots are not pinned.
        log: Told what is pinned, what is not, and why; and how the store grows.
        threads: Where the thread comes from.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        staging_bytes: int,
        log: Log,
        threads: Threads,
    ) -> None:
        self._store = store
        self._device = device
        self._staging_bytes = staging_bytes
        self._log = log
        self._threads = threads
        self._tell_growth = growth_teller(log)
        self._lock = threads.lock()
        self._thread: Thread | None = None
        self._is_closed = False

    def begin(self) -> None:
        """
        Take staging memory, and pin the store's as soon as that is all there.

        Raises:
            ConfigError: ``queue.staging_bytes`` is less than a block.
        """
        if not self._device.is_synchronous:
            largest = self._store.capabilities.max_block_bytes
            if problem := self._device.stage(self._staging_bytes, largest):
                self._log.warning(MEMORY_UNPINNED, reason=problem)
        self._store.watch(self._grown)

    def close(self, timeout: float) -> bool:
        """Begin nothing any more; return whether nothing is being pinned."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _grown(self, growth: StoreGrowth) -> None:
        """Tell; what a store will never have is not to be touched."""
        self._tell_growth(growth)
        if not growth.problem and growth.nbytes >= growth.total:
            self._start()

    def _start(self) -> None:
        if self._device.is_synchronous or not self._store.buffers:
            return
        with self._lock:
            if self._is_closed or self._thread is not None:
                return
            self._thread = self._threads.thread(self._pin, "ucm-pin")
            self._thread.start()

    def _pin(self) -> None:
        started = self._threads.monotonic()
        nbytes = 0
        for memory in self._store.buffers:
            if self._is_closed:
                return
            try:
                problem = self._device.pin(memory)
            except DeviceError:  # it has failed, and says so to whoever copies
                return
            if problem:
                self._log.warning(MEMORY_UNPINNED, reason=problem)
            else:
                nbytes += memory.nbytes
        took = round(self._threads.monotonic() - started, 3)
        self._log.info(MEMORY_PINNED, nbytes=nbytes, elapsed_s=took)
