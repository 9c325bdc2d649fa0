# SPDX-License-Identifier: Apache-2.0
"""
Which event proves that KV was written, and how often each kind of proof was used.

For a layer, the first of these that the device takes::

    written hook -> layer's event -> direct event -> current stream -> synchronize

For a whole step, the last two. What comes out is a fence, and nobody behind it can tell
where it came from.

An event that was found and refused is never replaced by the next event: what the engine
offers for this layer is in doubt then, and the current stream is not. Of an engine that
cuts a step into parts, whose metadata is a list, no event is taken at all: each proves
its own part only.

Threading: the engine's thread only.
"""

import contextlib
import enum
from typing import Any

from ucm.devices.abc import Device, EventRef, Fence
from ucm.devices.events import DoneFence
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
from ucm.tracing import EVENT_REFUSED, Log

__all__ = ["EventSelector", "ReshapeSource", "find_reshape_event"]


class ReshapeSource(enum.StrEnum):
    """Where a reshape event was found, or why none was."""

    LAYER = "layer"
    """On the layer's own entry of the metadata."""
    DIRECT = "direct"
    """On the metadata itself."""
    NONE = "none"
    """There is no metadata."""
    DIRECT_MISSING = "direct_missing"
    """Neither has one."""


_WRITTEN_HOOK_USED = "ucm_dump_event_written_hook_used_total"
_CURRENT_STREAM_USED = "ucm_dump_event_current_stream_used_total"
_SYNC_FALLBACK_USED = "ucm_dump_event_sync_fallback_used_total"
_RESHAPE_USED = {
    ReshapeSource.LAYER: "ucm_dump_event_reshape_cache_layer_used_total",
    ReshapeSource.DIRECT: "ucm_dump_event_reshape_cache_direct_used_total",
}
_NOT_FOUND = {
    ReshapeSource.NONE: "ucm_dump_event_reshape_cache_none_total",
    ReshapeSource.DIRECT_MISSING: "ucm_dump_event_reshape_cache_missing_total",
}
_REFUSED: tuple[tuple[type[DeviceError], str], ...] = (
    (EventUnreadableError, "ucm_dump_event_reshape_cache_handle_failed_total"),
    (EventStaleError, "ucm_dump_event_reshape_cache_stale_total"),
    (EventNotRecordedError, "ucm_dump_event_reshape_cache_unrecorded_total"),
    (ForeignEventError, "ucm_dump_event_reshape_cache_foreign_total"),
    (DeviceError, "ucm_dump_event_reshape_cache_handle_failed_total"),
)
"""Why an event was refused, or came to nothing: the first type that fits."""


def find_reshape_event(
    layer_name: str | None, attn_metadata: object
) -> tuple[EventRef | None, ReshapeSource]:
    """
    Return the event that the engine recorded behind its write of a layer's KV.

    Args:
        layer_name: The layer; None or empty when the engine does not say.
        attn_metadata: The engine's, of any shape; None in a step without attention.
    """
    if attn_metadata is None:
        return None, ReshapeSource.NONE
    metadata: Any = attn_metadata
    if layer_name:
        try:
            event: EventRef | None = metadata[layer_name].reshape_cache_event
        except (AttributeError, KeyError, TypeError):
            event = None
        if event is not None:
            return event, ReshapeSource.LAYER
    event = getattr(metadata, "reshape_cache_event", None)
    if event is not None:
        return event, ReshapeSource.DIRECT
    return None, ReshapeSource.DIRECT_MISSING


class EventSelector:
    """
    Fences what is to be saved, by the best proof there is.

    Args:
        device: Where the fences come from.
        counters: Told which proof was used; and why no reshape event was, where one was
            asked for.
        enable_event_sync: Use events; the device is synchronized for each fence if not.
        enable_reshape_cache_event_sync: Look at hooks and at the engine's own events.
        log: Told why an event is refused, once for each reason.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters,
        *,
        enable_event_sync: bool,
        enable_reshape_cache_event_sync: bool,
        log: Log | None = None,
    ) -> None:
        self._device = device
        self._counters = counters
        self._uses_events = enable_event_sync
        self._asks_engine = enable_event_sync and enable_reshape_cache_event_sync
        self._log = log
        self._told: set[str] = set()
        self._step: int | None = None
        self._written: dict[str, Fence] = {}

    def begin_step(self, step: int) -> None:
        """
        Say that a step of the engine begins; the same step again changes nothing.

        What hooks told in an earlier step proves nothing in this one.
        """
        if step == self._step:
            return
        self._step = step
        self._written.clear()
        self._device.begin_step(step)

    def kv_written(self, layer_name: str) -> None:
        """
        Fence a layer's KV at the moment at which the engine says that it is written.

        Raises nothing that a device raises: a hook within the forward pass must not end
        it, not even while a graph is recorded. The layer is fenced later then.

        Args:
            layer_name: Empty when the engine does not say; then it is the layer that is
                asked for next, unless another hook comes before that.
        """
        if not self._asks_engine:
            return
        # Fences of earlier writes do not stand behind this one, should it get none.
        if layer_name:
            self._written.pop("", None)
            self._written.pop(layer_name, None)
        else:
            self._written.clear()  # this may be a write of any layer
        with contextlib.suppress(Exception):
            self._written[layer_name] = self._device.lease(None)

    def for_layer(self, layer_name: str | None, attn_metadata: object) -> Fence:
        """
        Return a fence behind the engine's write of one layer. Blocks in a fallback only.

        Args:
            layer_name: The layer; None or empty when the engine does not say.
            attn_metadata: The engine's, of any shape; never looked at when reshape
                events are not asked for.

        Raises:
            DeviceFailedError: The device has failed.
            GraphCaptureError: The engine is recording a graph.
        """
        if not self._asks_engine:
            return self.for_step()
        written = self._written.pop("", None) or self._written.get(layer_name or "")
        if written is not None:
            self._counters.add(_WRITTEN_HOOK_USED, 1)
            return written
        event, source = find_reshape_event(layer_name, attn_metadata)
        if event is None:
            reason = _NOT_FOUND[source]
        else:
            try:
                fence = self._device.lease(event)
            except (DeviceFailedError, GraphCaptureError):
                raise
            except DeviceError as exc:
                reason = next(name for kind, name in _REFUSED if isinstance(exc, kind))
                self._tell_once(reason, exc)
            else:
                self._counters.add(_RESHAPE_USED[source], 1)
                return fence
        fence = self.for_step()
        # Last, so that a call that raises has counted nothing.
        self._counters.add(reason, 1)
        return fence

    def _tell_once(self, reason: str, exc: DeviceError) -> None:
        """Log the first event that is refused for a reason; the counters have them all."""
        if self._log is not None and reason not in self._told:
            self._told.add(reason)
            self._log.warning(EVENT_REFUSED, counter=reason, error=str(exc))

    def for_step(self) -> Fence:
        """
        Return a fence behind all that the engine has submitted so far.

        Blocks in a fallback only: when the device gives no fence, or when it is not to
        be asked for one, the device is synchronized once.

        Raises:
            DeviceFailedError: The device has failed.
            GraphCaptureError: The engine is recording a graph, in which nothing may be
                synchronized.
        """
        if self._uses_events:
            try:
                fence = self._device.lease(None)
            except (DeviceFailedError, GraphCaptureError):
                raise
            except DeviceError:
                pass  # counted below as what it leads to
            else:
                self._counters.add(_CURRENT_STREAM_USED, 1)
                return fence
        self._device.synchronize()
        self._counters.add(_SYNC_FALLBACK_USED, 1)
        return DoneFence()
