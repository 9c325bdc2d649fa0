# SPDX-License-Identifier: Apache-2.0
"""A device with a stream, an engine's events, and a selector between them, for tests."""

from types import SimpleNamespace

from ucm.devices.abc import EventRef, Fence
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.devices.selection import EventSelector
from ucm.errors import DeviceError
from ucm.metrics import METRICS, Counters

PREFIX = "ucm_dump_event_"
OURS = ("lease", None)
"""What a device is asked for when an event of ours is to be recorded."""


class StreamFence(DoneFence):
    """A fence that knows how many of its device's writes it stands behind."""

    def __init__(self, num_writes: int) -> None:
        self.num_writes = num_writes


class EngineEvent:
    """
    An event of the engine's, which knows what stood before its record.

    Args:
        num_writes: Writes in the stream when it was recorded.
        refusal: What a device raises when it is lent this event.
    """

    def __init__(
        self, num_writes: int, refusal: type[DeviceError] | None = None
    ) -> None:
        self.num_writes = num_writes
        self.refusal = refusal

    def query(self) -> bool:
        """Return True, as torch does of events that were never recorded too."""
        return True


class StreamDevice(CPUDevice):
    """A device with a stream of writes, which remembers what it was asked for."""

    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__(num_blocks)
        self.num_writes = 0
        self.calls: list[object] = []
        self.failure: Exception | None = None
        """What ``lease`` raises when it is to record an event of ours."""
        self.sync_failure: DeviceError | None = None
        """What ``synchronize`` raises."""

    def begin_step(self, step: int) -> None:
        """Remember the step."""
        self.calls.append(("begin_step", step))

    def lease(self, event: EventRef | None = None) -> Fence:
        """Return a fence behind all writes so far, or behind those of the event."""
        self.calls.append(("lease", event))
        if event is None:
            if self.failure is not None:
                raise self.failure
            return StreamFence(self.num_writes)
        assert isinstance(event, EngineEvent)
        if event.refusal is not None:
            raise event.refusal("not this one")
        return StreamFence(event.num_writes)

    def synchronize(self) -> None:
        """Stand behind all writes so far."""
        self.calls.append("synchronize")
        if self.sync_failure is not None:
            raise self.sync_failure


class Untouchable:
    """Metadata of which not even an attribute may be looked at."""

    def __getattribute__(self, name: str) -> object:
        """Fail the test."""
        raise AssertionError(name)

    def __getitem__(self, name: str) -> object:
        """Fail the test."""
        raise AssertionError(name)


class Metadata(dict):
    """Metadata by layer that may have an event of its own beside."""


def entry(event: object) -> SimpleNamespace:
    """Return one layer's metadata."""
    return SimpleNamespace(reshape_cache_event=event)


class World:
    """A selector on a device, and what was counted."""

    def __init__(self, *, events: bool = True, reshape: bool = True) -> None:
        self.device = StreamDevice()
        self.counters = Counters()
        self.selector = EventSelector(
            self.device,
            self.counters,
            enable_event_sync=events,
            enable_reshape_cache_event_sync=reshape,
        )

    def asked(self) -> list[object]:
        """Return and forget what the device was asked for."""
        calls, self.device.calls = self.device.calls, []
        return calls

    def counted(self) -> dict[str, float]:
        """Return all totals by the middle of their names."""
        totals = {name: self.counters.total(name) for name in METRICS}
        return {
            name.removeprefix(PREFIX).removesuffix("_total"): total
            for name, total in totals.items()
            if total
        }
