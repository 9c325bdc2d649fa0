# SPDX-License-Identifier: Apache-2.0
"""What is in ``deploy/`` asks for metrics that exist, and Prometheus takes it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

from scripts import dashboard
from ucm.config import UCMConfig
from ucm.metrics import FROM_START, METRICS, MetricKind, sample_key
from ucm.settings import read_size

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

    def test_what_is_alerted_of_once_is_told_as_none_before(self) -> None:
        """``increase`` compares two samples: a counter that begins with what happened says
        nothing of it, whoever exports it."""
        (group,) = yaml.safe_load(RULES.read_text())["groups"]
        once = [
            rule["expr"]
            for rule in group["rules"]
            if "for" not in rule and re.search(r"increase\(.* > 0$", rule["expr"])
        ]
        assert len(FROM_START) == len(once)
        for expression in once:
            ((name, labels),) = SERIES.findall(expression)
            given = dict(re.findall(r'(\w+)="(\w+)"', labels))
            assert sample_key(name, given) in FROM_START

    def test_who_looks_nothing_up_is_no_alert(self) -> None:
        """An engine with ``kv_producer`` saves, and finds nothing for as long as it runs."""
        asked = {name for name, _ in series(expressions()["UcmNothingFound"])}
        assert "ucm_lookups_total" in asked

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


class TestCluster:
    """``deploy/kubernetes/cluster.yaml``; its schema was looked at by kubernetes-validate."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls) -> dict[tuple[str, str], Any]:
        """Return the manifest's objects by kind and name."""
        text = (DEPLOY / "kubernetes" / "cluster.yaml").read_text()
        return {
            (each["kind"], each["metadata"]["name"]): each
            for each in yaml.safe_load_all(text)
        }

    @staticmethod
    def pods(objects: dict[tuple[str, str], Any]) -> dict[str, Any]:
        """Return the containers by their names, with the labels of their pods."""
        found = {}
        for each in objects.values():
            template = each["spec"].get("template")
            if template:
                (container,) = template["spec"]["containers"]
                found[container["name"]] = container, template["metadata"]["labels"]
        return found

    def test_every_container_is_bounded_and_looked_at(self, objects: Any) -> None:
        """Memory has a limit; what listens for others says when it is ready."""
        for name, (container, _) in self.pods(objects).items():
            assert "memory" in container["resources"]["limits"], name
            assert {"ALL"} == set(container["securityContext"]["capabilities"]["drop"])
            listens = "ports" in container
            assert listens == ("readinessProbe" in container), name
            assert listens == ("livenessProbe" in container), name

    def test_every_service_has_its_pods_and_their_ports(self, objects: Any) -> None:
        """A name that the engines or the router use leads to somebody."""
        pods = self.pods(objects)
        for (kind, name), each in objects.items():
            if kind != "Service":
                continue
            selected = each["spec"]["selector"].items()
            (container,) = (
                c for c, labels in pods.values() if selected <= labels.items()
            )
            ports = container.get("ports", [])
            known = {port[what] for port in ports for what in ("name", "containerPort")}
            for port in each["spec"]["ports"]:
                wanted = port.get("targetPort", port["port"])
                assert wanted in known or name == "mooncake-node"

    def test_engine_is_given_what_it_takes(self, objects: Any) -> None:
        """Settings are read as the engine would; the slab fits into its memory."""
        container, _ = self.pods(objects)["engine"]
        given = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
        transfer = json.loads(given["kv-transfer-config"])
        config = UCMConfig.from_mapping(transfer["kv_connector_extra_config"])
        assert "node" == config.kv_events.value
        ((tier_type, master),) = ((t["type"], t["master"]) for t in config.tiers)
        host, _, port = master.partition(":")
        service = objects["Service", host]["spec"]["ports"]
        assert ("mooncake", [int(port)]) == (tier_type, [p["port"] for p in service])
        (shm,) = (
            volume["emptyDir"]["sizeLimit"]
            for volume in objects["StatefulSet", "engine"]["spec"]["template"]["spec"][
                "volumes"
            ]
            if volume["name"] == "shm"
        )
        limit = container["resources"]["limits"]["memory"]
        sizes = [read_size("", text + "B") for text in (shm, limit)]
        assert config.store.capacity < sizes[0] < sizes[1]

    def test_engine_s_container_waits_for_its_agent(
        self, objects: Any, tmp_path: Path
    ) -> None:
        """A container ends with its first process, which was the engine: what the agent had yet to
        spill was lost, however long the pod may take. The engine's own end is told behind it. Nobody
        is waited for whose socket is left of a container that was killed."""
        container, _ = self.pods(objects)["engine"]
        ended, waits, agent = (tmp_path / name for name in ("ended", "waits", "s"))
        for name, does in (
            ("vllm", f'echo "$@" > {tmp_path}/given; exec cat {ended}'),
            ("sleep", f"cat {waits}"),
        ):
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        os.mkfifo(ended)
        os.mkfifo(waits)
        shell, option, script, *given = container["command"]
        script = script.replace("/dev/shm/ucm/agent.sock", str(agent))
        assert str(agent) in script
        with (
            socket.socket(socket.AF_UNIX) as killed,
            socket.socket(socket.AF_UNIX) as listening,
        ):
            killed.bind(str(agent))
            first = subprocess.Popen(
                [shell, option, script, *given, *container["args"]],
                env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            )
            with ended.open("w"):  # the engine is there, and ends by the signal
                listening.bind(str(agent))
                first.terminate()
                with waits.open("w"):
                    agent.unlink()
            assert 128 + signal.SIGTERM == first.wait(60)
        told = (tmp_path / "given").read_text().split()
        assert ["serve", "/models/model", "--served-model-name=model"] == told[:3]

    def test_router_follows_every_engine(self, objects: Any) -> None:
        """It is told of as many as there are, at the ports of their service."""
        container, _ = self.pods(objects)["router"]
        args = container["args"]
        starts = [at for at, arg in enumerate(args) if arg == "--engine"]
        assert objects["StatefulSet", "engine"]["spec"]["replicas"] == len(starts)
        ports = [p["port"] for p in objects["Service", "engine"]["spec"]["ports"]]
        for at in starts:
            name, *urls = args[at + 1 : at + 5]
            assert [f"{name}.engine:{port}" for port in ports] == [
                url.rpartition("/")[2] for url in urls
            ]
