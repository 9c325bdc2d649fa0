# SPDX-License-Identifier: Apache-2.0
"""Write deploy/grafana/ucm.json, the dashboard, from the table of panels below."""

import json
from pathlib import Path
from typing import Any

import attrs

__all__ = ["PANELS", "PATH", "Panel", "render"]

PATH = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "ucm.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WHO = 'instance=~"$instance",engine=~"$engine"'
_EACH = "instance, engine"


@attrs.frozen
class Panel:
    """
    One panel.

    Args:
        title: What it answers.
        unit: Grafana's name of it.
        queries: Expressions, each with its legend.
        help: How to read it.
        kind: Of panel.
        width: Of 24.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str
    kind: str = "timeseries"
    width: int = 8


def _series(name: str, more: str = "") -> str:
    """Select a metric, as vLLM's server names it, as Prometheus may, and as we do."""
    selected = ",".join(filter(None, (_name(name), _WHO, more)))
    return f"{{{selected}}}"


def _name(name: str) -> str:
    return f'__name__=~"(vllm[:_])?{name}"'


def _rate(name: str, by: str = _EACH, more: str = "") -> str:
    return f"sum by ({by}) (rate({_series(name, more)}[$__rate_interval]))"


def _over(numerator: str, denominator: str) -> str:
    return f"{numerator} / {denominator}"


def _quantile(name: str, share: float) -> str:
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', 'le')})"


def _backlog(unit: str) -> str:
    offered = f"sum by (direction) ({_series(f'ucm_offered_{unit}_total')})"
    settled = f"sum by (direction) ({_series(f'ucm_settled_{unit}_total')})"
    return f"({offered} - {settled}) or {offered}"  # nothing is settled at first


_WHOSE = "{{instance}} {{engine}}"

PANELS = {
    "Is it well?": (
        Panel(
            "Served",
            "bool_on_off",
            ((_series("ucm_healthy"), _WHOSE),),
            "1 while blocks are found and saved. Fresh also while the engine idles.",
            "stat",
            6,
        ),
        Panel(
            "Weights are proven",
            "bool_yes_no",
            ((_series("ucm_weights_proven"), _WHOSE),),
            "0 while ranks have not agreed which weights they run.",
            "stat",
            6,
        ),
        Panel(
            "Since the last sign",
            "s",
            ((f"time() - {_series('ucm_last_sign_timestamp_seconds')}", _WHOSE),),
            "More than half a minute: the engine hangs or is gone.",
            "stat",
            6,
        ),
        Panel(
            "Oldest hold",
            "s",
            ((_series("ucm_oldest_hold_seconds"), _WHOSE),),
            "How long the oldest running save has kept blocks from the engine.",
            "stat",
            6,
        ),
    ),
    "What does it save us?": (
        Panel(
            "Tokens asked for, found and loaded",
            "short",
            (
                (_rate("ucm_wanted_tokens_total"), "wanted " + _WHOSE),
                (_rate("ucm_matched_tokens_total"), "matched " + _WHOSE),
                (_rate("ucm_loaded_tokens_total"), "loaded " + _WHOSE),
            ),
            "Tokens a second of whole blocks. Wanted: beyond the engine's own cache.",
        ),
        Panel(
            "Share of tokens found",
            "percentunit",
            (
                (
                    _over(
                        _rate("ucm_matched_tokens_total"),
                        _rate("ucm_wanted_tokens_total"),
                    ),
                    _WHOSE,
                ),
            ),
            "Of the tokens that were asked for. See beside it how many these were.",
        ),
        Panel(
            "Why look-ups miss",
            "short",
            ((_rate("ucm_missed_lookups_total", "reason"), "{{reason}}"),),
            "Requests a second that did not find all, by why the first block is missing.",
        ),
        Panel(
            "Loads that failed",
            "short",
            ((_rate("ucm_load_failures_total", "reason"), "{{reason}}"),),
            "Requests a second that were computed after all, by reason.",
        ),
        Panel(
            "Hits by tier",
            "Bps",
            ((_rate("ucm_hit_part_bytes_total", "tier"), "{{tier}}"),),
            "Bytes a second that came from each medium.",
            width=16,
        ),
    ),
    "What becomes of saves?": (
        Panel(
            "Parts of saves by end",
            "short",
            (
                (
                    _rate(
                        "ucm_settled_parts_total",
                        "outcome, reason",
                        'direction="save"',
                    ),
                    "{{outcome}} {{reason}}",
                ),
            ),
            "Committed is new; skipped was stored already; the rest is a later miss.",
        ),
        Panel(
            "Blocks saved and dropped",
            "short",
            (
                (_rate("ucm_saved_blocks_total"), "saved " + _WHOSE),
                (_rate("ucm_dropped_blocks_total"), "dropped " + _WHOSE),
            ),
            "Dropped: nobody took them in time.",
        ),
        Panel(
            "Backlog",
            "bytes",
            ((_backlog("part_bytes"), "{{direction}}"),),
            "Offered and not settled. A save's grows when the store is behind.",
        ),
        Panel(
            "Open tickets",
            "short",
            ((_series("ucm_open_tickets"), "{{direction}} " + _WHOSE),),
            "Ordered and not over on every rank.",
            width=12,
        ),
        Panel(
            "Held by saves",
            "bytes",
            ((_series("ucm_held_bytes"), _WHOSE),),
            "Memory of the engine that saves still read.",
            width=12,
        ),
    ),
    "How fast is it?": (
        Panel(
            "Bandwidth of stages",
            "Bps",
            (
                (
                    _over(
                        _rate("ucm_stage_part_bytes_total", "direction, stage"),
                        _rate("ucm_stage_seconds_total", "direction, stage"),
                    ),
                    "{{direction}} {{stage}}",
                ),
            ),
            "Bytes by the seconds spent on them, per ticket. Waiting stages count too.",
        ),
        Panel(
            "How long loads and saves take",
            "s",
            (
                (_quantile("ucm_load_duration_seconds", 0.5), "load, half"),
                (_quantile("ucm_load_duration_seconds", 0.99), "load, 99 of 100"),
                (_quantile("ucm_save_duration_seconds", 0.99), "save, 99 of 100"),
                (_quantile("ucm_hold_duration_seconds", 0.99), "hold, 99 of 100"),
            ),
            "From admission to end; a hold ends when the engine has its blocks back.",
        ),
        Panel(
            "Time the engine waited",
            "percentunit",
            ((_rate("ucm_fence_wait_seconds_sum"), _WHOSE),),
            "Share of time in which the engine waited for saves. Should be none.",
        ),
    ),
    "How full is the store?": (
        Panel(
            "Parts stored",
            "short",
            (
                (_series("ucm_store_committed_parts"), "stored " + _WHOSE),
                (_series("ucm_store_capacity_parts"), "room " + _WHOSE),
            ),
            "A full store is as it should be: it evicts what was used longest ago.",
        ),
        Panel(
            "Seconds until all is replaced",
            "s",
            (
                (
                    _over(
                        _series("ucm_store_capacity_parts"),
                        f"rate({_series('ucm_store_evicted_parts_total')}[15m])",
                    ),
                    _WHOSE,
                ),
            ),
            "About how long a block stays. Less than users take to come back: too small.",
        ),
        Panel(
            "Memory that is there",
            "bytes",
            (
                (_series("ucm_store_populated_bytes"), "there " + _WHOSE),
                (_series("ucm_store_capacity_bytes"), "asked for " + _WHOSE),
            ),
            "Grows behind the start; less than asked for: memory was short.",
        ),
    ),
}
"""By the question of their row."""


def render() -> str:
    """Return the dashboard as Grafana imports it."""
    dashboard = {
        "title": "ucm",
        "uid": "ucm",
        "description": "KV blocks that were not computed again, and what it cost.",
        "tags": ["ucm", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source(), _choice("instance"), _choice("engine")]},
        "panels": _panels(),
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus"}


def _choice(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({{{_name('ucm_healthy')}}}, {label})",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panels() -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    y = 0
    for row, panels in PANELS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        told.append(
            {"id": len(told) + 1, "type": "row", "title": row, "gridPos": place}
        )
        x, y = 0, y + 1
        for panel in panels:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > 24:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            told.append(_panel(panel, len(told) + 1, place))
            x += panel.width
        y += height
    return told


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
