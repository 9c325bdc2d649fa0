# SPDX-License-Identifier: Apache-2.0
"""
How a device comes to reach a store's slots: staged at first, directly once they are pinned.

Pinning touches every page. Of a large slab that takes longer than an engine's start may, and
before its memory is there it would fault all of it in, whatever a container allows. So a thread
pins what the store has by now, piece by piece, and copies of other slots go by way of staging
memory: a slab of a terabyte takes minutes to come.

Threading: ``begin`` and ``close`` belong to the thread that owns the runtime; a store tells of
its growth on any.
"""

import sys

import numpy as np
import numpy.typing as npt

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
        self._is_last = self._is_told = False
        self._there = self._begun = self._nbytes = 0
        """Bytes of the buffers, from their start, that the store has, that were given to
        the device, and that it has pinned."""
        self._elapsed_s = 0.0

    def begin(self) -> None:
        """
        Take staging memory, and pin the store's as it comes.

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
        """Tell, and pin; what a store does not have is not to be touched."""
        self._tell_growth(growth)
        if self._device.is_synchronous or not self._store.buffers:
            return
        with self._lock:
            self._there = max(
                self._there, growth.nbytes if growth.total else sys.maxsize
            )
            self._is_last |= bool(growth.problem) or growth.nbytes >= growth.total
            if self._is_closed or self._thread is not None:
                return
            thread = self._threads.thread(self._pin, "ucm-pin")
            try:
                thread.start()
            except RuntimeError as exc:  # none is to be had: the next word tries again
                self._log.warning(MEMORY_UNPINNED, reason=str(exc))
            else:
                self._thread = thread

    def _pin(self) -> None:
        while (memory := self._next()) is not None:
            started = self._threads.monotonic()
            try:
                problem = self._device.pin(memory)
            except DeviceError:  # it has failed, and says so to whoever copies
                return
            self._elapsed_s += self._threads.monotonic() - started
            if problem:
                self._log.warning(MEMORY_UNPINNED, reason=problem)
                self._tell_pinned()
                return  # nor would it take the others
            self._nbytes += memory.nbytes

    def _next(self) -> npt.NDArray[np.uint8] | None:
        """Return slots that are there and not pinned, or end the thread."""
        with self._lock:
            start = 0
            for memory in self._store.buffers:
                num_slots, slot_bytes = len(memory), memory.strides[0]
                first = max(0, self._begun - start) // slot_bytes
                stop = min(num_slots, max(0, self._there - start) // slot_bytes)
                if first < stop and not self._is_closed:
                    self._begun = start + stop * slot_bytes
                    return memory[first:stop]
                start += num_slots * slot_bytes
            self._thread = None
            if self._is_last and not (self._is_told or self._is_closed):
                self._is_told = True
                self._tell_pinned()
            return None

    def _tell_pinned(self) -> None:
        took = round(self._elapsed_s, 3)
        self._log.info(MEMORY_PINNED, nbytes=self._nbytes, elapsed_s=took)
