# SPDX-License-Identifier: Apache-2.0
"""Which event proves that KV was written: what is chosen, refused, and counted."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.devices.selection_kit import (
    OURS,
    PREFIX,
    EngineEvent,
    Metadata,
    Untouchable,
    World,
    entry,
)
from tests.rig import LAYERS, LAYOUT, NUM_ROWS, PAGE_BYTES
from ucm.devices.cpu import CPUDevice
from ucm.devices.selection import EventSelector, ReshapeSource, find_reshape_event
from ucm.errors import (
    DeviceError,
    DeviceFailedError,
    EventNotRecordedError,
    EventStaleError,
    EventUnreadableError,
    ForeignEventError,
    GraphCaptureError,
)
from ucm.metrics import Counters

FALLBACKS = [
    pytest.param(None, [OURS], "current_stream_used", id="current-stream"),
    pytest.param(
        DeviceError("x"), [OURS, "synchronize"], "sync_fallback_used", id="no-event"
    ),
]


class TestFind:
    """``find_reshape_event``, which only looks."""

    def test_no_metadata_has_no_event(self) -> None:
        """S0-07: a step without attention is told apart from a missing event."""
        assert (None, "none") == find_reshape_event("a", None)

    def test_event_of_the_layer_is_found(self) -> None:
        """S0-08: the layer's own entry is looked at."""
        event = EngineEvent(1)
        assert (event, "layer") == find_reshape_event("a", {"a": entry(event)})

    def test_event_of_the_layer_wins(self) -> None:
        """S0-09: an event for this layer says more than one for all."""
        metadata = Metadata(a=entry("own"))
        metadata.reshape_cache_event = "shared"
        assert ("own", "layer") == find_reshape_event("a", metadata)

    @pytest.mark.parametrize(
        ("metadata", "why"),
        [
            (Metadata(), "KeyError: no entry"),
            (SimpleNamespace(), "TypeError: not subscriptable"),
            (Metadata(a=SimpleNamespace()), "AttributeError: no such attribute"),
            (Metadata(a=None), "AttributeError: no entry to speak of"),
            (Metadata(a=entry(None)), "S0-11: an event that is not set"),
        ],
        ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
    )
    def test_search_goes_on_where_the_layer_has_none(
        self, metadata: object, why: str
    ) -> None:
        """S0-10, S0-11, S0-13, S0-14: then the metadata itself is asked, and if it has
        none either, or one that is not set, the event is missing."""
        assert (None, "direct_missing") == find_reshape_event("a", metadata), why
        metadata.reshape_cache_event = None
        assert (None, "direct_missing") == find_reshape_event("a", metadata)
        metadata.reshape_cache_event = "shared"
        assert ("shared", "direct") == find_reshape_event("a", metadata)

    @pytest.mark.parametrize("error", [ValueError, RuntimeError, IndexError, OSError])
    def test_other_errors_of_the_metadata_are_not_hidden(
        self, error: type[Exception]
    ) -> None:
        """S0-10: an error that says more than "there is none" goes to the caller."""

        class Broken(dict):
            def __getitem__(self, name: str) -> object:
                raise error(name)

        with pytest.raises(error):
            find_reshape_event("a", Broken())

    @pytest.mark.parametrize("name", [None, ""])
    def test_layer_without_a_name_is_not_looked_up(self, name: str | None) -> None:
        """S0-12: an entry that happens to have no name is nobody's."""
        metadata = Metadata({name: entry("unnamed")})
        assert (None, "direct_missing") == find_reshape_event(name, metadata)
        metadata.reshape_cache_event = "shared"
        assert ("shared", "direct") == find_reshape_event(name, metadata)

    @pytest.mark.parametrize(
        "metadata",
        [[], [{"a": entry("half")}, {"a": entry("other half")}], [{}, None]],
        ids=["empty", "two", "odd"],
    )
    def test_event_of_one_part_of_a_step_is_not_taken(self, metadata: object) -> None:
        """S0-15: in a list each event proves its own part only, so none is taken."""
        assert (None, "direct_missing") == find_reshape_event("a", metadata)


class TestOff:
    @pytest.mark.parametrize(("failure", "calls", "counted"), FALLBACKS)
    def test_former_path_is_taken(
        self, failure: DeviceError | None, calls: list[object], counted: str
    ) -> None:
        """S0-01, S0-02, S0-41: without the feature no metadata is read, no hook is
        listened to, and only the two counters of the former path ever move."""
        world = World(reshape=False)
        world.selector.kv_written("a")
        assert [] == world.asked()
        world.device.failure = failure
        for fenced in (
            lambda: world.selector.for_layer("a", Untouchable()),
            lambda: world.selector.for_layer("a", None),
            world.selector.for_step,
        ):
            assert fenced().is_done()
            assert calls == world.asked()
        assert {counted: 3} == world.counted()

    @pytest.mark.parametrize("reshape", [False, True])
    def test_without_events_the_device_is_synchronized(self, reshape: bool) -> None:
        """S0-04, S0-37, S0-41: with event sync off nothing is borrowed or recorded,
        whatever the newer key says, and each dump counts as synchronized."""
        world = World(events=False, reshape=reshape)
        world.selector.kv_written("a")
        assert [] == world.asked()
        assert world.selector.for_layer("a", Untouchable()).is_done()
        assert world.selector.for_step().is_done()
        assert ["synchronize"] * 2 == world.asked()
        assert {"sync_fallback_used": 2} == world.counted()


class TestStep:
    @pytest.mark.parametrize(("failure", "calls", "counted"), FALLBACKS)
    def test_whole_blocks_are_saved_behind_the_stream(
        self, failure: DeviceError | None, calls: list[object], counted: str
    ) -> None:
        """S0-03: the newer key changes nothing for whole blocks; a layer's hook
        proves nothing about the layers behind it."""
        world = World()
        world.selector.kv_written("a")
        world.selector.kv_written("")
        world.asked()
        world.device.failure = failure
        world.selector.for_step()
        assert calls == world.asked()
        assert {counted: 1} == world.counted()

    def test_same_step_begins_once(self) -> None:
        """S2-08: a step that is announced again neither begins again nor forgets."""
        world = World()
        world.selector.begin_step(7)
        world.selector.kv_written("a")
        world.selector.begin_step(7)
        world.selector.for_layer("a", None)
        world.selector.begin_step(8)
        assert [("begin_step", 7), OURS, ("begin_step", 8)] == world.asked()
        assert {"written_hook_used": 1} == world.counted()


class TestLayer:
    @pytest.mark.parametrize(
        ("metadata", "source"),
        [
            (lambda event: {"a": entry(event)}, ReshapeSource.LAYER),
            (entry, ReshapeSource.DIRECT),
        ],
        ids=["layer", "direct"],
    )
    def test_event_of_the_engine_is_used(
        self, metadata: Callable[[object], object], source: ReshapeSource
    ) -> None:
        """S0-21, S0-34, S0-35: an event that the device takes is all that it is asked
        for, and it is counted by where it was found."""
        world, event = World(), EngineEvent(3)
        assert 3 == world.selector.for_layer("a", metadata(event)).num_writes
        assert [("lease", event)] == world.asked()
        assert {f"reshape_cache_{source}_used": 1} == world.counted()

    @pytest.mark.parametrize(("failure", "calls", "used"), FALLBACKS)
    @pytest.mark.parametrize(
        ("metadata", "reason"), [(None, "none"), ([], "missing"), ({}, "missing")]
    )
    def test_event_that_is_missing_is_counted_and_made_up_for(
        self,
        failure: DeviceError | None,
        calls: list[object],
        used: str,
        metadata: object,
        reason: str,
    ) -> None:
        """S0-22, S0-23, S0-36, S0-37, S0-38, S0-39: an event on the current stream is
        used, or if there can be none the device is synchronized, exactly once."""
        world = World()
        world.device.failure = failure
        assert world.selector.for_layer("a", metadata).is_done()
        assert calls == world.asked()
        assert {f"reshape_cache_{reason}": 1, used: 1} == world.counted()

    @pytest.mark.parametrize(("failure", "calls", "used"), FALLBACKS)
    @pytest.mark.parametrize(
        ("refusal", "reason"),
        [
            (EventUnreadableError, "handle_failed"),
            (EventNotRecordedError, "unrecorded"),
            (EventStaleError, "stale"),
            (ForeignEventError, "foreign"),
            (DeviceError, "handle_failed"),
        ],
    )
    def test_event_that_is_refused_is_counted_and_made_up_for(
        self,
        failure: DeviceError | None,
        calls: list[object],
        used: str,
        refusal: type[DeviceError],
        reason: str,
    ) -> None:
        """S0-24, S0-26, S0-40: an event that cannot be read or waited for, was not
        recorded in this step or is another device's is not used, nor is the next one
        found instead."""
        world, event = World(), EngineEvent(3, refusal)
        metadata = Metadata(a=entry(event))
        metadata.reshape_cache_event = EngineEvent(3)
        world.device.failure = failure
        assert world.selector.for_layer("a", metadata).is_done()
        assert [("lease", event), *calls] == world.asked()
        assert {f"reshape_cache_{reason}": 1, used: 1} == world.counted()

    def test_cpu_refuses_every_event_and_goes_on(self) -> None:
        """S0-24: on a real device an event of torch that was never recorded, and says
        that it is done, is not believed."""
        counters = Counters()
        device = CPUDevice(1)
        memory = torch.zeros((NUM_ROWS, 1, PAGE_BYTES), dtype=torch.uint8)
        device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
        selector = EventSelector(
            device,
            counters,
            enable_event_sync=True,
            enable_reshape_cache_event_sync=True,
        )
        event = torch.Event()
        assert event.query()
        assert selector.for_layer("a", {"a": entry(event)}).is_done()
        assert 1 == counters.total(f"{PREFIX}reshape_cache_unrecorded_total")
        assert 1 == counters.total(f"{PREFIX}current_stream_used_total")


class TestHook:
    def test_hook_is_preferred_to_all_else(self) -> None:
        """S0-16: what stood in the stream at the hook is what the layer waits for, and
        the engine's metadata is not even looked at."""
        world = World()
        world.device.num_writes = 4
        world.selector.kv_written("a")
        world.device.num_writes = 9
        assert 4 == world.selector.for_layer("a", Untouchable()).num_writes
        assert 4 == world.selector.for_layer("a", Untouchable()).num_writes
        assert [OURS] == world.asked()
        assert {"written_hook_used": 2} == world.counted()

    def test_layer_has_the_fence_of_its_own_hook(self) -> None:
        """S0-16: hooks of several layers are told apart, and the latest of each counts."""
        world = World()
        for written, name in enumerate("aba", start=1):
            world.device.num_writes = written
            world.selector.kv_written(name)
        assert 2 == world.selector.for_layer("b", None).num_writes
        assert 3 == world.selector.for_layer("a", None).num_writes

    def test_hook_of_an_earlier_step_is_forgotten(self) -> None:
        """S0-16: a hook proves the write of its own step only."""
        world = World()
        world.selector.begin_step(1)
        world.selector.kv_written("a")
        world.selector.kv_written("")
        world.selector.begin_step(2)
        world.device.num_writes = 5
        assert 5 == world.selector.for_layer("a", None).num_writes
        assert {"reshape_cache_none": 1, "current_stream_used": 1} == world.counted()

    @pytest.mark.parametrize("name", ["a", "", None])
    def test_hook_without_a_name_belongs_to_the_next_layer(
        self, name: str | None
    ) -> None:
        """S0-17: a back end that names no layer is taken to speak of the layer that is
        saved next, and never of a later one."""
        world = World()
        world.device.num_writes = 4
        world.selector.kv_written("")
        world.device.num_writes = 9
        assert 4 == world.selector.for_layer(name, None).num_writes
        assert 9 == world.selector.for_layer("b", None).num_writes
        assert {
            "written_hook_used": 1,
            "reshape_cache_none": 1,
            "current_stream_used": 1,
        } == world.counted()

    @pytest.mark.parametrize(
        ("hooks", "expected"), [(["", "a"], 2), (["a", ""], 2), (["", ""], 2)]
    )
    def test_later_hook_takes_the_place_of_one_without_a_name(
        self, hooks: list[str], expected: int
    ) -> None:
        """S0-17: whichever hook was the last is the layer's, and it is used up with
        all hooks before it that may have been the same layer's."""
        world = World()
        for written, name in enumerate(hooks, start=1):
            world.device.num_writes = written
            world.selector.kv_written(name)
        assert expected == world.selector.for_layer("a", None).num_writes
        world.selector.for_layer("b", None)
        assert 1 == world.counted()["written_hook_used"]
        assert 1 == world.counted()["current_stream_used"]

    @pytest.mark.parametrize("before", ["a", ""])
    @pytest.mark.parametrize("name", ["a", ""])
    @pytest.mark.parametrize(
        "error", [DeviceError, DeviceFailedError, GraphCaptureError, RuntimeError]
    )
    def test_hook_that_cannot_be_fenced_ends_nothing_and_proves_nothing(
        self, error: type[Exception], name: str, before: str
    ) -> None:
        """S0-16: the forward pass goes on, and neither this hook's fence nor one of an
        earlier write is used."""
        world = World()
        world.selector.kv_written(before)
        world.device.failure = error("no event")
        world.selector.kv_written(name)
        world.device.failure = None
        world.device.num_writes = 5
        assert 5 == world.selector.for_layer("a", None).num_writes
        assert {"reshape_cache_none": 1, "current_stream_used": 1} == world.counted()


class TestErrors:
    @pytest.mark.parametrize("error", [DeviceFailedError, GraphCaptureError])
    @pytest.mark.parametrize("metadata", [None, entry(EngineEvent(0, EventStaleError))])
    def test_error_that_forbids_a_fallback_goes_to_the_caller(
        self, error: type[DeviceError], metadata: object
    ) -> None:
        """A device that has failed, and one whose stream records a graph, is not
        synchronized; a dump that was not made is not counted (S0-42)."""
        world = World()
        world.device.failure = error("no")
        for fenced in (
            lambda: world.selector.for_layer("a", metadata),
            world.selector.for_step,
        ):
            with pytest.raises(error):
                fenced()
        assert "synchronize" not in world.asked()
        assert {} == world.counted()

    @pytest.mark.parametrize("error", [DeviceFailedError, GraphCaptureError])
    def test_such_an_error_is_no_refusal(self, error: type[DeviceError]) -> None:
        """An event that meets a failed device, or a graph, is not in doubt itself: no
        other is tried, and nothing is counted."""
        world = World()
        with pytest.raises(error):
            world.selector.for_layer("a", entry(EngineEvent(1, error)))
        assert 1 == len(world.asked())
        assert {} == world.counted()

    @pytest.mark.parametrize("events", [False, True])
    def test_failed_synchronization_is_not_counted(self, events: bool) -> None:
        """S0-37, S0-42: a dump for which nothing at all could be waited for is none."""
        world = World(events=events)
        world.device.failure = DeviceError("no event")
        world.device.sync_failure = DeviceFailedError("gone")
        with pytest.raises(DeviceFailedError):
            world.selector.for_step()
        assert {} == world.counted()
