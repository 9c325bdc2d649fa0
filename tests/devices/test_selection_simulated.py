# SPDX-License-Identifier: Apache-2.0
"""The choice of an event on simulated hardware, where work happens late."""

import random
from collections.abc import Iterator

import pytest

from tests.devices.selection_kit import PREFIX, Untouchable, entry
from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_streams import CUDA, NPU, Semantics, SimHardware
from tests.kit.lockstep import Tracer
from ucm.devices.abc import Fence
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.selection import EventSelector
from ucm.errors import GraphCaptureError
from ucm.metrics import Counters
from ucm.testing.device_memory import Arrangement, Engine, Nesting
from ucm.tracing import EVENT_REFUSED

LAYER = "group0.row0"
ARRANGEMENT = Arrangement(
    num_blocks=4, nesting=Nesting.LAYERS, pages=(64,), paddings=(0,), groups=((0,),)
)
TIMEOUT = 60.0


class World:
    """An engine whose layer is written on a device, and a selector beside it."""

    def __init__(self, semantics: Semantics) -> None:
        self.hardware = SimHardware(random.Random(7), semantics=semantics)
        self.driver = SimulatedDriver(0, self.hardware)
        self.driver.bind_thread()
        engine = Engine(ARRANGEMENT, self.driver.allocate)
        self.device = AcceleratorDevice(self.driver, ARRANGEMENT.num_blocks)
        self.device.register(engine.layout, engine.kv_caches)
        self.counters = Counters()
        self.tracer = Tracer()
        self.selector = EventSelector(
            self.device,
            self.counters,
            enable_event_sync=True,
            enable_reshape_cache_event_sync=True,
            log=self.tracer.log,
        )
        self.selector.begin_step(1)
        self.is_written = False

    def write(self) -> None:
        """Submit the layer's kernel."""
        self.is_written = False
        self.driver.launch(self.driver.current_stream(), self._write)

    def _write(self) -> None:
        self.is_written = True

    def check(self, fence: Fence, *counted: str) -> None:
        """See that the layer is written when the fence passes; and what was counted."""
        assert fence.wait(TIMEOUT)
        assert self.is_written
        names = {f"{PREFIX}{name}_total": 1 for name in counted}
        assert names == self.counters.take()["counters"]


@pytest.fixture(params=[CUDA, NPU], ids=lambda each: each.name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Run a world; at its end nothing was misused and nothing is on loan."""
    world = World(request.param)
    yield world
    world.hardware.drain()
    world.device.close()
    assert [] == world.hardware.violations
    assert {} == world.device.events.borrowed


class TestChoice:
    def test_event_of_the_engine_is_waited_for(self, world: World) -> None:
        """S0-21, S0-34: what the layer's own event stands behind is written first."""
        event = SimEvent(world.hardware)
        world.write()
        event.record()
        fence = world.selector.for_layer(LAYER, {LAYER: entry(event)})
        world.check(fence, "reshape_cache_layer_used")

    def test_hook_is_waited_for(self, world: World) -> None:
        """S0-16: what was submitted at the hook is written first."""
        world.write()
        world.selector.kv_written(LAYER)
        fence = world.selector.for_layer(LAYER, Untouchable())
        world.check(fence, "written_hook_used")

    def test_event_that_was_never_recorded_is_not_believed(self, world: World) -> None:
        """S0-24: it says that it has passed while the layer is still to be written."""
        event = SimEvent(world.hardware)
        world.write()
        assert event.query()
        fence = world.selector.for_layer(LAYER, {LAYER: entry(event)})
        world.check(fence, "reshape_cache_unrecorded", "current_stream_used")

    def test_event_of_an_earlier_step_is_not_believed(self, world: World) -> None:
        """S0-24: an event that was good one step ago says nothing of this one's write."""
        event = SimEvent(world.hardware)
        world.write()
        event.record()
        fence = world.selector.for_layer(LAYER, {LAYER: entry(event)})
        world.check(fence, "reshape_cache_layer_used")
        world.selector.begin_step(2)
        world.write()
        fence = world.selector.for_layer(LAYER, {LAYER: entry(event)})
        world.check(fence, "reshape_cache_stale", "current_stream_used")

    def test_event_of_another_device_is_not_believed(self, world: World) -> None:
        """S0-26: another device's progress is no proof; its event is not touched."""
        event = SimEvent(world.hardware)
        event.record(world.hardware.make_stream(1))
        world.write()
        fence = world.selector.for_layer(LAYER, entry(event))
        world.check(fence, "reshape_cache_foreign", "current_stream_used")
        assert {"record"} == set(event.uses)

    def test_object_that_is_no_event_is_not_believed(self, world: World) -> None:
        """S0-40: what has no handle is counted, and the current stream is used."""
        world.write()
        fence = world.selector.for_layer(LAYER, entry("event"))
        world.check(fence, "reshape_cache_handle_failed", "current_stream_used")

    def test_reason_of_a_refusal_is_logged_once(self, world: World) -> None:
        """S0-20: one record names the type of what could not be read, and another
        reason gets one of its own; the counters have the rest."""
        for event in ("event", "event", SimEvent(world.hardware)):
            world.selector.for_layer(LAYER, entry(event))
        told = [
            (line["counter"], line["error"])
            for line in world.tracer.events
            if line["event"] == EVENT_REFUSED
        ]
        counters = [
            f"{PREFIX}reshape_cache_{reason}_total"
            for reason in ("handle_failed", "unrecorded")
        ]
        assert counters == [counter for counter, _ in told]
        assert "a str has no handle" in told[0][1]

    def test_graph_that_is_recorded_is_left_alone(self, world: World) -> None:
        """While a graph is recorded a hook does nothing and a save is refused; the
        device is neither asked for an event nor synchronized."""
        with world.driver.capturing():
            world.selector.kv_written(LAYER)
            for fenced in (
                lambda: world.selector.for_layer(LAYER, None),
                world.selector.for_step,
            ):
                with pytest.raises(GraphCaptureError):
                    fenced()
        world.write()
        fence = world.selector.for_layer(LAYER, None)
        world.check(fence, "reshape_cache_none", "current_stream_used")
