# SPDX-License-Identifier: Apache-2.0
"""
A cache's metrics for Prometheus, in hosts of their own; vLLM's come with vLLM's.

    from prometheus_client import REGISTRY, start_http_server
    from ucm.exporter import Exporter

    with ucm.blocking.open(...) as cache:
        REGISTRY.register(Exporter(cache.measure))
        start_http_server(9100)

Several caches of one process have one exporter, which names each family once:
``Exporter({"a": first.measure, "b": second.measure})``.

Needs ``prometheus_client`` (``pip install '.[metrics]'``). Everything is read when it is
scraped, on the thread that serves the scrape, so that gauges are as fresh in a cache that
idles. Names are those of ``ucm.metric_names``, and none of a process.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ucm.errors import ConfigError
from ucm.metrics import (
    FROM_START,
    METRICS,
    SECONDS_BUCKETS,
    Distribution,
    Metric,
    MetricKind,
    Snapshot,
    split_key,
)

__all__ = ["Exporter"]

_LAST_SIGN = "ucm_last_sign_timestamp_seconds"
_NAME = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = {"le"}.union(*(metric.labels for metric in METRICS.values()))


class Exporter(Collector):  # type: ignore[misc] # it is untyped to us
    """
    Tells ``prometheus_client`` what a cache has counted, or several of a process.

    Args:
        measure: A cache's ``measure``, or that of each by its name; called on the thread of
            each scrape.
        labels: On every sample, such as which server it is.
        label: Which label has the names of several.

    Raises:
        ConfigError: A label has no name of Prometheus', that of one that a metric has itself,
            or a value that is no text; or *measure* is none, such as a cache itself.
    """

    def __init__(
        self,
        measure: Callable[[], Snapshot] | Mapping[str, Callable[[], Snapshot]],
        *,
        labels: dict[str, str] | None = None,
        label: str = "cache",
    ) -> None:
        _check_measure("measure", measure, Mapping)
        common = dict(labels or {})
        self._caches = [(common, measure)] if callable(measure) else []
        self._names = list(common)
        _check(common)
        if not callable(measure):
            for name, each in measure.items():
                _check({label: name})
                _check_measure(f"measure.{name}", each)
                self._caches.append(({**common, label: name}, each))
            if label in common:
                raise ConfigError(
                    f"labels.{label}",
                    common[label],
                    "the names of several caches stand there",
                    "Leave it out, or have label= say where they stand.",
                )
            self._names.append(label)

    def describe(self) -> Iterator[Family]:
        """Name every metric, without asking the cache."""
        for metric in METRICS.values():
            yield self._family(metric)

    def collect(self) -> Iterator[Family]:
        """Measure, and give every sample that there is."""
        families = {name: self._family(metric) for name, metric in METRICS.items()}
        for own, measure in self._caches:
            _add(families, list(own.values()), measure())
        yield from families.values()

    def _family(
        self, metric: Metric
    ) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
        kinds = {
            MetricKind.COUNTER: CounterMetricFamily,
            MetricKind.GAUGE: GaugeMetricFamily,
            MetricKind.HISTOGRAM: HistogramMetricFamily,
        }
        labels = [*self._names, *metric.labels]
        return kinds[metric.kind](metric.name, metric.help, labels=labels)


def _check_measure(key: str, given: object, *others: type) -> None:
    """Refuse what measures nothing, and is none of *others*: it is asked only when scraped."""
    if not callable(given) and not isinstance(given, others):
        problem = "measures no cache"
        remedy = "Give cache.measure, not called, or a mapping of names to these."
        raise ConfigError(key, type(given).__name__, problem, remedy)


def _check(labels: Mapping[Any, Any]) -> None:
    """Refuse what Prometheus would take for something else, or could not be told."""
    for name, value in labels.items():
        key, problem, remedy = f"labels.{name}", "", "Give it another name."
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problem = "is no name of a label"
            remedy = "Use letters, digits and _, with no digit and no __ at its front."
        elif name in _TAKEN:
            problem = "a metric has a label of that name itself"
        elif not isinstance(value, str):
            problem, remedy = "is no text", f"Give {str(value)!r}."
        if problem:
            raise ConfigError(key, value, problem, remedy)


def _add(families: Mapping[str, Family], own: list[str], seen: Snapshot) -> None:
    """Give the samples of one cache to their families."""
    born = dict.fromkeys(FROM_START, 0.0)
    for key, value in (born | seen.counters | seen.gauges).items():
        name, labels = split_key(key)
        families[name].add_metric([*own, *labels.values()], value)
    for key, observed in seen.histograms.items():
        name, labels = split_key(key)
        values = [*own, *labels.values()]
        families[name].add_metric(values, _cumulative(observed), observed.total)
    now = time.time()  # noqa: TID251 - what a timestamp is to Prometheus
    families[_LAST_SIGN].add_metric(own, now)


def _cumulative(observed: Distribution) -> list[tuple[str, float]]:
    """Return what Prometheus calls buckets: up to each bound, all there were."""
    bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, observed.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
