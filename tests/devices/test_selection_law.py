# SPDX-License-Identifier: Apache-2.0
"""Whatever an engine tells and whatever fails: saves are safe, and all is counted."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.devices.selection_kit import (
    PREFIX,
    EngineEvent,
    Metadata,
    StreamFence,
    World,
    entry,
)
from ucm.devices.abc import Fence
from ucm.errors import (
    DeviceError,
    EventNotRecordedError,
    EventStaleError,
    EventUnreadableError,
    ForeignEventError,
)
from ucm.metrics import METRICS

LAYERS = ("layer.0", "layer.1", "layer.2")
REASONS = ("none", "missing", "handle_failed", "unrecorded", "stale", "foreign")


class Engine:
    """
    An engine that writes layers and tells of it in one way or another.

    Args:
        world: Where it runs.
        data: Draws what happens.
    """

    def __init__(self, world: World, data: st.DataObject) -> None:
        self.world = world
        self.data = data
        self.num_layer_dumps = 0

    def draw(self, *choices: object) -> object:
        """Return one of *choices*."""
        return self.data.draw(st.sampled_from(choices))

    def run_step(self, step: int) -> None:
        """Write some layers; save some of them, then perhaps the whole step."""
        self.world.selector.begin_step(step)
        has_hooks = self.draw(False, True)
        for name in self.data.draw(st.lists(st.sampled_from(LAYERS), max_size=5)):
            before = self.world.device.num_writes
            self.world.device.num_writes += 1
            if has_hooks:
                self.fail_sometimes()
                self.world.selector.kv_written(self.draw(name, ""))
            metadata = self.draw_metadata(name, before)
            if self.draw(False, True):
                self.fail_sometimes()
                self.check(self.world.selector.for_layer(name, metadata))
                self.num_layer_dumps += 1
        self.fail_sometimes()

    def fail_sometimes(self) -> None:
        """Let the device record events from now on, or not."""
        self.world.device.failure = self.draw(None, None, DeviceError("no event"))

    def draw_event(self) -> object:
        """Return an event that stands behind the last write, or one that is refused."""
        written = self.world.device.num_writes
        refusals = (
            EventUnreadableError,
            EventNotRecordedError,
            EventStaleError,
            ForeignEventError,
            DeviceError,
        )
        return self.draw(
            None,
            EngineEvent(written),
            EngineEvent(written),
            EngineEvent(0, self.draw(*refusals)),
        )

    def draw_metadata(self, name: str, before: int) -> object:
        """Return metadata; where it is a list, of events that prove a part only."""
        own, shared = entry(self.draw_event()), self.draw_event()
        by_layer = Metadata({name: own})
        by_layer.reshape_cache_event = shared
        part = EngineEvent(before)
        return self.draw(
            None, {}, {name: own}, by_layer, entry(shared), [{name: entry(part)}] * 2
        )

    def check(self, fence: Fence) -> None:
        """See that the fence stands behind the last write."""
        if isinstance(fence, StreamFence):
            assert self.world.device.num_writes == fence.num_writes
        else:
            assert "synchronize" == self.world.device.calls[-1]


class TestLaw:
    @pytest.mark.slow
    @settings(deadline=None)
    @given(data=st.data())
    def test_each_dump_is_fenced_behind_its_write_and_counted_once(
        self, data: st.DataObject
    ) -> None:
        """S0-42, S0-16, S0-17, S0-24: whatever hooks, events and failures come, each
        fence stands behind the layer's write, exactly one *used* counter grows for
        each dump, and whatever was not used has a reason."""
        world = World()
        engine = Engine(world, data)
        for step in range(data.draw(st.integers(1, 3))):
            engine.run_step(step)
        counted = world.counted()
        used = {name: n for name, n in counted.items() if name.endswith("_used")}
        assert engine.num_layer_dumps == sum(used.values())
        reasons = sum(counted.get(f"reshape_cache_{name}", 0) for name in REASONS)
        fallbacks = ("current_stream_used", "sync_fallback_used")
        assert reasons == sum(counted.get(name, 0) for name in fallbacks)


class TestMetrics:
    def emitted(self) -> Iterator[str]:
        """Take each path once and yield what it counts."""
        events = [
            EngineEvent(0, refusal)
            for refusal in (
                None,
                EventUnreadableError,
                EventNotRecordedError,
                EventStaleError,
                ForeignEventError,
            )
        ]
        world = World()
        for event in events:
            world.selector.for_layer("a", {"a": entry(event)})
        for metadata in (None, {}, entry(events[0])):
            world.selector.for_layer("a", metadata)
        world.selector.kv_written("a")
        world.selector.for_layer("a", None)
        world.device.failure = DeviceError("no event")
        world.selector.for_step()
        yield from world.counters.take()["counters"]

    def test_declared_metrics_of_events_are_those_emitted(self) -> None:
        """S0-43: no declared name is dead; one that nobody declared is a KeyError."""
        declared = {name for name in METRICS if name.startswith(PREFIX)}
        assert declared == set(self.emitted())
        assert 11 == len(declared)
