# SPDX-License-Identifier: Apache-2.0
"""
Every metric's name, kind, labels and help, and the counters behind them.

Exporters live in the doors. Names are frozen by a test, and so are the words that a label
can have (``ucm.reasons``): none is made of a number or an id.

An engine's ranks each carry out every order on their part of a block, and an exporter
adds their numbers up. What is named after *parts* counts each of them; blocks and tokens
count once, because only the scheduler counts them. Parts and their bytes obey one law at
all times, per direction::

    offered = committed + skipped + refused + failed + cancelled + in flight

Of what saves stand behind, exactly one ``ucm_dump_event_..._used_total`` grows each time.
Where an event of the engine was asked for, as for layers only, one other counter says why
it was not used::

    none + missing + handle_failed + unrecorded + stale + foreign
        = current_stream + sync_fallback

Threading: ``Counters`` may be used from any thread; one lock covers it.
"""

import enum
import threading
from collections.abc import Mapping

import attrs

__all__ = [
    "METRICS",
    "Counters",
    "Metric",
    "MetricKind",
    "sample_key",
    "split_key",
]

_MAX_OBSERVATIONS = 1024


class MetricKind(enum.Enum):
    """How a metric is aggregated."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class Metric:
    """One metric as exported, without the engine's prefix."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


_BY_OUTCOME = ("direction", "outcome", "reason")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "ucm_offered_parts_total",
            MetricKind.COUNTER,
            ("direction",),
            "Parts of blocks, one for each rank, that were to be saved or loaded.",
        ),
        Metric(
            "ucm_offered_part_bytes_total",
            MetricKind.COUNTER,
            ("direction",),
            "Bytes of these parts.",
        ),
        Metric(
            "ucm_settled_parts_total",
            MetricKind.COUNTER,
            _BY_OUTCOME,
            "Parts by how they ended: committed, skipped, refused, failed, cancelled.",
        ),
        Metric(
            "ucm_settled_part_bytes_total",
            MetricKind.COUNTER,
            _BY_OUTCOME,
            "Bytes of parts by how they ended.",
        ),
        Metric(
            "ucm_saved_blocks_total",
            MetricKind.COUNTER,
            (),
            "Blocks that became visible in the store, all parts of them.",
        ),
        Metric(
            "ucm_dropped_blocks_total",
            MetricKind.COUNTER,
            (),
            "Complete blocks that nobody took in time: no room, or their request was "
            "preempted first. Some may be stored already.",
        ),
        Metric(
            "ucm_loaded_blocks_total",
            MetricKind.COUNTER,
            (),
            "Blocks that were verified and copied into the engine, on all ranks.",
        ),
        Metric(
            "ucm_loaded_tokens_total",
            MetricKind.COUNTER,
            (),
            "Tokens of these blocks: matched before, and all of the request's load ended well.",
        ),
        Metric(
            "ucm_load_failures_total",
            MetricKind.COUNTER,
            ("reason",),
            "Requests whose load ended in a recompute, by what was told first.",
        ),
        Metric(
            "ucm_matched_tokens_total",
            MetricKind.COUNTER,
            (),
            "Tokens that were found and that the engine chose to load; some loads fail.",
        ),
        Metric(
            "ucm_cut_messages_total",
            MetricKind.COUNTER,
            ("message",),
            "Plans and reports that left something to the next one, for want of room.",
        ),
        Metric(
            "ucm_failed_lookups_total",
            MetricKind.COUNTER,
            ("reason",),
            "Look-ups that the store did not answer, or answered too late.",
        ),
        Metric(
            "ucm_bypassed_lookups_total",
            MetricKind.COUNTER,
            (),
            "Look-ups that were misses at once, because several before had failed.",
        ),
        Metric(
            "ucm_unkeyed_lookups_total",
            MetricKind.COUNTER,
            ("reason",),
            "Look-ups that were misses, because it was not known what an adapter holds.",
        ),
        Metric(
            "ucm_ignored_wishes_total",
            MetricKind.COUNTER,
            ("key",),
            "What requests asked of the store, by key, and was not understood.",
        ),
        Metric(
            "ucm_held_blocks",
            MetricKind.GAUGE,
            (),
            "Blocks that the engine may not reuse yet because a save reads them.",
        ),
        Metric(
            "ucm_quarantined_holds_total",
            MetricKind.COUNTER,
            (),
            "Holds whose device copy never ended on some rank; they are not waited for.",
        ),
        Metric(
            "ucm_healthy",
            MetricKind.GAUGE,
            (),
            "1 while the engine's saves and loads are served, 0 in bypass.",
        ),
        Metric(
            "ucm_weights_proven",
            MetricKind.GAUGE,
            (),
            "1 while blocks are found and saved, 0 while the weights are in doubt.",
        ),
        Metric(
            "ucm_weights_doubted_total",
            MetricKind.COUNTER,
            (),
            "Times that the weights may have changed, so that all ranks read them.",
        ),
        Metric(
            "ucm_fence_wait_seconds",
            MetricKind.HISTOGRAM,
            (),
            "Time the engine waited for saves that still read blocks it reused.",
        ),
        Metric(
            "ucm_save_duration_seconds",
            MetricKind.HISTOGRAM,
            (),
            "From a save's admission to its end.",
        ),
        Metric(
            "ucm_load_duration_seconds",
            MetricKind.HISTOGRAM,
            (),
            "From a load's admission to its end.",
        ),
        Metric(
            "ucm_hold_duration_seconds",
            MetricKind.HISTOGRAM,
            (),
            "From a save's admission to the release of its source blocks.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_layer_used_total",
            MetricKind.COUNTER,
            (),
            "Saves behind the engine's event for their layer.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_direct_used_total",
            MetricKind.COUNTER,
            (),
            "Saves behind the engine's one event for all layers.",
        ),
        Metric(
            "ucm_dump_event_written_hook_used_total",
            MetricKind.COUNTER,
            (),
            "Saves behind the engine's word that a layer is written.",
        ),
        Metric(
            "ucm_dump_event_current_stream_used_total",
            MetricKind.COUNTER,
            (),
            "Saves behind all that the engine had submitted.",
        ),
        Metric(
            "ucm_dump_event_sync_fallback_used_total",
            MetricKind.COUNTER,
            (),
            "Saves for which the engine's thread waited for the device.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_none_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer without metadata to find an event in.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_missing_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer whose metadata has no event.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_handle_failed_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer whose event could not be read or waited for.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_unrecorded_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer whose event was never recorded.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_stale_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer whose event is of an earlier step.",
        ),
        Metric(
            "ucm_dump_event_reshape_cache_foreign_total",
            MetricKind.COUNTER,
            (),
            "Saves of a layer whose event is of another device.",
        ),
    )
}


def sample_key(name: str, labels: Mapping[str, str]) -> str:
    """Return one text for a metric and its label values, in declared label order."""
    if not (declared := METRICS[name].labels):
        return name
    return "|".join((name, *(labels[label] for label in declared)))


def split_key(key: str) -> tuple[str, dict[str, str]]:
    """Undo ``sample_key``."""
    name, *values = key.split("|")
    return name, dict(zip(METRICS[name].labels, values, strict=True))


class Counters:
    """
    Totals since the start, and what was observed since the last ``take``.

    Only declared names are taken (KeyError otherwise, a bug of ours).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._gauge_changed = False
        self._fresh: dict[str, float] = {}
        self._observed: dict[str, list[float]] = {}

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Count *amount* more."""
        if not amount:
            return
        key = sample_key(name, labels)
        with self._lock:
            self._totals[key] = self._totals.get(key, 0) + amount
            self._fresh[key] = self._fresh.get(key, 0) + amount

    def add_all(self, totals: Mapping[str, float]) -> None:
        """Count what is more, by the texts that ``sample_key`` makes."""
        with self._lock:
            for key, amount in totals.items():
                self._totals[key] = self._totals.get(key, 0) + amount
                self._fresh[key] = self._fresh.get(key, 0) + amount

    def reach(self, name: str, total: float, **labels: str) -> None:
        """Count what is missing to a total that is counted elsewhere."""
        key = sample_key(name, labels)
        with self._lock:
            if missing := total - self._totals.get(key, 0):
                self._totals[key] = total
                self._fresh[key] = self._fresh.get(key, 0) + missing

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        key = sample_key(name, {})
        with self._lock:
            self._gauge_changed |= self._gauges.get(key) != value
            self._gauges[key] = value

    def observe(self, name: str, value: float) -> None:
        """Add one observation; beyond a bound the oldest of an interval are lost."""
        key = sample_key(name, {})
        with self._lock:
            values = self._observed.setdefault(key, [])
            values.append(value)
            del values[:-_MAX_OBSERVATIONS]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over all label values that match *labels*."""
        with self._lock:
            items = list(self._totals.items())
        return sum(
            value
            for key, value in items
            if key.split("|", 1)[0] == name
            and labels.items() <= split_key(key)[1].items()
        )

    def take(self) -> dict[str, dict[str, object]]:
        """
        Return and forget what is new: counter deltas, gauges, observations.

        Empty when nothing happened since the last call.
        """
        with self._lock:
            if not (self._fresh or self._observed or self._gauge_changed):
                return {}
            self._gauge_changed = False
            taken: dict[str, dict[str, object]] = {
                "counters": dict(self._fresh),
                "gauges": dict(self._gauges),
                "histograms": dict(self._observed),
            }
            self._fresh.clear()
            self._observed = {}
        return taken
