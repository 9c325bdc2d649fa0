# SPDX-License-Identifier: Apache-2.0
"""
The counters behind the metrics (``ucm.metric_names``); exporters live in the doors.

Threading: ``Counters`` may be used from any thread; one lock covers it.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import attrs

from ucm.metric_names import METRICS, Metric, MetricKind

__all__ = [
    "FROM_START",
    "METRICS",
    "SECONDS_BUCKETS",
    "Counters",
    "Distribution",
    "Metric",
    "MetricKind",
    "Snapshot",
    "is_gauge",
    "sample_key",
    "split_key",
]

SECONDS_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of every histogram; what is beyond the last has a bucket as well."""
_MAX_OBSERVATIONS: Final = 1024


@attrs.define
class Distribution:
    """All observations since the start, by ``SECONDS_BUCKETS``; the last is beyond."""

    counts: list[int] = attrs.Factory(lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        """Take one more."""
        self.counts[bisect_left(SECONDS_BUCKETS, value)] += 1
        self.total += value


@attrs.frozen
class Snapshot:
    """What everything comes to since the start, by the texts of ``sample_key``."""

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Distribution]


def sample_key(name: str, labels: Mapping[str, str]) -> str:
    """Return one text for a metric and its label values, in declared label order."""
    if not (declared := METRICS[name].labels):
        return name
    return "|".join((name, *(labels[label] for label in declared)))


def split_key(key: str) -> tuple[str, dict[str, str]]:
    """Undo ``sample_key``."""
    name, *values = key.split("|")
    return name, dict(zip(METRICS[name].labels, values, strict=True))


def is_gauge(key: str) -> bool:
    """Return whether a text is of a gauge that is declared, with all its labels."""
    name, *values = key.split("|")
    metric = METRICS.get(name)
    if metric is None or metric.kind is not MetricKind.GAUGE:
        return False
    return len(metric.labels) == len(values)


def _text_of(key: str) -> str:
    name, labels = split_key(key)
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}" if pairs else name


_CORRUPT: Final = {"direction": "load", "outcome": "failed", "reason": "corrupt"}
FROM_START: Final = (
    sample_key("ucm_settled_parts_total", _CORRUPT),
    "ucm_quarantined_holds_total",
    "ucm_dropped_log_lines_total",
)
"""Exported as 0 before it happens, which may be once: an alert compares two samples."""


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
        self._distributions: dict[str, Distribution] = {}

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
        """Count what is missing to a total that is counted elsewhere; one that is less has come late."""
        self.reach_all({sample_key(name, labels): total})

    def reach_all(self, totals: Mapping[str, float]) -> None:
        """Do the same for several, by the texts that ``sample_key`` makes."""
        with self._lock:
            for key, total in totals.items():
                if (missing := total - self._totals.get(key, 0)) > 0:
                    self._totals[key] = total
                    self._fresh[key] = self._fresh.get(key, 0) + missing

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        key = sample_key(name, labels)
        with self._lock:
            self._gauge_changed |= self._gauges.get(key) != value
            self._gauges[key] = value

    def observe(self, name: str, value: float) -> None:
        """Add one observation; beyond a bound the oldest of an interval are lost."""
        with self._lock:
            every = self._distributions.get(name)
            if every is None:
                every = self._distributions[sample_key(name, {})] = Distribution()
            every.add(value)
            values = self._observed.setdefault(name, [])
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

    def snapshot(self) -> Snapshot:
        """Return everything, for who counts no differences; forgets nothing."""
        with self._lock:
            return Snapshot(
                dict(self._totals),
                dict(self._gauges),
                {
                    key: Distribution(list(each.counts), each.total)
                    for key, each in self._distributions.items()
                },
            )

    def totals(self) -> dict[str, float]:
        """Return all totals since the start, by name and labels as Prometheus writes."""
        with self._lock:
            totals = self._totals.copy()
        return {_text_of(key): value for key, value in totals.items()}

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
