# SPDX-License-Identifier: Apache-2.0
"""
A short life of an engine on a simulated accelerator, in which one call of the driver fails.

It saves, loads, does both layer by layer, lends an event, loads a block that rotted, sleeps
and ends. All of it is the same each time up to the call that fails, so that each call can be
the one, in each of the ways in which a runtime fails. What was told as loaded, and what is
stored, is then what was computed; all ends, and all is given back that can be.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import attrs
import numpy as np
import numpy.typing as npt

from tests.kit.accelerator import SimEvent
from tests.kit.accelerator_streams import Bias, Semantics, SimHardware
from tests.kit.lockstep import TraceChecker
from tests.kit.simulation import Simulation
from tests.rig import KEYSPACE_DIGEST, order
from tests.simulation.contents import (
    BLOCK_BYTES,
    CONTENTS,
    KEYS,
    LAYERS,
    LAYOUT,
    NEVER,
    NUM_BLOCKS,
    NUM_ROWS,
    NUMBERS,
    PAGE_BYTES,
    POISON,
    check_bytes,
)
from tests.simulation.driver_troubles import HANG_S, Trouble, TroubledDriver
from tests.simulation.row_world import group_of
from tests.simulation.runtime_world import CheckedStore
from tests.simulation.traced import traced
from ucm.config import UCMConfig
from ucm.devices import events
from ucm.devices.abc import Fence
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.events import FailedFence
from ucm.devices.selection import EventSelector
from ucm.errors import DeviceError, PipelineClosedError
from ucm.layerwise import RowLoads, RowSaves
from ucm.metrics import Counters
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind

__all__ = ["DriverWorld"]

_FLUSH_S = 2 * HANG_S
"""The loop stands still with a driver that hangs as a failed load's blocks are zeroed."""
_TIMEOUTS = {"save": 0.5, "load": 0.5, "stuck": 1.0, "shutdown": 0.5}
_OTHER_DEVICE = 1


@attrs.define
class _Told:
    """What is known of an order."""

    order: SpanOrder
    numbers: Sequence[int]
    outcome: OutcomeKind | None = None
    is_free: bool = False


class DriverWorld:
    """
    One such life.

    Args:
        semantics: The runtime.
        pins: What host memory can be pinned.
        nth: Which call of the driver fails; none by default.
        trouble: How.
    """

    def __init__(
        self,
        semantics: Semantics,
        pins: str,
        nth: int = 0,
        trouble: Trouble = Trouble.ERROR,
    ) -> None:
        self.simulation = Simulation(3)
        self.hardware = SimHardware(
            self.simulation.dice,
            semantics=semantics,
            bias=Bias.UNIFORM,
            pace=(40,),
            pause=self.simulation.pause,
        )
        sleep = self.simulation.sleep
        self.driver = TroubledDriver(self.hardware, pins, nth, trouble, sleep)
        self.told: dict[int, _Told] = {}
        self._nth, self._trouble = nth, trouble
        self._step = self._before_close = 0
        self._rotten = b""
        self._rewritten: set[int] = set()
        self._runtime: Runtime | None = None

    def run(self) -> None:
        """Run to the end; whatever does not hold is an AssertionError."""
        self.simulation.run(self._main, linger=2 * HANG_S)
        assert [] == self.hardware.violations

    # The engine's life.

    def _main(self) -> None:
        self.hardware.thread().index = _OTHER_DEVICE
        self.compute = self.hardware.make_stream(0, "compute")
        with self.driver.on_stream(self.compute):
            self._live()

    def _live(self) -> None:
        self.device = AcceleratorDevice(
            self.driver, NUM_BLOCKS, self.simulation.threads
        )
        memory = self.driver.allocate(NUM_ROWS * NUM_BLOCKS * PAGE_BYTES)
        parts = 2 if self.hardware.semantics.has_tuple_caches else 1
        whole = memory.view(NUM_ROWS, parts, NUM_BLOCKS, PAGE_BYTES // parts)
        self.pages = whole.numpy()
        caches = [tuple(row) if parts > 1 else row[0] for row in whole]
        self.caches = dict(zip(LAYERS, caches, strict=True))
        self.store = CheckedStore(self._check_stored, NUM_BLOCKS)
        with self._own_device(), contextlib.suppress(DeviceError, PipelineClosedError):
            self.device.register(LAYOUT, self.caches)
            self._make_runtime()
            self.runtime.start()
            self._steps()
        self._end()

    def _make_runtime(self) -> None:
        queue = {"staging_bytes": 4 * BLOCK_BYTES}
        self.checker = TraceChecker()
        self.runtime = self._runtime = Runtime(
            self.store,
            self.device,
            layout=LAYOUT,
            config=UCMConfig.from_mapping({"queue": queue, "timeout": _TIMEOUTS}),
            counters=Counters(),
            log=traced(self.simulation, self.checker, "worker-0"),
            threads=self.simulation.threads,
        )
        self.selector = EventSelector(
            self.device,
            Counters(),
            enable_event_sync=True,
            enable_reshape_cache_event_sync=True,
        )

    def _steps(self) -> None:
        self._begin_step()
        self._save(range(4), range(4))
        self._save(range(4, 6), range(4, 6), SimEvent(self.hardware))
        self._settle()
        self._begin_step()
        self._load(range(6, 10), range(4))
        self._settle()
        self._begin_step()
        self._forward(range(4, 6), range(10, 12), range(12, 15), range(20, 23))
        self._settle()
        self._rot(KEYS[1])
        self._begin_step()
        self._load(range(15, 17), range(2))
        self._settle()
        self._sleep()
        self._begin_step()
        self._save(range(23, 24), range(17, 18))
        self._settle()

    def _begin_step(self) -> None:
        self._step += 1
        with self._own_device():
            self.selector.begin_step(self._step)

    def _save(
        self,
        numbers: Sequence[int],
        blocks: Sequence[int],
        event: SimEvent | None = None,
    ) -> None:
        self._write(numbers, blocks)
        if event is not None:
            with contextlib.suppress(RuntimeError):  # the engine's own trouble
                event.record(self.compute)
        metadata = SimpleNamespace(reshape_cache_event=event)
        fence = self._fence(lambda: self.selector.for_layer("", metadata))
        made = self._order(Direction.SAVE, numbers, blocks)
        self.runtime.submit(KEYSPACE_DIGEST, [made], fence)

    def _load(self, blocks: Sequence[int], numbers: Sequence[int]) -> None:
        fence = self._fence(self.device.lease)
        made = self._order(Direction.LOAD, numbers, blocks)
        self.runtime.submit(KEYSPACE_DIGEST, [made], fence)

    def _forward(
        self,
        loaded: Sequence[int],
        into: Sequence[int],
        blocks: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Run the layers; each loads and saves its own row."""
        loads = RowLoads(self.runtime, LAYOUT, 1)
        saves = RowSaves(self.runtime, LAYOUT)
        load = group_of(self._order(Direction.LOAD, loaded, into))
        loads.begin([load], self._fence(self.device.lease))
        saves.begin([group_of(self._order(Direction.SAVE, numbers, blocks))])
        for row, layer in enumerate(LAYERS):
            with self._own_device(), contextlib.suppress(DeviceError):
                loads.wait_for(layer)
            self._write(numbers, blocks, [row])
            saves.layer_done(layer, functools.partial(self._fence_of, layer))
        saves.finish(lambda: self._fence(self.selector.for_step))
        with contextlib.suppress(DeviceError):
            loads.finish()

    def _sleep(self) -> None:
        """Take the memory away, if nobody uses it, and bring it back."""
        with self._own_device():
            if self.runtime.quiesce():
                self.device.unregister()
                self.device.register(LAYOUT, self.caches)

    def _write(
        self, numbers: Sequence[int], blocks: Sequence[int], rows: Sequence[int] = ()
    ) -> None:
        for row in rows or range(NUM_ROWS):
            self.driver.launch(self.compute, lambda: None)
            for number, block in zip(numbers, blocks, strict=True):
                content = CONTENTS[number][row].reshape(self.pages.shape[1], -1)
                put = functools.partial(np.copyto, self.pages[row, :, block], content)
                self.driver.launch(self.compute, put)

    def _order(
        self, direction: Direction, numbers: Sequence[int], blocks: Sequence[int]
    ) -> SpanOrder:
        number = len(self.told) + 1
        made = order(number, direction, numbers, blocks, f"r{number}")
        self.told[number] = _Told(made, numbers)
        return made

    def _rot(self, key: bytes) -> None:
        entry = self.store._entries.get(key)  # type: ignore[call-overload]
        if entry is not None:
            self.store._pool[entry.slot, 0] ^= 1
            self._rotten = key

    def _fence_of(self, layer: str) -> Fence:
        return self._fence(lambda: self.selector.for_layer(layer, None))

    def _fence(self, make: Callable[[], Fence]) -> Fence:
        with self._own_device():
            try:
                return make()
            except DeviceError as exc:
                return FailedFence(exc)

    @contextlib.contextmanager
    def _own_device(self) -> Iterator[None]:
        """Whatever is asked for, the thread has its own device and stream behind it."""
        try:
            yield
        finally:
            assert _OTHER_DEVICE == self.hardware.thread().index, self.driver.failing
            assert {0: self.compute} == self.hardware.thread().streams

    # What it hears, and what must hold.

    def _settle(self) -> None:
        assert self.runtime.flush(_FLUSH_S), "a ticket does not end"
        self._poll()
        self.hardware.drain()
        self._poll()

    def _poll(self) -> None:
        for notice in self.runtime.poll():
            told = self.told[notice.ticket.transfer_id]
            if notice.outcome is not None:
                told.outcome = notice.outcome.kind
            told.is_free |= notice.kind is NoticeKind.RELEASED
        for told in self.told.values():
            if told.order.kind is TransferKind.LOAD:
                self._look(told)

    def _look(self, load: _Told) -> None:
        """See that a load is well; write to the blocks of one that failed and is over."""
        for number, block in zip(load.numbers, load.order.block_ids, strict=True):
            if load.outcome is OutcomeKind.COMMITTED:
                self._check_block(block, CONTENTS[number], "was told as loaded")
            elif block in self._rewritten:
                self._check_block(block, NEVER, "was given back under a copy")
            elif load.outcome is not None and load.is_free:
                self._rewritten.add(block)
                self.pages[:, :, block] = POISON

    def _check_block(
        self, block: int, expected: npt.NDArray[np.uint8], what: str
    ) -> None:
        found = self.pages[:, :, block].reshape(NUM_ROWS, PAGE_BYTES)
        check_bytes(expected, found, f"block {block} {what}")

    def _check_stored(self) -> None:
        for key, entry in self.store._entries.items():
            if key != self._rotten:
                row = self.store._pool[entry.slot].reshape(NUM_ROWS, PAGE_BYTES)
                check_bytes(CONTENTS[NUMBERS[key]], row, "a key is stored wrongly")

    def _end(self) -> None:
        """Close, and see that all has ended and is given back."""
        self._check_stored()
        self._check_recycled()
        self._before_close = len(self.driver.verbs)
        with self._own_device():
            (self._runtime or self.device).close()
        self.simulation.sleep(2 * HANG_S)
        self.hardware.drain()
        if self._runtime is not None:
            self._poll()
            self.checker.finish()
            assert all(told.outcome for told in self.told.values()), self.driver.failing
        self.device.close()
        left = [name for name in self.simulation.names() if name.startswith("ucm")]
        assert [] == left, (self.driver.failing, left)
        if self.device._failure is None and self._trouble is not Trouble.HANG:
            self._check_given_back()

    def _check_recycled(self) -> None:
        """Events have passed and are free again before a close lets go of all."""
        self.simulation.sleep(0.1)
        if self.device._failure is None and self._trouble is not Trouble.HANG:
            assert 0 == self.device.events.num_own, self.driver.failing

    def _check_given_back(self) -> None:
        """Nothing of a device that goes on is kept."""
        assert {} == self.device.events.borrowed
        assert not [e for e in events._ABANDONED if e._hardware is self.hardware]
        assert not self.store._writing
        assert self._nth > self._before_close or {} == self.driver.pins
