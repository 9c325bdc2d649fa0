# SPDX-License-Identifier: Apache-2.0
"""How an engine proves that it has written, honestly and otherwise."""

import random
from types import SimpleNamespace

from tests.kit.accelerator import SimEvent
from tests.kit.accelerator_streams import SimHardware, SimStream
from tests.simulation.contents import LAYERS
from ucm.devices.abc import Fence
from ucm.devices.selection import EventSelector
from ucm.errors import DeviceFailedError

__all__ = ["PROOFS", "Prover"]

PROOFS = (
    *("written_hook_used", "current_stream_used", "sync_fallback_used"),
    *("reshape_cache_layer_used", "reshape_cache_direct_used"),
    *("reshape_cache_stale", "reshape_cache_unrecorded", "reshape_cache_foreign"),
)
"""What the selector counts, without ``ucm_dump_event_`` and ``_total``."""


class Prover:
    """
    Makes fences of events that the engine has, had, or never recorded.

    Args:
        selector: Chooses among what it is shown.
        hardware: All devices.
        compute: The engine's stream.
        dice: Decides which proof.
    """

    def __init__(
        self,
        selector: EventSelector,
        hardware: SimHardware,
        compute: SimStream,
        dice: random.Random,
    ) -> None:
        self._selector = selector
        self._hardware = hardware
        self._compute = compute
        self._dice = dice
        self._step = 0
        self.kept: list[SimEvent] = []
        self._kept_before = 0

    def begin_step(self) -> None:
        """Begin the engine's next step."""
        self._step += 1
        self._kept_before = len(self.kept)
        self._selector.begin_step(self._step)

    def before_load(self) -> Fence | None:
        """Return a fence behind all kernels; None on a device that has failed."""
        try:
            return self._selector.for_step()
        except DeviceFailedError:
            return None

    def after_write(self) -> Fence | None:
        """Return a fence behind what was just written; None as ``before_load``."""
        good = (self._step_alone, self._hook, self._own, self._own, self._moved)
        bad = (self._unrecorded, self._stale, self._foreign)
        try:
            return self._dice.choice([*good, self._dropped, *bad, *bad])()
        except DeviceFailedError:
            return None
        except RuntimeError:  # the engine's own verbs
            if not self._hardware.failures:
                raise
            return None

    def _step_alone(self) -> Fence:
        return self._selector.for_step()

    def _hook(self) -> Fence:
        self._selector.kv_written("")
        return self._lend(None)

    def _own(self) -> Fence:
        event = self._recorded()
        self.kept.append(event)
        return self._lend(event)

    def _moved(self) -> Fence:
        """Lend an event, and record it again behind work that comes later."""
        event = self._recorded()
        fence = self._lend(event)
        self._hardware.launch(self._compute, lambda: None)
        event.record(self._compute)
        self.kept.append(event)
        return fence

    def _dropped(self) -> Fence:
        """Lend an event that nobody else keeps."""
        return self._lend(self._recorded())

    def _unrecorded(self) -> Fence:
        return self._lend(SimEvent(self._hardware))

    def _stale(self) -> Fence:
        """Lend an event of an earlier step once more."""
        kept = self.kept[: self._kept_before]
        return self._lend(self._dice.choice(kept) if kept else None)

    def _foreign(self) -> Fence:
        event = SimEvent(self._hardware)
        event.record(self._hardware.default_stream(1))
        return self._lend(event)

    def _recorded(self) -> SimEvent:
        event = SimEvent(self._hardware)
        event.record(self._compute)
        return event

    def _lend(self, event: SimEvent | None) -> Fence:
        entry = SimpleNamespace(reshape_cache_event=event)
        is_direct = self._dice.random() < 0.3
        metadata = entry if is_direct else {LAYERS[0]: entry}
        return self._selector.for_layer(LAYERS[0], metadata)
