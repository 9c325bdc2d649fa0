# SPDX-License-Identifier: Apache-2.0
"""
Ordering mistakes, one at a time, for the accelerator's world.

Each is what a plausible bug would do: a fence that is dropped, made too early or on the
wrong stream, or an event that is trusted though it proves nothing. A world that runs
with one of them must show wrong bytes, or name a misuse; otherwise it proves nothing
when it runs without.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from tests.kit.accelerator import SimEvent
from tests.kit.accelerator_streams import SimStream
from tests.simulation.accelerator_parts import Parts, WorldDriver
from ucm.devices._paged import PagedCopy
from ucm.devices.abc import EventRef, Fence
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Direction as CopyDirection
from ucm.devices.driver import Stream
from ucm.devices.events import DoneFence
from ucm.layerwise import RowSaves, SpanGroup
from ucm.pipeline.save import Gather, Gathered, Ready, save_chain
from ucm.pipeline.stage import Chain
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime

__all__ = ["SABOTAGES", "Sabotage"]


@attrs.frozen(kw_only=True)
class Sabotage:
    """
    One mistake.

    Args:
        parts: What the world is made of.
        shows: The misuse that it is known by; otherwise it shows as wrong bytes.
    """

    parts: Parts
    shows: str = ""


class _NoFence(AcceleratorDevice):
    def lease(self, event: EventRef | None = None) -> Fence:
        super().lease(event)
        return DoneFence()


class _NoStepFence(AcceleratorDevice):
    def lease(self, event: EventRef | None = None) -> Fence:
        fence = super().lease(event)
        return DoneFence() if event is None else fence


class _TakesUnrecorded(WorldDriver):
    def handle(self, event: object) -> int:
        return super().handle(event) or 1


class _NeverStale(AcceleratorDevice):
    def begin_step(self, step: int) -> None:
        pass


class _TakesForeign(WorldDriver):
    def device_index(self, event: SimEvent) -> int | None:
        return self.index


class _EndsLoansAtOnce(WorldDriver):
    """Claims what only CUDA promises, so that loans end before the wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.captures_waits = True


class _NeverWaits(WorldDriver):
    def wait(self, stream: SimStream, event: SimEvent) -> None:
        pass


class _NoCopyFence(AcceleratorDevice):
    direction: CopyDirection

    def _copy(self, copy: PagedCopy[Any], direction: CopyDirection) -> Fence:
        fence = super()._copy(copy, direction)
        return DoneFence() if direction is self.direction else fence


class _NoGatherFence(_NoCopyFence):
    direction = CopyDirection.TO_HOST


class _NoScatterFence(_NoCopyFence):
    direction = CopyDirection.TO_DEVICE


class _FencesBeforeCopy(AcceleratorDevice):
    """Records the fence, and submits the copy behind it."""

    def _copy(self, copy: PagedCopy[Any], direction: CopyDirection) -> Fence:
        with self._runtime():
            fence = self._fence_on(self._lanes[direction].stream)
        super()._copy(copy, direction)
        return fence


class _MixesStreams(AcceleratorDevice):
    """Takes the fence of one direction from the other's stream."""

    def _fence_on(self, stream: Stream) -> Fence:
        to_host, to_device = (self._lanes[each].stream for each in CopyDirection)
        other = {to_host: to_device, to_device: to_host}
        return super()._fence_on(other.get(stream, stream))


class _ReleasingGather(Gather):
    def run(self, given: Ready) -> Gathered:
        """Give the source back as soon as the copy was submitted."""
        gathered = super().run(given)
        given.ticket.guard.end()
        return gathered


def _gathers_by(kind: type[Gather], runtime: Runtime) -> None:
    store, device = runtime._store, runtime._device
    stages = tuple(
        kind(store, device) if isinstance(stage, Gather) else stage
        for stage in save_chain(store, device).stages
    )
    runtime._pipeline._segments[Direction.SAVE] = Chain(stages).segments()


class _FenceOfFirstRow(RowSaves):
    """Takes the first row's fence for all rows of a pass."""

    first: Fence | None = None

    def begin(self, groups: Sequence[SpanGroup]) -> None:
        super().begin(groups)
        self.first = None

    def layer_done(self, layer_name: str, make_fence: Callable[[], Fence]) -> None:
        super().layer_done(layer_name, lambda: self._once(make_fence))

    def finish(self, make_fence: Callable[[], Fence]) -> None:
        super().finish(lambda: self._once(make_fence))

    def _once(self, make_fence: Callable[[], Fence]) -> Fence:
        self.first = self.first or make_fence()
        return self.first


class _CountingGather(Gather):
    def run(self, given: Ready) -> Gathered:
        """Take a row for copied as soon as its copy was submitted."""
        gathered = super().run(given)
        ticket = given.ticket
        ticket._rows_left = frozenset(ticket._rows_left).difference(given.row_ids)
        return gathered


SABOTAGES: dict[str, Sabotage] = {
    "lease gives no fence": Sabotage(parts=Parts(device=_NoFence)),
    "step's lease gives no fence": Sabotage(parts=Parts(device=_NoStepFence)),
    "unrecorded event is taken": Sabotage(parts=Parts(driver=_TakesUnrecorded)),
    "stale event is taken": Sabotage(parts=Parts(device=_NeverStale)),
    "foreign event is taken": Sabotage(parts=Parts(driver=_TakesForeign)),
    "loan ends before the wait": Sabotage(
        parts=Parts(driver=_EndsLoansAtOnce), shows="uses a destroyed event"
    ),
    "relay does not wait": Sabotage(parts=Parts(driver=_NeverWaits)),
    "slots are sealed before the copy's fence": Sabotage(
        parts=Parts(device=_NoGatherFence)
    ),
    "fence is recorded before the copy": Sabotage(
        parts=Parts(device=_FencesBeforeCopy)
    ),
    "blocks are released at submission": Sabotage(
        parts=Parts(tamper=partial(_gathers_by, _ReleasingGather))
    ),
    "row has the fence of an earlier one": Sabotage(
        parts=Parts(row_saves=_FenceOfFirstRow)
    ),
    "block is stored when its last row was submitted": Sabotage(
        parts=Parts(tamper=partial(_gathers_by, _CountingGather))
    ),
    "load is told before the copy's fence": Sabotage(
        parts=Parts(device=_NoScatterFence)
    ),
    "directions' fences are mixed up": Sabotage(parts=Parts(device=_MixesStreams)),
}
