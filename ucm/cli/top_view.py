# SPDX-License-Identifier: Apache-2.0
"""
What ``ucm top`` shows: the engines of a slab, put together from what their processes say.

Pure: two looks at all processes, and the seconds between them, become engines and rates.
"""

from collections.abc import Iterable, Mapping, Sequence

import attrs

from ucm.metrics import is_gauge, split_key
from ucm.settings import seconds_text, size_text
from ucm.status import Status

__all__ = ["NARROW", "EngineView", "columns_of", "engines_of", "slab_line"]

NARROW = 120
"""Columns of a terminal below which less is shown."""
_MOST_REASONS = 3
_MISSED = "ucm_missed_lookups_total"
_SETTLED = "ucm_settled_part_bytes_total"
_OPEN = "ucm_open_tickets"
_HEALTHY = "ucm_healthy"
_AGENT, _TIER = "ucm_agent_up", "ucm_tier_up"
_SERVER = "ucm_tier_server_up"
_MOST_SERVERS = 3


def _sum(numbers: Mapping[str, float], *names: str) -> float:
    """Return the sum over all labels that begin so."""
    key = "|".join(names)
    return sum(
        value
        for name, value in numbers.items()
        if name == key or name.startswith(f"{key}|")
    )


def _by_label(numbers: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the values of a metric that has one label, the greatest first."""
    found = {
        key.split("|")[1]: value
        for key, value in numbers.items()
        if key.startswith(f"{name}|")
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@attrs.frozen
class EngineView:
    """
    One engine, over all of its processes.

    Args:
        name: Its own name; that of the process where it has none.
        processes: The name of each.
        state: ``ok``, ``starting`` (the scheduler did not tell), or ``bypassed``, by any process.
        problem: Why a process could not tell all.
        uptime_s: Of the process that runs longest.
        counters: Totals, over all processes.
        gauges: Of the scheduler; of a cache, its own.
        sizes: Likewise.
        rates: Totals per second since the look before, or since the start.
    """

    name: str
    processes: tuple[str, ...]
    state: str
    problem: str
    uptime_s: float
    counters: dict[str, float]
    gauges: dict[str, float]
    sizes: dict[str, float]
    rates: dict[str, float]

    def rate(self, *names: str) -> float:
        """Return a rate, over all labels that begin so."""
        return _sum(self.rates, *names)

    def total(self, *names: str) -> float:
        """Return a total, over all labels that begin so."""
        return _sum(self.counters, *names)

    def text(self) -> str:
        """Return what there is to say in words: misses, failures, who is away; may be empty."""
        told = []
        for what, name in (
            ("missed", _MISSED),
            ("failed loads", "ucm_load_failures_total"),
            ("loaded from", "ucm_hit_part_bytes_total"),
        ):
            found = list(_by_label(self.counters, name).items())[:_MOST_REASONS]
            as_text = size_text if what == "loaded from" else "{:.0f}".format
            words = [f"{label} {as_text(value)}" for label, value in found if value]
            if words:
                told.append(f"{what}: {', '.join(words)}")
        if not self.gauges.get(_AGENT, 1):
            told.append("the agent is away")
        tiers = _by_label(self.gauges, _TIER)
        if silent := [label for label, is_up in tiers.items() if not is_up]:
            told.append(f"silent tiers: {', '.join(silent)}")
        told += _servers_text(self.gauges)
        if self.problem:
            told.append(self.problem)
        return "; ".join(told)


def _servers_text(gauges: Mapping[str, float]) -> list[str]:
    """Return which servers of tiers are away, and which of the others take no blocks."""
    down: dict[str, list[str]] = {"load": [], "save": []}
    for key, is_up in sorted(gauges.items()):
        if is_up or not (key.startswith(f"{_SERVER}|") and is_gauge(key)):
            continue
        tier, direction, address = split_key(key)[1].values()
        down.setdefault(direction, []).append(f"{address} ({tier})")
    told = []
    for what, names in (
        ("silent servers", down["load"]),
        (
            "servers that take nothing",
            [n for n in down["save"] if n not in down["load"]],
        ),
    ):
        if names:
            more = len(names) - _MOST_SERVERS
            rest = [f"{more} more"] if more > 0 else []
            told.append(f"{what}: {', '.join([*names[:_MOST_SERVERS], *rest])}")
    return told


def engines_of(
    statuses: Iterable[Status],
    before: Mapping[str, Mapping[str, float]] | None = None,
    seconds: float = 0.0,
) -> list[EngineView]:
    """
    Return all engines by name.

    Args:
        statuses: What all processes say now.
        before: Totals of each engine at the look before; rates are from the start where
            there was none.
        seconds: How long that is ago.
    """
    by_engine: dict[str, list[Status]] = {}
    for status in statuses:
        by_engine.setdefault(status.engine or status.name, []).append(status)
    return [
        _engine(name, processes, (before or {}).get(name), seconds)
        for name, processes in sorted(by_engine.items())
    ]


def _engine(
    name: str,
    processes: Sequence[Status],
    before: Mapping[str, float] | None,
    seconds: float,
) -> EngineView:
    processes = sorted(processes, key=lambda each: (each.role, each.pid))
    heads = [each for each in processes if not each.role.startswith("worker")]
    counters: dict[str, float] = {}
    for each in processes:
        for key, value in each.counters.items():
            counters[key] = counters.get(key, 0) + value
    uptime = max(each.uptime_s for each in processes)
    past, span = (before, seconds) if before is not None else ({}, uptime)
    gauges = {key: value for each in heads for key, value in each.gauges.items()}
    told = [each.gauges[_HEALTHY] for each in processes if _HEALTHY in each.gauges]
    healthy = min(told, default=1.0 if heads else None)
    return EngineView(
        name=name,
        processes=tuple(each.name for each in processes),
        state="starting" if healthy is None else "ok" if healthy else "bypassed",
        problem="; ".join(each.problem for each in processes if each.problem),
        uptime_s=uptime,
        counters=counters,
        gauges=gauges,
        sizes={key: value for each in heads for key, value in each.sizes.items()},
        rates={
            key: max(0.0, value - past.get(key, 0.0)) / span if span > 0 else 0.0
            for key, value in counters.items()
        },
    )


def columns_of(engine: EngineView, *, is_wide: bool) -> dict[str, str]:
    """Return the cells of an engine's row by the names of their columns."""
    gauges = engine.gauges
    cells = {
        "engine": engine.name,
        "state": engine.state,
        "requests": f"{engine.sizes.get('requests', 0):.0f}",
        "saves": f"{_sum(gauges, _OPEN, 'save'):.0f}",
        "loads": f"{_sum(gauges, _OPEN, 'load'):.0f}",
        "held": f"{engine.sizes.get('held_blocks', 0):.0f}",
        "saved/s": size_text(engine.rate(_SETTLED, "save", "committed")),
        "loaded/s": size_text(engine.rate(_SETTLED, "load", "committed")),
    }
    if not is_wide:
        return cells
    return cells | {
        "held for": seconds_text(gauges.get("ucm_oldest_hold_seconds", 0)),
        "tokens loaded": f"{engine.total('ucm_loaded_tokens_total'):.0f}",
        "blocks saved": f"{engine.total('ucm_saved_blocks_total'):.0f}",
        "dropped": f"{engine.total('ucm_dropped_blocks_total'):.0f}",
        "processes": f"{len(engine.processes)}",
        "up": f"{engine.uptime_s / 60:.0f} min",
    }


def slab_line(path: str, engines: Iterable[EngineView]) -> str:
    """Return how full the slab is, as far as some engine says so."""
    for engine in engines:
        gauges = engine.gauges
        if capacity := gauges.get("ucm_store_capacity_parts"):
            committed = gauges.get("ucm_store_committed_parts", 0)
            nbytes = size_text(gauges.get("ucm_store_capacity_bytes", 0))
            evicted = engine.total("ucm_store_evicted_parts_total")
            return (
                f"{path}: {committed:.0f} of {capacity:.0f} slots "
                f"({committed / capacity:.0%}) of {nbytes}, {evicted:.0f} made room"
            )
    return path
