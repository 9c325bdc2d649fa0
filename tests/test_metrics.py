# SPDX-License-Identifier: Apache-2.0
"""Metric names are frozen, and counters lose nothing between threads."""

import random
import re
import threading

import pytest

from scripts.pages import read
from ucm.metrics import (
    METRICS,
    SECONDS_BUCKETS,
    Counters,
    MetricKind,
    is_gauge,
    sample_key,
    split_key,
)
from ucm.reasons import MissReason, Reason

OUTCOME = ("direction", "outcome", "reason")
FROZEN = {
    "ucm_cut_messages_total": ("counter", ("message",)),
    "ucm_dropped_blocks_total": ("counter", ()),
    "ucm_loaded_tokens_total": ("counter", ()),
    "ucm_offered_parts_total": ("counter", ("direction",)),
    "ucm_offered_part_bytes_total": ("counter", ("direction",)),
    "ucm_settled_parts_total": ("counter", OUTCOME),
    "ucm_settled_part_bytes_total": ("counter", OUTCOME),
    "ucm_saved_blocks_total": ("counter", ()),
    "ucm_loaded_blocks_total": ("counter", ()),
    "ucm_load_failures_total": ("counter", ("reason",)),
    "ucm_matched_tokens_total": ("counter", ()),
    "ucm_lookups_total": ("counter", ()),
    "ucm_missed_lookups_total": ("counter", ("reason",)),
    "ucm_wanted_tokens_total": ("counter", ()),
    "ucm_fetch_wants_total": ("counter", ("reason",)),
    "ucm_fetched_parts_total": ("counter", ("tier",)),
    "ucm_hit_tokens_total": ("counter", ("tier",)),
    "ucm_kv_event_blocks_total": ("counter", ("event",)),
    "ucm_agent_up": ("gauge", ()),
    "ucm_agents_total": ("counter", ()),
    "ucm_tier_up": ("gauge", ("tier",)),
    "ucm_tier_server_up": ("gauge", ("tier", "direction", "address")),
    "ucm_spilled_parts_total": ("counter", ("tier",)),
    "ucm_unspilled_parts_total": ("counter", ("tier", "reason")),
    "ucm_forgotten_parts_total": ("counter", ("tier",)),
    "ucm_unforgotten_parts_total": ("counter", ("tier",)),
    "ucm_failed_lookups_total": ("counter", ("reason",)),
    "ucm_bypassed_lookups_total": ("counter", ()),
    "ucm_unkeyed_lookups_total": ("counter", ("reason",)),
    "ucm_ignored_wishes_total": ("counter", ("key",)),
    "ucm_held_blocks": ("gauge", ()),
    "ucm_held_bytes": ("gauge", ()),
    "ucm_oldest_hold_seconds": ("gauge", ()),
    "ucm_open_tickets": ("gauge", ("direction",)),
    "ucm_ending_requests": ("gauge", ()),
    "ucm_stage_part_bytes_total": ("counter", ("direction", "stage")),
    "ucm_stage_seconds_total": ("counter", ("direction", "stage")),
    "ucm_hit_parts_total": ("counter", ("tier",)),
    "ucm_hit_part_bytes_total": ("counter", ("tier",)),
    "ucm_store_capacity_parts": ("gauge", ()),
    "ucm_store_committed_parts": ("gauge", ()),
    "ucm_store_reserved_parts": ("gauge", ()),
    "ucm_store_capacity_bytes": ("gauge", ()),
    "ucm_store_populated_bytes": ("gauge", ()),
    "ucm_store_evicted_parts_total": ("counter", ()),
    "ucm_store_curbed_parts_total": ("counter", ()),
    "ucm_store_over_share_parts_total": ("counter", ()),
    "ucm_dropped_log_lines_total": ("counter", ()),
    "ucm_last_sign_timestamp_seconds": ("gauge", ()),
    "ucm_quarantined_holds_total": ("counter", ()),
    "ucm_healthy": ("gauge", ()),
    "ucm_weights_proven": ("gauge", ()),
    "ucm_weights_doubted_total": ("counter", ()),
    "ucm_fence_wait_seconds": ("histogram", ()),
    "ucm_save_duration_seconds": ("histogram", ()),
    "ucm_load_duration_seconds": ("histogram", ()),
    "ucm_hold_duration_seconds": ("histogram", ()),
    "ucm_dump_event_reshape_cache_layer_used_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_direct_used_total": ("counter", ()),
    "ucm_dump_event_written_hook_used_total": ("counter", ()),
    "ucm_dump_event_current_stream_used_total": ("counter", ()),
    "ucm_dump_event_sync_fallback_used_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_none_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_missing_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_handle_failed_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_unrecorded_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_stale_total": ("counter", ()),
    "ucm_dump_event_reshape_cache_foreign_total": ("counter", ()),
}
REASONS = {
    *("", "stored", "error"),
    *("queue_tickets", "queue_bytes", "store_full", "closed", "failed"),
    *("deadline", "recycled", "unfinished", "late", "over", "shutdown"),
    *("overwritten", "unconfirmed", "unsubmitted", "withdrawn"),
    *("overload", "store_behind", "store_hung"),
    *("corrupt", "evicted", "absent", "unavailable", "slow", "device", "stuck"),
    *("row_failed", "unasked", "runtime_failed", "worker_died"),
    *("admission", "slower", "kept"),
}
MISS_REASONS = {
    *("never_offered", "queue", "too_short", "admission", "failed", "evicted"),
    *("other_key_space", "corrupt", "not_committed", "denied", "bypassed"),
    *("unavailable", "late", "slower", "unkeyed", "unknown"),
}


class TestNames:
    def test_names_kinds_and_labels_are_frozen(self):
        """A renamed metric breaks operators' dashboards, so it breaks this first."""
        found = {name: (m.kind.value, m.labels) for name, m in METRICS.items()}
        assert found == FROZEN

    @pytest.mark.parametrize("metric", METRICS.values(), ids=lambda one: one.name)
    def test_metric_follows_the_naming_rules(self, metric):
        """Counters end in _total, times in their unit, and each has a help sentence."""
        endings = {MetricKind.COUNTER: "_total", MetricKind.HISTOGRAM: "_seconds"}
        assert metric.name.endswith(endings.get(metric.kind, ""))
        assert METRICS[metric.name] is metric
        assert metric.help.endswith(".")

    def test_reasons_are_a_closed_list_of_words(self):
        """R-20: every value that a reason can have is known, and none is made of a number
        or an id; a new one is a new series for operators."""
        assert {reason.value for reason in Reason} == REASONS
        assert all(re.fullmatch("[a-z_]*", word) for word in REASONS)

    def test_reasons_of_misses_are_a_closed_list_of_words(self):
        """R-71: each reason for which a look-up can fall short is known."""
        assert {reason.value for reason in MissReason} == MISS_REASONS

    def test_page_has_every_metric(self):
        """S0-43: each is listed with its help."""
        for metric in METRICS.values():
            assert f"| {metric.help} |\n" in read("metrics.md")

    def test_sample_key_round_trips_in_declared_order(self):
        """The text of a sample has its labels in declared order, and is read back."""
        labels = {"reason": "stored", "direction": "save", "outcome": "skipped"}
        key = sample_key("ucm_settled_parts_total", labels)
        assert "ucm_settled_parts_total|save|skipped|stored" == key
        assert ("ucm_settled_parts_total", labels) == split_key(key)
        assert ("ucm_healthy", {}) == split_key(sample_key("ucm_healthy", {}))


class TestCounters:
    def test_only_declared_names_are_taken(self):
        """A name that nobody declared is a bug and found at once."""
        counters = Counters()
        for use in (
            lambda: counters.add("ucm_new_total", 1),
            lambda: counters.set("ucm_new", 1),
            lambda: counters.observe("ucm_new_seconds", 1),
            lambda: counters.add("ucm_offered_parts_total", 1),
        ):
            with pytest.raises(KeyError):
                use()
        assert {} == counters.take()

    def test_total_sums_over_the_labels_left_out(self):
        """A total is the sum over all samples that match the labels given."""
        counters = Counters()
        for direction, reason, blocks in (
            ("save", "stored", 1),
            ("save", "full", 2),
            ("load", "full", 4),
        ):
            counters.add(
                "ucm_settled_parts_total",
                blocks,
                direction=direction,
                outcome="x",
                reason=reason,
            )
        total = counters.total
        assert 7 == total("ucm_settled_parts_total")
        assert 3 == total("ucm_settled_parts_total", direction="save")
        assert 2 == total("ucm_settled_parts_total", direction="save", reason="full")
        assert 0 == total("ucm_settled_part_bytes_total")

    def test_take_tells_each_thing_once_and_keeps_totals(self):
        """What was taken is not told again; totals go on, gauges are told again."""
        counters = Counters()
        counters.add("ucm_saved_blocks_total", 2)
        counters.add("ucm_saved_blocks_total", 3)
        counters.set("ucm_healthy", 1)
        counters.observe("ucm_save_duration_seconds", 0.5)
        assert {
            "counters": {"ucm_saved_blocks_total": 5},
            "gauges": {"ucm_healthy": 1},
            "histograms": {"ucm_save_duration_seconds": [0.5]},
        } == counters.take()
        assert {} == counters.take()
        counters.add("ucm_saved_blocks_total", 1)
        assert {
            "counters": {"ucm_saved_blocks_total": 1},
            "gauges": {"ucm_healthy": 1},
            "histograms": {},
        } == counters.take()
        assert 6 == counters.total("ucm_saved_blocks_total")

    def test_taken_numbers_do_not_change_afterwards(self):
        """What was handed out is the taker's own."""
        counters = Counters()
        counters.observe("ucm_save_duration_seconds", 0.5)
        taken = counters.take()
        counters.observe("ucm_save_duration_seconds", 1.5)
        counters.set("ucm_healthy", 0)
        assert {"ucm_save_duration_seconds": [0.5]} == taken["histograms"]
        assert {} == taken["gauges"]

    def test_adding_nothing_leaves_no_sample(self):
        """A sample appears with its first block, not with a zero."""
        counters = Counters()
        counters.add("ucm_saved_blocks_total", 0)
        assert {} == counters.take()

    def test_observations_of_an_interval_are_bounded(self):
        """Nobody takes for a long time: memory is bounded and the newest are kept."""
        counters = Counters()
        for number in range(3000):
            counters.observe("ucm_save_duration_seconds", number)
        (kept,) = counters.take()["histograms"].values()
        assert list(range(3000 - 1024, 3000)) == kept

    def test_threads_that_count_and_take_lose_nothing(self):
        """Seeded adds on four threads beside a taker: totals and takes are exact."""
        counters, taken = Counters(), []
        rng = random.Random(20)
        plans = [[rng.randrange(1, 9) for _ in range(400)] for _ in range(4)]
        start, done = threading.Barrier(5), threading.Event()

        def count(plan):
            start.wait(60.0)
            for amount in plan:
                counters.add("ucm_saved_blocks_total", amount)
                counters.observe("ucm_fence_wait_seconds", amount)

        def take():
            start.wait(60.0)
            while not done.is_set():
                taken.append(counters.take())

        threads = [threading.Thread(target=count, args=(plan,)) for plan in plans]
        taker = threading.Thread(target=take)
        for thread in (*threads, taker):
            thread.start()
        for thread in threads:
            thread.join(60.0)
        done.set()
        taker.join(60.0)
        taken.append(counters.take())
        name, expected = "ucm_saved_blocks_total", sum(map(sum, plans))
        assert expected == counters.total(name)
        told = [one for one in taken if one]
        assert expected == sum(one["counters"].get(name, 0) for one in told)

    def test_reaching_a_total_counts_what_is_missing(self):
        """What is counted elsewhere is told as a difference, like everything else."""
        counters = Counters()
        for total in (3, 3, 5):
            counters.reach("ucm_load_failures_total", total, reason="corrupt")
        assert {"ucm_load_failures_total|corrupt": 5} == counters.take()["counters"]
        counters.reach("ucm_load_failures_total", 5, reason="corrupt")
        assert {} == counters.take()

    def test_total_that_comes_late_takes_nothing_back(self):
        """Of two scrapes at once the older answer may come second: what is less than before is
        taken for a restart by Prometheus, and ended vLLM's front end, whose counters refuse it."""
        counters, name = Counters(), "ucm_store_evicted_parts_total"
        for total in (9, 7, 10):
            counters.reach(name, total)
            assert counters.take().get("counters", {}).get(name, 0) >= 0
        assert 10 == counters.total(name)


class TestGauges:
    def test_gauge_is_told_when_it_changes_and_only_then(self) -> None:
        """Failing while idle is news; being as healthy as before is none."""
        counters = Counters()
        counters.set("ucm_healthy", 1)
        assert {"ucm_healthy": 1} == counters.take()["gauges"]
        counters.set("ucm_healthy", 1)
        assert {} == counters.take()
        counters.set("ucm_healthy", 0)
        assert {"ucm_healthy": 0} == counters.take()["gauges"]

    def test_gauge_has_a_value_for_each_of_its_labels(self) -> None:
        """What is open in one direction says nothing of the other."""
        counters = Counters()
        counters.set("ucm_open_tickets", 2, direction="save")
        counters.set("ucm_open_tickets", 3, direction="load")
        told = {"ucm_open_tickets|save": 2, "ucm_open_tickets|load": 3}
        assert told == counters.take()["gauges"] == counters.snapshot().gauges

    @pytest.mark.parametrize(
        "key",
        ["ucm_healthy|a", "ucm_open_tickets", "ucm_none", "ucm_saved_blocks_total", ""],
    )
    def test_text_of_another_release_is_no_gauge(self, key: str) -> None:
        """A name or labels that are not declared here are told from those that are."""
        assert not is_gauge(key)
        assert is_gauge("ucm_healthy")
        assert is_gauge("ucm_open_tickets|save")


class TestSnapshot:
    def test_snapshot_forgets_nothing_and_is_not_touched_any_more(self) -> None:
        """All since the start, whatever was taken in between; observations by bucket."""
        counters = Counters()
        for seconds in (0.0005, 0.0006, 60.0):
            counters.observe("ucm_save_duration_seconds", seconds)
        counters.add("ucm_saved_blocks_total", 2)
        counters.take()
        seen = counters.snapshot()
        counters.observe("ucm_save_duration_seconds", 1)
        counters.add("ucm_saved_blocks_total", 1)
        (observed,) = seen.histograms.values()
        assert [1, 1, *(0 for _ in SECONDS_BUCKETS[2:]), 1] == observed.counts
        assert pytest.approx(60.0011) == observed.total
        assert {"ucm_saved_blocks_total": 2} == seen.counters


class TestUnits:
    def test_no_metric_is_a_rate_and_times_are_in_seconds(self):
        """X-10: rates are left to whoever reads: every total ships as a counter, a hit
        ratio as its two parts; durations are in seconds, and say so in their names."""
        for metric in METRICS.values():
            words = set(metric.name.split("_"))
            assert not words & {"ratio", "rate", "percent", "per", "ms", "us", "mean"}
            is_time = bool(words & {"duration", "wait", "seconds", "timestamp"})
            unit = metric.name.removesuffix("_total")
            assert is_time == unit.endswith("_seconds"), metric.name
        for numerator, denominator in (
            ("ucm_loaded_tokens_total", "ucm_matched_tokens_total"),
            ("ucm_hit_part_bytes_total", "ucm_hit_parts_total"),
            ("ucm_stage_part_bytes_total", "ucm_stage_seconds_total"),
            ("ucm_store_committed_parts", "ucm_store_capacity_parts"),
            ("ucm_store_populated_bytes", "ucm_store_capacity_bytes"),
        ):
            assert METRICS[numerator].labels == METRICS[denominator].labels
