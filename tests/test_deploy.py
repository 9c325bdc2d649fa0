# SPDX-License-Identifier: Apache-2.0
"""What is in ``deploy/`` asks for metrics that exist, and Prometheus takes it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

from scripts import dashboard
from ucm.metrics import METRICS, MetricKind

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
OPERATING = DEPLOY.parent / "docs" / "operating.md"
SERIES = re.compile(r'\{__name__=~"\(vllm\[:_\]\)\?(\w+)",?([^}]*)\}')
WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SUFFIXES = ("_sum", "_count", "_bucket")


def expressions() -> dict[str, str]:
    """Return every expression of rules and dashboard, by where it is."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    board = json.loads((DEPLOY / "grafana" / "ucm.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def series(expression: str) -> list[tuple[str, set[str]]]:
    """Return the series that an expression selects, with the labels it selects by."""
    return [
        (name, set(re.findall(r"(\w+)=", labels)))
        for name, labels in SERIES.findall(expression)
    ]


def unknown(expression: str) -> set[str]:
    """Return what an expression names that we do not export, or not as it asks."""
    named = {name for name, _ in series(expression) if not is_exported(name)}
    elsewhere = WORD.findall(SERIES.sub("", expression))
    return named | {word for word in elsewhere if "ucm" in word}


def is_exported(name: str) -> bool:
    """Return whether a series has this name on ``/metrics``."""
    for suffix in SUFFIXES:
        whole = METRICS.get(name.removesuffix(suffix))
        if name.endswith(suffix) and whole and whole.kind is MetricKind.HISTOGRAM:
            return True
    metric = METRICS.get(name)
    return metric is not None and metric.kind is not MetricKind.HISTOGRAM


class TestExpressions:
    @pytest.mark.parametrize("where", expressions())
    def test_every_series_is_one_that_is_exported(self, where: str) -> None:
        """X-10: a renamed metric breaks its panel and alert here first; labels too."""
        expression = expressions()[where]
        assert series(expression)
        assert set() == unknown(expression)
        for name, labels in series(expression):
            declared = METRICS[re.sub("_(sum|count|bucket)$", "", name)].labels
            assert labels <= {*declared, "instance", "engine"}, name

    @pytest.mark.parametrize(
        "expression",
        [
            'rate({__name__=~"(vllm[:_])?ucm_saved_total"}[5m])',
            '{__name__=~"(vllm[:_])?ucm_fence_wait_seconds"} > 1',
            '{__name__=~"(vllm[:_])?ucm_held_blocks_sum",engine="0"}',
            "sum(vllm:ucm_healthy)",
        ],
    )
    def test_scan_sees_what_is_not_exported(self, expression: str) -> None:
        """X-10: a name that was renamed, a histogram asked for as a number, a part of
        what is none, a name that only some scrapes have."""
        assert 1 == len(unknown(expression))

    @pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
    @pytest.mark.parametrize("name", ["ucm_healthy", "vllm:ucm_healthy"])
    def test_metric_is_asked_for_by_each_name_that_a_scrape_gives_it(
        self, name: str, accept: str
    ) -> None:
        """X-10: Python's client writes the colon of a sample as an underscore in
        OpenMetrics, which is what Prometheus asks for; a server of vLLM's has one."""
        registry = CollectorRegistry()
        Gauge(name, "help", registry=registry).set(1)
        encode, _ = choose_encoder(f"{accept};version=1.0.0")
        lines = encode(registry).decode().splitlines()
        (sample,) = (line.split()[0] for line in lines if line[0] != "#")
        expression = expressions()["UcmUnhealthy"]
        (pattern,) = re.findall(r'__name__=~"([^"]*)"', expression)
        assert re.fullmatch(pattern, sample), sample

    def test_no_panel_divides_by_what_may_be_a_ratio_already(self) -> None:
        """X-10: what is divided are two totals over the same time."""
        for where, expression in expressions().items():
            for side in expression.split(" / ") if " / " in expression else ():
                assert "rate(" in side or "capacity" in side, where

    def test_every_alert_has_its_page(self) -> None:
        """Who is woken by one finds what to do under its name."""
        text = OPERATING.read_text(encoding="utf-8")
        (group,) = yaml.safe_load(RULES.read_text())["groups"]
        alerts = {rule["alert"] for rule in group["rules"]}
        assert alerts == set(re.findall(r"`(Ucm\w+)`", text))

    def test_dashboard_is_the_one_that_is_written_down(self) -> None:
        """``python -m scripts.dashboard`` changes nothing."""
        assert dashboard.render() == dashboard.PATH.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
class TestPromtool:
    """Debian's package ``prometheus`` brings it."""

    def promtool(self, *arguments: str) -> str:
        """Run it in the directory of the rules; it must be content."""
        done = subprocess.run(
            ["promtool", *arguments],
            cwd=RULES.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        return done.stdout

    def test_rules_and_example_are_taken(self) -> None:
        """Prometheus reads the rules, and the configuration that names them."""
        assert "rules found" in self.promtool("check", "rules", "rules.yml")
        assert "SUCCESS" in self.promtool("check", "config", "prometheus.yml")

    def test_each_alert_is_raised_by_what_it_is_for_and_by_nothing_else(self) -> None:
        """Each has a case that raises it, a time before which it does not, and an engine
        that is well raises none."""
        assert "SUCCESS" in self.promtool("test", "rules", "rules_test.yml")
        cases = (RULES.parent / "rules_test.yml").read_text()
        (group,) = yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]:
            assert 3 == cases.count(f"alertname: {rule['alert']}\n"), rule["alert"]

    def test_every_panel_is_a_query(self, tmp_path: Path) -> None:
        """Prometheus parses each expression of the dashboard as a rule of its own."""
        words = {"$__rate_interval": "5m", "$instance": ".*", "$engine": ".*"}
        rules = []
        for number, (where, expression) in enumerate(expressions().items()):
            for word, value in words.items():
                expression = expression.replace(word, value)
            assert "$" not in expression, where
            rules.append({"record": f"ucm:{number}", "expr": expression})
        path = tmp_path / "rules.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}))
        self.promtool("check", "rules", str(path))
