# SPDX-License-Identifier: Apache-2.0
"""The machine and what is installed on it."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from ucm.affinity import NUMA, OFF, AffinityPlan, bind_thread, parse_cpulist
from ucm.config import UCMConfig
from ucm.doctor.findings import Finding, fine, note, warning
from ucm.doctor.place import within

__all__ = ["MachineFacts", "check_machine", "gather_machine"]

_PACKAGES = ("ucm", "vllm", "torch", "vllm-ascend", "torch-npu", "PyYAML")
_POPULATES_SINCE = (5, 14)
_ANSWERS_S = 5.0


@attrs.frozen(kw_only=True)
class MachineFacts:
    """
    What there is.

    Args:
        kernel: Its release.
        nodes: NUMA nodes, as Linux writes them.
        cpus: That this process may use.
        packages: Versions of what is installed.
    """

    kernel: str
    nodes: str
    cpus: int
    packages: Mapping[str, str]


def gather_machine(system: Path = Path("/")) -> MachineFacts:
    """Ask the machine."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return MachineFacts(
        kernel=platform.release(),
        nodes=_text(system / "sys/devices/system/node/has_memory"),
        cpus=len(os.sched_getaffinity(0)),
        packages=packages,
    )


def check_machine(facts: MachineFacts, config: UCMConfig) -> Iterator[Finding]:
    """Say what of the machine matters to the settings."""
    found = ", ".join(f"{name} {each}" for name, each in facts.packages.items())
    yield fine(
        "versions",
        f"Python {platform.python_version()}, Linux {facts.kernel}, {found}",
    )
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.kernel)[:2])
    if numbers < _POPULATES_SINCE:
        yield note(
            "versions",
            f"Linux {facts.kernel} cannot populate memory page by page; it is allocated "
            "by the file system instead",
            "Linux 5.14 or later fills a slab faster.",
        )
    several = bool(re.search(r"[,-]", facts.nodes))
    if several and config.store.numa == "off":
        yield note(
            "NUMA",
            f"there are several nodes ({facts.nodes}), and the slab lies near whoever "
            "fills it first",
            "If devices sit at several nodes: store.numa: interleave.",
        )
    else:
        nodes = facts.nodes or "not told"
        yield fine("NUMA", f"nodes: {nodes}; store.numa: {config.store.numa}")
    if facts.cpus < 2:
        yield note(
            "CPUs",
            "this process may use one CPU; copies share it with the engine",
            "Give it a second one.",
        )
    yield from _check_affinity(config.threads.affinity)


def _check_affinity(setting: str) -> Iterator[Finding]:
    """Try the CPUs that copy threads are to have, on a thread that ends then."""
    if setting in (OFF, NUMA):
        return
    plan = AffinityPlan(parse_cpulist(setting), "not all can be had")
    bound = within(_ANSWERS_S, lambda: bind_thread(plan))
    if bound is not None and bound.cpus != plan.cpus:
        yield warning(
            "CPUs",
            f"threads.affinity={setting!r}: {bound.reason}",
            "Use CPUs that are online and that the container may use.",
        )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
