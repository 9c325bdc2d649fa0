# SPDX-License-Identifier: Apache-2.0
"""A cache's metrics, scraped over HTTP as Prometheus does."""

import contextlib
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from tests.cache.kit import Host, keys_of, leaving_nothing
from ucm import line_writer
from ucm.cache.sync import Cache
from ucm.config import LogConfig
from ucm.errors import ConfigError
from ucm.exporter import Exporter
from ucm.metrics import METRICS, SECONDS_BUCKETS, Counters, MetricKind
from ucm.tracing import close_log, num_dropped, open_log

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def served(*exporters: Exporter) -> Iterator[str]:
    """Serve exporters on a loopback port, and give the address."""
    registry = CollectorRegistry()
    for exporter in exporters:
        registry.register(exporter)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60.0)


def scrape(url: str) -> Samples:
    """Return every sample of one scrape, read by the client's own parser."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """Return one sample."""
    return samples.get((name, frozenset(labels.items())))


class TestExporter:
    @pytest.mark.slow
    def test_scrape_tells_what_a_cache_did_and_how_it_stands(self) -> None:
        """X-11: over HTTP, while the cache idles: totals, gauges, store, histograms; and
        that it is not healthy any more once it is closed."""
        host = Host()
        keys = keys_of(5)
        with (
            leaving_nothing(host),
            Cache(*host.open_core()) as cache,
            served(Exporter(cache.measure)) as url,
        ):
            cache.save(keys, range(5)).wait_committed()
            assert cache.load(keys, range(20, 25)).is_whole
            seen = scrape(url)
            assert 1 == value(seen, "ucm_healthy")
            labels = {"outcome": "committed", "reason": ""}
            for direction in ("save", "load"):
                parts = value(
                    seen, "ucm_settled_parts_total", direction=direction, **labels
                )
                assert 5 == parts
                assert 0 == value(seen, "ucm_open_tickets", direction=direction)
            assert 5 == value(seen, "ucm_hit_parts_total", tier="memory")
            assert 5 == value(seen, "ucm_store_committed_parts")
            count = value(seen, "ucm_save_duration_seconds_count")
            assert count == value(seen, "ucm_save_duration_seconds_bucket", le="+Inf")
            assert 1 <= count
            assert value(seen, "ucm_last_sign_timestamp_seconds") > 1e9
            cache.close()
            assert 0 == value(scrape(url), "ucm_healthy")

    def test_lines_that_a_cache_s_log_lost_are_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-73: each once, however often somebody looks; they were told as none."""
        monkeypatch.setattr(line_writer, "MAX_CHARS", 0)
        host, name = Host(), "ucm_dropped_log_lines_total"
        log = host.tracer.log = open_log(LogConfig(directory=str(tmp_path)), "cache-0")
        with contextlib.ExitStack() as ending:
            ending.callback(close_log, log)
            cache = ending.enter_context(Cache(*host.open_core()))
            for _ in range(2):
                assert 0 < cache.measure().counters[name] <= num_dropped(log)

    def test_what_happens_once_is_none_before(self) -> None:
        """A damaged block is a step from 0 to 1, and no series that begins with 1."""
        counters = Counters()
        labels = {"direction": "load", "outcome": "failed", "reason": "corrupt"}
        with served(Exporter(counters.snapshot)) as url:
            for seen in (0, 1):
                found = value(scrape(url), "ucm_settled_parts_total", **labels)
                assert seen == found
                counters.add("ucm_settled_parts_total", 1, **labels)

    def test_caches_of_one_process_are_told_apart_by_their_names(self) -> None:
        """By one exporter, as a family may stand in a registry once; also for what has
        labels and buckets of its own."""
        told = {}
        for name in "ab":
            counters = Counters()
            counters.add("ucm_saved_blocks_total", ord(name))
            counters.set("ucm_open_tickets", ord(name), direction="load")
            counters.observe("ucm_save_duration_seconds", 0.2)
            told[name] = counters.snapshot
        with served(Exporter(told, labels={"server": "s"})) as url:
            seen = scrape(url)
        for name in "ab":
            own = {"server": "s", "cache": name}
            assert ord(name) == value(seen, "ucm_saved_blocks_total", **own)
            found = value(seen, "ucm_open_tickets", direction="load", **own)
            assert ord(name) == found
            assert 1 == value(seen, "ucm_save_duration_seconds_count", **own)
            assert value(seen, "ucm_last_sign_timestamp_seconds", **own) > 1e9

    @pytest.mark.parametrize(
        ("labels", "problem"),
        [
            ({"direction": "x"}, "labels.direction='x': a metric has"),
            ({"le": "x"}, "labels.le='x': a metric has"),
            ({"0bad": "x"}, "labels.0bad='x': is no name"),
            ({"a-b": "x"}, "labels.a-b='x': is no name"),
            ({"__a": "x"}, "labels.__a='x': is no name"),
            ({5: "x"}, "labels.5='x': is no name"),
            ({"server": 5}, "labels.server=5: is no text. Give '5'."),
        ],
    )
    def test_label_that_cannot_be_is_refused(
        self, labels: dict[str, str], problem: str
    ) -> None:
        """Where it is given, and not at each scrape."""
        with pytest.raises(ConfigError, match=re.escape(problem)):
            Exporter(Counters().snapshot, labels=labels)

    @pytest.mark.parametrize(
        ("name", "label", "problem"),
        [
            ("a", "reason", "labels.reason='a': a metric has"),
            ("a", "server", "labels.server='s': the names of several"),
            (5, "cache", "labels.cache=5: is no text"),
        ],
    )
    def test_name_that_cannot_be_is_refused(
        self, name: str, label: str, problem: str
    ) -> None:
        """Of several caches, and the label that has their names."""
        told = {name: Counters().snapshot}
        with pytest.raises(ConfigError, match=re.escape(problem)):
            Exporter(told, labels={"server": "s"}, label=label)

    @pytest.mark.parametrize(
        ("measure", "problem"),
        [
            (
                Counters().snapshot(),
                "measure='Snapshot': measures no cache. Give cache.",
            ),
            ({"a": Counters()}, "measure.a='Counters': measures no cache. Give cache."),
        ],
    )
    def test_what_measures_nothing_is_refused(self, measure: Any, problem: str) -> None:
        """A cache's numbers, or a cache itself, in the place of what asks for them."""
        with pytest.raises(ConfigError, match=re.escape(problem)):
            Exporter(measure)

    def test_every_metric_is_described_by_its_kind(self) -> None:
        """X-10: what Prometheus is told of a metric is what the table says."""
        families = {one.name: one for one in Exporter(Counters().snapshot).describe()}
        assert len(METRICS) == len(families)
        for name, metric in METRICS.items():
            family = families[name.removesuffix("_total")]
            assert (metric.kind.value, metric.help) == (
                family.type,
                family.documentation,
            )

    def test_buckets_are_cumulative_and_sum_up(self) -> None:
        """X-10: a histogram ships its sum and its count, so that a mean can be had."""
        counters = Counters()
        for seconds in (0.0001, 0.0005, 0.2, 99.0):
            counters.observe("ucm_save_duration_seconds", seconds)
        with served(Exporter(counters.snapshot)) as url:
            seen = scrape(url)
        name = "ucm_save_duration_seconds"
        assert 2 == value(seen, f"{name}_bucket", le="0.0005")
        assert 3 == value(seen, f"{name}_bucket", le=str(SECONDS_BUCKETS[-1]))
        assert 4 == value(seen, f"{name}_count")
        assert pytest.approx(99.2006) == value(seen, f"{name}_sum")
        kinds = {metric.kind for metric in METRICS.values()}
        assert set(MetricKind) == kinds
