# SPDX-License-Identifier: Apache-2.0
"""What is in ``deploy/`` asks for metrics that exist, and Prometheus takes it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts import dashboard
from ucm.metrics import METRICS, MetricKind

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
OPERATING = DEPLOY.parent / "docs" / "operating.md"
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
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


def unknown(expression: str) -> set[str]:
    """Return the series of an expression that we do not export, or not as it asks."""
    return {
        name
        for name in NAME.findall(expression)
        if name.startswith(("vllm:", "ucm_")) and not is_exported(name)
    }


def is_exported(name: str) -> bool:
    """Return whether a series has this name on ``/metrics``."""
    bare = name.removeprefix("vllm:")
    for suffix in SUFFIXES:
        whole = METRICS.get(bare.removesuffix(suffix))
        if bare.endswith(suffix) and whole and whole.kind is MetricKind.HISTOGRAM:
            return True
    metric = METRICS.get(bare)
    return metric is not None and metric.kind is not MetricKind.HISTOGRAM


def labels_of(expression: str) -> set[tuple[str, str]]:
    """Return the labels by which an expression selects or groups, with their series."""
    return {
        (name, label)
        for name, selected in re.findall(r"vllm:(\w+)\{([^}]*)\}", expression)
        for label in re.findall(r"(\w+)=", selected)
    }


class TestExpressions:
    @pytest.mark.parametrize("where", expressions())
    def test_every_series_is_one_that_is_exported(self, where: str) -> None:
        """X-10: a renamed metric breaks its panel and alert here first; labels too."""
        expression = expressions()[where]
        assert "vllm:ucm_" in expression
        assert set() == unknown(expression)
        for name, label in labels_of(expression):
            declared = METRICS[re.sub("_(sum|count|bucket)$", "", name)].labels
            assert label in {*declared, "instance", "engine"}, name

    @pytest.mark.parametrize(
        "expression",
        [
            "rate(vllm:ucm_saved_total[5m])",
            "vllm:ucm_fence_wait_seconds > 1",
            "ucm_held_blocks_sum",
            "sum(ucm_none)",
        ],
    )
    def test_scan_sees_what_is_not_exported(self, expression: str) -> None:
        """X-10: a name that was renamed, a histogram asked for as a number, a part of
        what is none."""
        assert 1 == len(unknown(expression))

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
