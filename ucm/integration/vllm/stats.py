# SPDX-License-Identifier: Apache-2.0
"""The connector's numbers on their way to the engine's ``/metrics``."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm.metrics import METRICS, Counters, MetricKind, split_key

__all__ = ["UCMPromMetrics", "UCMStats", "stats_of"]

_PREFIX = "vllm:"
_SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_KEEP_OBSERVATIONS = 4096


class UCMStats(KVConnectorStats):
    """Counter deltas, gauges and observations of one interval."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "UCMStats":
        """
        Add another's numbers; of a gauge the lower.

        A gauge belongs to the scheduler, who hears of all ranks. What a rank says of its
        health before is never better news.
        """
        mine, theirs = self.data, other.data
        counters = dict(mine.get("counters", {}))
        for key, amount in theirs.get("counters", {}).items():
            counters[key] = counters.get(key, 0) + amount
        gauges = dict(mine.get("gauges", {}))
        for key, value in theirs.get("gauges", {}).items():
            gauges[key] = min(gauges.get(key, value), value)
        histograms = {
            key: list(seen) for key, seen in mine.get("histograms", {}).items()
        }
        for key, seen in theirs.get("histograms", {}).items():
            merged = histograms.setdefault(key, [])
            merged.extend(seen)
            del merged[:-_KEEP_OBSERVATIONS]
        self.data = {
            "counters": counters,
            "gauges": gauges,
            "histograms": histograms,
        }
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a line for the engine's periodic log."""
        counters = self.data.get("counters", {})
        told: dict[str, int | float] = {}
        for key, amount in counters.items():
            name, _ = split_key(key)
            told[name] = told.get(name, 0) + amount
        for key, seen in self.data.get("histograms", {}).items():
            name, _ = split_key(key)
            told[f"{name}_mean"] = round(sum(seen) / len(seen), 6) if seen else 0.0
        return told

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not any(self.data.values())


def stats_of(counters: Counters) -> UCMStats | None:
    """Take what is new since the last call; None when nothing is."""
    taken = counters.take()
    return UCMStats(data=taken) if taken else None


class UCMPromMetrics(KVConnectorPromMetrics):
    """Registers every declared metric once and feeds it."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            labels = [*labelnames, *metric.labels]
            args = {
                "name": f"{_PREFIX}{name}",
                "documentation": metric.help,
                "labelnames": labels,
            }
            if metric.kind is MetricKind.HISTOGRAM:
                self._metrics[name] = self._histogram_cls(
                    **args, buckets=_SECONDS_BUCKETS
                )
            elif metric.kind is MetricKind.GAUGE:
                # Each step's numbers go to one of the front-ends that serve an engine.
                self._metrics[name] = self._gauge_cls(
                    **args, multiprocess_mode="mostrecent"
                )
            else:
                self._metrics[name] = self._counter_cls(**args)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's numbers."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            self._child(key, engine).inc(amount)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            self._child(key, engine).set(value)
        for key, seen in transfer_stats_data.get("histograms", {}).items():
            child = self._child(key, engine)
            for value in seen:
                child.observe(value)

    def _child(self, key: str, engine: list[object]) -> Any:  # noqa: ANN401 - prometheus_client's
        name, labels = split_key(key)
        return self._metrics[name].labels(*engine, *labels.values())
