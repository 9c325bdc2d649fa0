# SPDX-License-Identifier: Apache-2.0
"""``ucm top``: how the engines that share a slab are, now and as long as somebody looks."""

import sys
import time
from pathlib import Path

import click
import rich.live
from rich.console import Console, Group, RenderableType

from ucm.cli.output import clean, console, json_option, say_json, table
from ucm.cli.telling import Number, examples
from ucm.cli.top_view import NARROW, EngineView, columns_of, engines_of, slab_line
from ucm.config import default_store_path
from ucm.errors import NoStatusError
from ucm.status import VERSION, Statuses, read_statuses
from ucm.threads import SYSTEM

__all__ = ["rendered", "top"]

_NOT_WELL = 1


@click.command(epilog=examples("ucm top /dev/shm/ucm-1000 --once"))
@click.argument(
    "path",
    metavar="[SLAB]",
    required=False,
    type=click.Path(readable=False, path_type=Path),
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option(
    "--interval",
    type=Number(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@json_option
def top(path: Path | None, once: bool, interval: float, as_json: bool) -> int:  # noqa: FBT001
    """
    Show how the engines are that use a slab, live.

    SLAB is its directory (store.path); the one of this user if left out. Without a
    terminal, or with --json, it looks once. Ctrl-C ends it.

    Exit codes: 0 all engines are well; 1 an engine is bypassed, or a process is silent;
    2 a wrong call; 3 no engine runs on that slab.
    """
    path = path or Path(default_store_path())
    statuses = _look(path)
    engines = engines_of(statuses.answers)
    if as_json:
        say_json(_answer(path, engines, statuses))
        return _verdict(engines, statuses)
    out = console()
    if once or not sys.stdout.isatty():
        out.print(rendered(path, engines, statuses, out))
        return _verdict(engines, statuses)
    with rich.live.Live(console=out, auto_refresh=False) as live:
        try:
            while True:
                live.update(rendered(path, engines, statuses, out), refresh=True)
                then, before = SYSTEM.monotonic(), engines
                time.sleep(interval)
                try:
                    statuses = read_statuses(path)
                except NoStatusError:  # nobody for a while: an engine restarts
                    statuses = Statuses()
                totals = {engine.name: engine.counters for engine in before}
                seconds = SYSTEM.monotonic() - then
                engines = engines_of(statuses.answers, totals, seconds)
        except KeyboardInterrupt:
            return _verdict(engines, statuses)


def rendered(
    path: Path, engines: list[EngineView], statuses: Statuses, out: Console
) -> RenderableType:
    """Return what is shown of all engines on a console of this width."""
    is_wide = out.width >= NARROW
    rows = [columns_of(engine, is_wide=is_wide) for engine in engines]
    shown: list[RenderableType] = [clean(slab_line(str(path), engines))]
    if rows:
        shown.append(table("", list(rows[0]), [list(row.values()) for row in rows]))
    elif not statuses.silent:
        shown.append("no engine runs here now")
    shown += [
        clean(f"{row['engine']}: {text}")
        for row, engine in zip(rows, engines, strict=True)
        if (text := engine.text())
    ]
    shown += [clean(f"{name} does not answer") for name in statuses.silent]
    return Group(*shown)


def _look(path: Path) -> Statuses:
    statuses = read_statuses(path)
    if not (statuses.answers or statuses.silent):
        raise NoStatusError(f"no engine runs on {path}")
    return statuses


def _verdict(engines: list[EngineView], statuses: Statuses) -> int:
    are_well = [engine.state == "ok" and not engine.problem for engine in engines]
    is_well = bool(are_well) and all(are_well) and not statuses.silent
    return 0 if is_well else _NOT_WELL


def _answer(
    path: Path, engines: list[EngineView], statuses: Statuses
) -> dict[str, object]:
    return {
        "v": VERSION,
        "slab": str(path),
        "engines": [
            {
                "name": engine.name,
                "state": engine.state,
                "problem": engine.problem,
                "processes": engine.processes,
                "uptime_s": engine.uptime_s,
                "counters": engine.counters,
                "gauges": engine.gauges,
                "sizes": engine.sizes,
                "rates": engine.rates,
            }
            for engine in engines
        ],
        "edges": {each.name: each.edges for each in statuses.answers if each.edges},
        "silent": statuses.silent,
    }
