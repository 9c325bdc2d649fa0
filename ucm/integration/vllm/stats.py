# SPDX-License-Identifier: Apache-2.0
"""
The connector's numbers on their way to the engine's ``/metrics``.

What steps tell comes by way of vLLM. Every five seconds the engine's processes are also
asked for their gauges (``ucm.status``), so that they are as fresh while it is idle; who has
not answered for half a minute hangs or is gone, and is not healthy. Threading: ``observe``
on the front end's loop, ``look`` on a thread of ours; one lock covers both.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm.configuration.sources import load
from ucm.errors import ConfigError, NoStatusError
from ucm.metrics import (
    FROM_START,
    METRICS,
    SECONDS_BUCKETS,
    Counters,
    MetricKind,
    is_gauge,
    sample_key,
    split_key,
)
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.totals import Totals
from ucm.status import NO_FILES, Status, read_statuses
from ucm.stores.bypass import BypassStore
from ucm.stores.opening import tell_store
from ucm.threads import SYSTEM

__all__ = ["SchedulerNumbers", "UCMPromMetrics", "UCMStats", "stats_of"]

_PREFIX = "vllm:"
_KEEP_OBSERVATIONS = 4096
_CUT_PLANS = sample_key("ucm_cut_messages_total", {"message": "plan"})
_PERIOD_S: Final = 5.0
_LATE_S: Final = 30.0
_HEALTHY: Final = "ucm_healthy"
_LAST_SIGN: Final = "ucm_last_sign_timestamp_seconds"


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
    """
    Registers every declared metric once and feeds it.

    The first four arguments are vLLM's.

    Args:
        vllm_config: The front end's; it says by which id the engines tell of themselves,
            and in which slab.
        metric_types: The classes to make metrics of.
        labelnames: The engine's labels.
        per_engine_labelvalues: Their values, by the number of each engine.
        clock: The machine's monotonic one, in seconds.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = {
            MetricKind.COUNTER: self._counter_cls,
            # Each step's numbers go to one of the front-ends that serve an engine.
            MetricKind.GAUGE: partial(self._gauge_cls, multiprocess_mode="mostrecent"),
            MetricKind.HISTOGRAM: partial(self._histogram_cls, buckets=SECONDS_BUCKETS),
        }
        self._metrics: dict[str, Any] = {
            name: make[metric.kind](
                name=f"{_PREFIX}{name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
            )
            for name, metric in METRICS.items()
        }
        for engine in per_engine_labelvalues.values():
            for key in FROM_START:
                self._child(key, engine).inc(0)
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: dict[int, float] = {}
        """By engine, when a step last told gauges."""
        self._engine_ids = _engine_ids(vllm_config, list(per_engine_labelvalues))
        self._answered: dict[int, dict[str, float]] = {}
        """By engine and role, when a process was last asked that answered."""
        self._slab = _slab_of(vllm_config)
        if self._engine_ids and self._slab is not None:
            look = partial(_look_often, weakref.ref(self))
            with contextlib.suppress(RuntimeError):  # no thread: steps alone tell
                threading.Thread(target=look, name="ucm-health", daemon=True).start()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's numbers."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            self._child(key, engine).inc(amount)
        with self._lock:
            self._set(engine, transfer_stats_data.get("gauges", {}), age=0.0)
            self._told_at[engine_idx] = self._clock()
        for key, seen in transfer_stats_data.get("histograms", {}).items():
            child = self._child(key, engine)
            for value in seen:
                child.observe(value)

    def look(self) -> None:
        """Ask the processes of each engine how they are; a few seconds if one hangs."""
        asked_at, answers = self._clock(), []
        if self._slab is not None:
            try:
                answers = read_statuses(self._slab).answers
            except NoStatusError as exc:  # nobody is there, or not here
                if getattr(exc.__cause__, "errno", None) in NO_FILES:
                    return  # that says nothing of them
        for engine_idx, engine_id in self._engine_ids.items():
            own = [answer for answer in answers if answer.engine == engine_id]
            with self._lock:
                self._take(engine_idx, own, asked_at)

    def _take(
        self, engine_idx: int, answers: Sequence[Status], asked_at: float
    ) -> None:
        answered = self._answered.setdefault(engine_idx, {})
        answered.update((answer.role, asked_at) for answer in answers)
        if not answered:
            return  # it is elsewhere: steps alone tell
        told_at = self._told_at.get(engine_idx, 0.0)
        gauges: dict[str, float] = {}
        for answer in answers:
            for key, value in answer.gauges.items():
                gauges[key] = min(gauges.get(key, value), value)
        if asked_at - min(answered.values()) > _LATE_S:
            gauges = {_HEALTHY: 0.0}
        elif asked_at < told_at:
            gauges = {}  # a step has told what is newer
        newest = max(answered.values())
        age = self._clock() - newest if newest > told_at else None
        self._set(self.per_engine_labelvalues[engine_idx], gauges, age)

    def _set(
        self, engine: list[object], gauges: dict[str, float], age: float | None
    ) -> None:
        """Set gauges, and when there was a sign of life: so many seconds ago."""
        for key, value in gauges.items():
            if is_gauge(key):
                self._child(key, engine).set(value)
        if age is not None:
            at = time.time() - age  # noqa: TID251 - what a timestamp is to Prometheus
            self._child(_LAST_SIGN, engine).set(at)

    def _child(self, key: str, engine: list[object]) -> Any:  # noqa: ANN401 - prometheus_client's
        name, labels = split_key(key)
        return self._metrics[name].labels(*engine, *labels.values())


def _engine_ids(vllm_config: Any, engines: Sequence[int]) -> dict[int, str]:  # noqa: ANN401 - vLLM's
    """Return the id that each engine goes by, as vLLM makes it; none if there is none."""
    transfer = vllm_config.kv_transfer_config
    if (name := getattr(transfer, "engine_id", None)) is None:
        return {}
    is_one = vllm_config.parallel_config.data_parallel_size == 1
    return {each: name if is_one else f"{name}_dp{each}" for each in engines}


def _slab_of(vllm_config: Any) -> Path | None:  # noqa: ANN401 - vLLM's
    """Return where engines tell how they are; None if their settings make no sense."""
    given = getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None)
    try:
        return Path(load(given or {}).config.store.path)
    except ConfigError:
        return None


def _look_often(ref: "weakref.ref[UCMPromMetrics]") -> None:
    """Look until the metrics are gone; they are not kept for it."""
    while (metrics := ref()) is not None:
        metrics.look()
        del metrics
        time.sleep(_PERIOD_S)


class SchedulerNumbers:
    """
    What the scheduler's half has to tell of itself.

    Args:
        counters: Where all of it goes.
        adapter: Knows what is open.
        store: Says how full it is, or does not answer.
        clock: In seconds.
    """

    def __init__(
        self,
        counters: Counters,
        adapter: SchedulerAdapter,
        store: BypassStore,
        clock: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._adapter = adapter
        self._store = store
        self._clock = clock
        self.is_on = False
        """Whether the half has begun to serve, and is not closed."""
        self._answers = True
        """Whether the store did when it was last asked how it stands."""
        self._told: Totals | None = None
        self._told_serving: bool | None = None

    def stats(self) -> UCMStats | None:
        """Return what is new since the last call."""
        if (totals := self._adapter.totals) != self._told:
            self._told = totals
            _tell_totals(self._counters, totals)
        if self._told_serving is not (serves := self._is_serving):
            self._told_serving = serves
            self._counters.set("ucm_healthy", int(serves))
        return stats_of(self._counters)

    def refresh(self) -> None:
        """
        Bring the gauges up to date; on any thread that may wait.

        What is read here is read whole, whatever the scheduler's thread does meanwhile.
        """
        _tell_open(self._counters, self._adapter, self._clock())
        SYSTEM.give_way()
        try:
            tell_store(self._counters, self._store.stats())
            self._answers = True
        except BaseException:  # noqa: BLE001 - a store of others: the next look is to come
            self._answers = False
        self._told_serving = self._is_serving
        self._counters.set("ucm_healthy", int(self._told_serving))

    @property
    def _is_serving(self) -> bool:
        """Whether this engine's saves and loads are served, as far as is known here."""
        is_off = self._adapter.bypass or self._store.is_bypassed
        return self.is_on and self._answers and not is_off


def _tell_totals(counters: Counters, totals: Totals) -> None:
    """Bring what the scheduler has counted into metrics."""
    counters.reach_all(
        {
            "ucm_saved_blocks_total": totals.saved_blocks,
            "ucm_dropped_blocks_total": totals.dropped_blocks,
            "ucm_loaded_blocks_total": totals.loaded_blocks,
            "ucm_loaded_tokens_total": totals.loaded_tokens,
            "ucm_quarantined_holds_total": totals.quarantined_holds,
            _CUT_PLANS: totals.cut_plans,
        }
    )
    for reason, count in totals.failed_loads.items():
        counters.reach("ucm_load_failures_total", count, reason=reason)
    counters.set("ucm_held_blocks", totals.held_blocks)


def _tell_open(counters: Counters, adapter: SchedulerAdapter, now: float) -> None:
    """Take over how much is open in a scheduler; *now* is on its clock, in seconds."""
    counts, holds, tell = adapter.counts(), adapter.holds, counters.set
    began = holds.oldest
    tell("ucm_held_blocks", holds.held_blocks)
    tell("ucm_held_bytes", holds.held_nbytes)
    tell("ucm_oldest_hold_seconds", 0 if began is None else max(0.0, now - began))
    tell("ucm_open_tickets", counts["open_saves"], direction="save")
    tell("ucm_open_tickets", counts["open_loads"], direction="load")
    tell("ucm_ending_requests", counts["endings"])
