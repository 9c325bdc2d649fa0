# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way to the engine's ``/metrics``."""

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ucm.integration.vllm.stats import UCMPromMetrics, UCMStats, stats_of
from ucm.metrics import FROM_START, METRICS, Counters, split_key

SAVED, TIME = "ucm_saved_blocks_total", "ucm_save_duration_seconds"
FAILED = "ucm_load_failures_total"


def stats(counters=None, gauges=None, histograms=None):
    """Return a stats object."""
    return UCMStats(
        data={
            "counters": counters or {},
            "gauges": gauges or {},
            "histograms": histograms or {},
        }
    )


class TestStats:
    def test_what_is_new_is_taken_once(self):
        """Two calls in a row: the second has nothing to tell."""
        counters = Counters()
        assert stats_of(counters) is None
        counters.add(SAVED, 2)
        assert {SAVED: 2} == stats_of(counters).data["counters"]
        assert stats_of(counters) is None

    def test_two_workers_add_up(self):
        """S3-14: counters add up by sample, observations are put together, and the
        worst health is told; the other's numbers stay as they were."""
        one = stats({SAVED: 1, f"{FAILED}|corrupt": 1}, {"ucm_healthy": 1}, {TIME: [1]})
        two = stats({SAVED: 2, f"{FAILED}|evicted": 4}, {"ucm_healthy": 0}, {TIME: [3]})
        both = one.aggregate(two)
        assert {
            SAVED: 3,
            f"{FAILED}|corrupt": 1,
            f"{FAILED}|evicted": 4,
        } == both.data["counters"]
        assert {"ucm_healthy": 0} == both.data["gauges"]
        assert {TIME: [1, 3]} == both.data["histograms"]
        assert {SAVED: 2, f"{FAILED}|evicted": 4} == two.data["counters"]
        assert {TIME: [3]} == two.data["histograms"]

    @pytest.mark.parametrize("mirror", [False, True])
    def test_empty_stats_change_nothing(self, mirror):
        """S3-14: nothing is the neutral element, on either side."""
        full, empty = stats({SAVED: 1}, {"ucm_healthy": 1}, {TIME: [1]}), UCMStats()
        both = empty.aggregate(full) if mirror else full.aggregate(empty)
        assert stats({SAVED: 1}, {"ucm_healthy": 1}, {TIME: [1]}).data == both.data

    def test_observations_of_many_workers_are_bounded(self):
        """A long interval of many workers keeps the newest observations."""
        both = stats(histograms={TIME: [0] * 4000})
        both = both.aggregate(stats(histograms={TIME: [1] * 4000}))
        assert [0] * 96 + [1] * 4000 == both.data["histograms"][TIME]

    def test_reduced_line_sums_labels_and_averages_times(self):
        """The engine's periodic line has one number per name."""
        told = stats(
            {f"{FAILED}|corrupt": 1, f"{FAILED}|evicted": 4}, None, {TIME: [1, 2]}
        ).reduce()
        assert {FAILED: 5, f"{TIME}_mean": 1.5} == told

    def test_stats_are_empty_until_something_happens(self):
        """A gauge that changed is news as well; reset forgets everything."""
        assert UCMStats().is_empty()
        assert not stats(gauges={"ucm_healthy": 0}).is_empty()
        busy = stats({SAVED: 1})
        assert not busy.is_empty()
        assert not stats(histograms={TIME: [1]}).is_empty()
        busy.reset()
        assert busy.is_empty()


class TestPrometheus:
    @pytest.fixture
    def registry(self):
        """Return a registry of the test's own."""
        return CollectorRegistry()

    @pytest.fixture
    def metrics(self, registry):
        """Return our metrics on the real client, with the engine's labels."""
        kinds = {
            kind: partial(kind, registry=registry)
            for kind in (Counter, Gauge, Histogram)
        }
        config = SimpleNamespace(kv_transfer_config=None)
        engines = {0: ["m", "0"], 1: ["m", "1"]}
        return UCMPromMetrics(config, kinds, ["model_name", "engine"], engines)

    def test_every_metric_is_registered_once_with_its_labels(self, metrics, registry):
        """S3-14: each declared name is registered under the engine's prefix; the
        client itself refuses a second one."""
        found = {family.name for family in registry.collect()}
        assert {f"vllm:{name}".removesuffix("_total") for name in METRICS} == found

    def test_what_happens_once_is_none_before(self, metrics, registry):
        """A damaged block, a stuck copy and a lost line are steps from 0, of each engine."""
        labels = [{"model_name": "m", "engine": each} for each in "01"]
        for key in FROM_START:
            name, own = split_key(key)
            for engine in labels:
                assert 0 == registry.get_sample_value(f"vllm:{name}", engine | own)

    def test_numbers_arrive_under_their_labels(self, metrics, registry):
        """S0-43: each kind of number is found where an operator looks for it."""
        labels = {"model_name": "m", "engine": "1"}
        for _ in range(2):
            metrics.observe(
                {
                    "counters": {f"{FAILED}|corrupt": 2},
                    "gauges": {"ucm_held_blocks": 5},
                    "histograms": {TIME: [0.5, 1.5]},
                },
                1,
            )
        value = registry.get_sample_value
        assert 4 == value(f"vllm:{FAILED}", {**labels, "reason": "corrupt"})
        assert 5 == value("vllm:ucm_held_blocks", labels)
        assert (4, 4.0) == (
            value(f"vllm:{TIME}_count", labels),
            value(f"vllm:{TIME}_sum", labels),
        )
        assert value("vllm:ucm_held_blocks", {**labels, "engine": "0"}) is None
