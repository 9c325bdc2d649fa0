# SPDX-License-Identifier: Apache-2.0
"""
A cache's metrics for Prometheus, in hosts of their own; vLLM's come with vLLM's.

    from prometheus_client import REGISTRY, start_http_server
    from ucm.exporter import Exporter

    with ucm.blocking.open(...) as cache:
        REGISTRY.register(Exporter(cache.measure))
        start_http_server(9100)

Needs ``prometheus_client`` (``pip install "ucm[metrics]"``). Everything is read when it is
scraped, on the thread that serves the scrape, so that gauges are as fresh in a cache that
idles. Names are those of ``ucm.metric_names``, and none of a process.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ucm.metrics import (
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


class Exporter(Collector):  # type: ignore[misc] # it is untyped to us
    """
    Tells ``prometheus_client`` what a cache has counted.

    Args:
        measure: A cache's ``measure``; called on the thread of each scrape.
        labels: On every sample, such as which of several caches of a process it is.
    """

    def __init__(
        self,
        measure: Callable[[], Snapshot],
        *,
        labels: dict[str, str] | None = None,
    ) -> None:
        self._measure = measure
        self._labels = dict(labels or {})

    def describe(self) -> Iterator[Family]:
        """Name every metric, without asking the cache."""
        for metric in METRICS.values():
            yield self._family(metric)

    def collect(self) -> Iterator[Family]:
        """Measure, and give every sample that there is."""
        seen = self._measure()
        families = {name: self._family(metric) for name, metric in METRICS.items()}
        own = list(self._labels.values())
        for key, value in (seen.counters | seen.gauges).items():
            name, labels = split_key(key)
            families[name].add_metric([*own, *labels.values()], value)
        for key, observed in seen.histograms.items():
            name, labels = split_key(key)
            buckets = _cumulative(observed)
            values = [*own, *labels.values()]
            families[name].add_metric(values, buckets, observed.total)
        now = time.time()  # noqa: TID251 - what a timestamp is to Prometheus
        families[_LAST_SIGN].add_metric(own, now)
        yield from families.values()

    def _family(
        self, metric: Metric
    ) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
        kinds = {
            MetricKind.COUNTER: CounterMetricFamily,
            MetricKind.GAUGE: GaugeMetricFamily,
            MetricKind.HISTOGRAM: HistogramMetricFamily,
        }
        labels = [*self._labels, *metric.labels]
        return kinds[metric.kind](metric.name, metric.help, labels=labels)


def _cumulative(observed: Distribution) -> list[tuple[str, float]]:
    """Return what Prometheus calls buckets: up to each bound, all there were."""
    bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, observed.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
