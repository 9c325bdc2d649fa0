# SPDX-License-Identifier: Apache-2.0
"""
Blocks in the memory of an accelerator, whatever its runtime.

*Lease.* The engine's thread submits work and runs ahead of the device. A fence is an
event of ours, recorded either on the engine's current stream, or on a *relay* stream
that waits for an event which the engine lends. Nobody waits for anything there.

*Copies.* Each direction has a stream of its own, of low priority, so that loads do not
stand behind saves nor the engine behind either. One call submits all pages of a span,
neighbours merged, straight between blocks and slots; an event of ours behind them is the
fence. Slots that could not be pinned are copied by way of staging memory that is, if
there is any (``StagedCopies``). How many copies are under way at once is bounded by
whoever asks for them, the pipeline's window, and parts of them by that memory.

*Failure.* An error of the runtime stays: the device has failed from then on, each call
raises ``DeviceFailedError`` and no fence passes any more. What a copy under way still
does nobody knows, so neither its blocks nor its slots are given back by the device.

Threading: see ``ucm.devices.abc``. One lock per direction makes a copy and its event one
step. Only the poller's thread asks whether events have passed.
"""

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ucm.devices._paged import PagedBlocks, PagedCopy, PagedDevice, Part
from ucm.devices._pages import Pages
from ucm.devices._pinned import PinnedMemory
from ucm.devices._regions import KVMemory
from ucm.devices._relay import Relay
from ucm.devices._staged import StagedCopies
from ucm.devices._torch import find_regions
from ucm.devices.abc import EventRef, Fence
from ucm.devices.digests import DeviceDigests, find_digests
from ucm.devices.driver import Direction, Driver, Stream
from ucm.devices.events import DoneFence, EventBook, FailedFence, anew
from ucm.devices.poller import EventPoller
from ucm.devices.staging import StagingPool
from ucm.errors import DeviceError, DeviceFailedError, GraphCaptureError
from ucm.layout import KVLayout
from ucm.native import address_of
from ucm.plan import CopyBatch
from ucm.threads import SYSTEM, Lock, Threads

__all__ = ["AcceleratorDevice"]

_CLOSE_TIMEOUT_S = 10.0
_LOAN_TIMEOUT_S = 1.0


@attrs.frozen(eq=False)
class _Lane:
    """A direction's stream, and the lock that makes copy and event one step."""

    stream: Stream
    lock: Lock


class AcceleratorDevice(PagedDevice[Pages]):
    """
    One accelerator, through its driver.

    Args:
        driver: Of the device.
        num_blocks: See ``PagedDevice``.
        threads: Where threads and locks come from.
    """

    is_synchronous = False

    def __init__(
        self,
        driver: Driver,
        num_blocks: int | None = None,
        threads: Threads = SYSTEM,
    ) -> None:
        super().__init__(num_blocks)
        name = driver.device_type
        if name != "cpu":  # where the simulated one is; torch gives it no number
            name = f"{name}:{driver.index}"
        self._torch_device = torch.device(name)
        self._driver = driver
        self._threads = threads
        self.events = EventBook(driver, threads)
        self._poller = EventPoller(
            driver,
            self.events.recycle,
            self._mark_failed,
            f"ucm-{driver.device_type}-{driver.index}-events",
            threads,
        )
        self._bound = threads.local()
        self._lanes: dict[Direction, _Lane] = {}
        self._relay: Relay | None = None
        self._pinned = PinnedMemory({})
        self._staging: StagingPool | None = None
        self._staged: StagedCopies | None = None
        self._digests: DeviceDigests | None = None
        self._digests_problem = ""
        self._failure: DeviceError | None = None
        self._has_let_go = False
        self._zeros = np.zeros(1, np.uint8)
        self._cleared: Fence = DoneFence()

    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """Take the engine's KV cache; the first time, start the poller."""
        super().register(layout, kv_caches)
        assert self._tensors is not None  # just registered
        with self._runtime(visits=True):
            self._driver.adopt(self._tensors.storages)
            try:
                if not self._lanes:
                    self._begin()
                if self._digests is not None:
                    self._digests.learn(each.prepared for each in self._groups.values())
                    if not self._digests.tables:
                        self._digests_problem = "pages are no whole chunks"
            except OSError as exc:
                self._digests_problem = str(exc)

    def _begin(self) -> None:
        """Make streams, start the poller, and see who computes checksums."""
        self._relay = Relay(self._driver, self._fence_on, self._threads)
        for direction in Direction:
            own = self._driver.make_stream()
            self._lanes[direction] = _Lane(own, self._threads.lock())
        self._poller.start()
        self._digests = find_digests(self._driver, own, self._threads)

    @property
    def tells_digests(self) -> bool:
        """Whether the device computes them of any group, and nobody found them wrong."""
        return not self._digests_problem and self._digests is not None

    @tells_digests.setter
    def tells_digests(self, is_so: bool) -> None:
        self._digests_problem = "" if is_so else "it told wrong ones"

    def unregister(self) -> None:
        """Let go of the engine's tensors; streams, events and pinned memory stay."""
        self._await_clear()
        super().unregister()
        if self._digests is not None:
            self._digests.forget()
        self._driver.adopt(())

    def numa_node(self) -> int | None:
        """Return the node that the device is attached to."""
        return self._driver.numa_node()

    def describe(self) -> Mapping[str, str]:
        """Return facts for the log."""
        host = f"host: {self._digests_problem}" if self._digests_problem else "host"
        checksums = "device" if self.tells_digests else host
        return {**self._driver.describe(), "checksums": checksums}

    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """Lock a store's memory; see ``Device.pin``."""
        piece = {memory.ctypes.data: memory.nbytes}
        with self._runtime(visits=True):
            self._pinned = PinnedMemory(self._pinned.pieces, piece)
            for lane in self._lanes.values():
                with lane.lock:  # copies that know no edge of it are submitted by then
                    pass
            try:
                self._driver.pin(memory.ctypes.data, memory.nbytes)
            except OSError as exc:
                return str(exc)
        self._pinned = PinnedMemory(self._pinned.pieces | piece)
        return ""

    def stage(self, nbytes: int, slot_bytes: int) -> str:
        """Take staging memory; see ``Device.stage``."""
        pool = StagingPool(nbytes, slot_bytes, pin=self.pin, threads=self._threads)
        self._staging, self._staged = pool, StagedCopies(pool, self._submit)
        sizes = [len(each.prepared.zeros) for each in self._groups.values()]
        self._zeros = np.frombuffer(mmap.mmap(-1, max(sizes, default=1)), np.uint8)
        self.pin(self._zeros)
        return pool.pin_problem

    def begin_step(self, step: int) -> None:
        """Make events that were seen before stale."""
        self.events.begin_step(step)

    def lease(self, event: EventRef | None = None) -> Fence:
        """
        Return a fence behind the engine's work, or behind its event.

        Raises:
            DeviceError: No event could be recorded; nothing proves anything.
        """
        self._check_registered()
        with self._runtime(visits=True):
            if self._driver.is_capturing():
                raise GraphCaptureError("no fence while a graph is recorded")
            if event is None:
                return self._fence_on(self._driver.current_stream())
            assert self._relay is not None  # registered
            return self._relay.fence_behind(self.events.borrow(event))

    def synchronize(self) -> None:
        """Block until the device has done all that was submitted."""
        self._check_registered()
        with self._runtime(visits=True):
            if self._driver.is_capturing():
                raise GraphCaptureError("no wait while a graph is recorded")
            assert self._relay is not None  # registered
            self._relay.end_loans_behind(self._driver.synchronize)

    def close(self) -> None:
        """
        End the poller, then let go of events, streams and memory.

        Idempotent. Events on loan are given a while to pass. Should one not, or the
        poller's thread not end, nothing is let go of; a later call tries again. What a
        device that has failed has on loan is never let go of.
        """
        if self._has_let_go:
            return
        if not self._await_clear():
            # They are read still, as what is staged may be.
            self._pinned = self._pinned.without(address_of(self._zeros))
        super().close()
        if self._staging is not None and not self._staging.close():
            # The device may write there still: never unpinned, and never freed.
            self._pinned = self._pinned.without(self._staging.memory.ctypes.data)
        if self.events.borrowed and self._failure is None:
            assert self._relay is not None  # nothing else is on loan
            self._end_loans(self._relay)
        if self.events.borrowed and self._failure is None:
            return
        if not self._poller.close(_CLOSE_TIMEOUT_S):
            return
        self._has_let_go = True
        self.events.close()
        self._lanes.clear()
        if self._digests is not None:
            self._digests.forget()
        self._relay = None
        self._driver.adopt(())
        if self._failure is None:
            # The process may be ending, and a piece be gone.
            with contextlib.suppress(RuntimeError), self._visit():
                for address in self._pinned.pieces:
                    with contextlib.suppress(RuntimeError):
                        self._driver.unpin(address)
        self._pinned = PinnedMemory({})

    def _await_clear(self) -> bool:
        """Wait for what is zeroed, as the memory is about to go away; False if it is not."""
        with contextlib.suppress(DeviceError):
            return self._cleared.wait(_CLOSE_TIMEOUT_S)
        return False

    def _end_loans(self, relay: Relay) -> None:
        """See that the relay waits for no event of the engine's any more."""
        try:
            with self._visit():
                relay.end_loans(self._driver.synchronize)
        except RuntimeError as exc:
            self._fail(exc)
        self._poller.wait_idle(_LOAN_TIMEOUT_S)

    def _locate(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> KVMemory:
        count, device = self._num_blocks, self._torch_device
        return find_regions(layout, kv_caches, num_blocks=count, device=device)

    def _prepare(self, parts: Sequence[Part], num_blocks: int) -> Pages:
        return Pages.of(parts)

    def _copy(self, copy: PagedCopy[Pages], direction: Direction) -> Fence:
        """Submit a span's copies, by way of staging memory where that is faster."""
        if not len(copy.blocks) or not copy.row_ids:
            return DoneFence()
        self._check_alive()
        if self._staged is None or self._pinned.holds(copy.slots):
            return self._submit(copy, direction)
        copy = attrs.evolve(copy, seeds=None)  # its blocks are cut, and come by parts
        to_host = direction is Direction.TO_HOST
        return self._staged.gather(copy) if to_host else self._staged.scatter(copy)

    def _clear(self, pages: PagedBlocks[Pages]) -> Fence:
        """Copy zeros there, pinned ones if there are any: for others a driver waits first."""
        zeros, own = self._zeros, pages.group.zeros
        is_pinned = address_of(zeros) in self._pinned.pieces and len(own) <= len(zeros)
        batch = pages.group.zeroing(pages, address_of(zeros if is_pinned else own))
        to_device = Direction.TO_DEVICE
        self._cleared = self._submit_batch(batch, to_device, is_pinned=is_pinned)
        return self._cleared

    def _submit(self, copy: PagedCopy[Pages], direction: Direction) -> Fence:
        """Submit a span's copies to the direction's stream, and their checksums."""
        return self._submit_batch(copy.group.batch(copy, direction), direction, copy)

    def _submit_batch(
        self,
        batch: CopyBatch,
        direction: Direction,
        copy: PagedCopy[Pages] | None = None,
        *,
        is_pinned: bool = False,
    ) -> Fence:
        """Submit copies, of slots and their checksums if they are those of a span."""
        lane, digests = self._lanes[direction], self._digests
        digest = None
        with self._runtime(visits=copy is None), lane.lock:
            if copy is not None:
                batch = self._pinned.cut(batch, copy.slots, direction)
                is_pinned = self._pinned.holds(copy.slots)
                digest = None if digests is None else digests.begin(copy)
            try:
                self._driver.copy(batch, direction, lane.stream, is_pinned=is_pinned)
                told = None if digest is None else digest(lane.stream)
                fence = self._fence_behind_copy(lane.stream)
                return fence if told is None else told(fence)
            except Exception as exc:  # noqa: BLE001 - whatever: part may be under way
                # No error, or the caller would give blocks and slots back.
                return FailedFence(self._fail(exc))

    def _fence_behind_copy(self, stream: Stream) -> Fence:
        try:
            return self._fence_on(stream)
        except DeviceFailedError as exc:
            return FailedFence(exc)
        except DeviceError:  # no event to be had: wait for all instead
            return self._synchronized()

    def _synchronized(self) -> Fence:
        try:
            self._driver.synchronize()
        except RuntimeError as exc:
            return FailedFence(self._fail(exc))
        return DoneFence()

    def _fence_on(self, stream: Stream) -> Fence:
        """
        Record an event of ours on *stream* and have it watched.

        Raises:
            DeviceError: It could not be recorded; the event is gone.
        """
        self._check_alive()
        try:
            own = self.events.record(stream)
        except RuntimeError as exc:
            raise DeviceError(f"no event could be recorded: {exc}") from exc
        return self._poller.watch(self._driver.key(stream), own)

    @contextlib.contextmanager
    def _runtime(self, *, visits: bool = False) -> Iterator[None]:
        """Call the driver, *visits* on a host's thread; what it raises is a failure."""
        self._check_open()
        self._check_alive()
        try:
            if visits:
                with self._visit():
                    yield
                return
            if not getattr(self._bound, "is_bound", False):
                self._driver.bind_thread()
                self._bound.is_bound = True
            yield
        except RuntimeError as exc:
            raise self._fail(exc) from exc

    @contextlib.contextmanager
    def _visit(self) -> Iterator[None]:
        """Have the device be a host's thread's current one, which has its own again behind that."""
        driver, before = self._driver, self._driver.current_index()
        is_own = before == driver.index
        try:
            if not (is_own and getattr(self._bound, "is_bound", False)):
                driver.bind_thread()
            self._bound.is_bound = is_own
            yield
        finally:
            if not is_own:
                driver.make_current(before)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise anew(self._failure)

    def _fail(self, exc: Exception) -> DeviceError:
        """Mark the device as failed, for good; return the error to raise."""
        error = DeviceFailedError(f"the device has failed: {str(exc) or repr(exc)}")
        self._mark_failed(error)
        self._poller.fail(error)
        return anew(self._failure or error)

    def _mark_failed(self, error: DeviceError) -> None:
        if self._failure is None:
            self._failure = error
