# SPDX-License-Identifier: Apache-2.0
"""
``ucm trace``: what the logs of a directory tell of requests.

All of it reads the JSON-lines files that engines write with ``log.directory`` set, also
while they run, and changes none of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import click

from ucm.blocks import id_in_log
from ucm.cli.output import clean, console, json_option, say_json, table, writing
from ucm.cli.telling import examples, progress
from ucm.cli.trace_answers import (
    NONE_LOGGED,
    change_text,
    life_dict,
    number_text,
    reasons_of,
    say_life,
    say_notes,
    say_reasons,
    say_totals,
)
from ucm.errors import NoLogError
from ucm.story.collected import Collected, collect
from ucm.story.drawing import draw
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lines import Line, Other
from ucm.story.lives import Life, lives_of
from ucm.story.page import page_of
from ucm.story.perfetto import events_of
from ucm.story.totals import totals_of

__all__ = [
    "diff",
    "show",
    "stats",
    "timeline",
    "trace",
    "why",
]

_MOST_NAMED = 5

_log = click.option(
    "--log",
    "path",
    type=click.Path(readable=False, path_type=Path),
    default=".",
    show_default="here",
    help="Directory of the logs (log.directory), or one file of them.",
)


@click.group(no_args_is_help=False)
def trace() -> None:
    """
    Tell from the logs what became of requests, and why.

    Logs are there when log.directory is set. Exit codes: 0 done; 2 a wrong call; 3 no
    log, or the request is not in it.
    """


@trace.command(epilog=examples("ucm trace show cmpl-4f2a --log /var/log/ucm"))
@click.argument("request_id", metavar="REQUEST")
@_log
@json_option
def show(request_id: str, path: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """
    Tell the story of one request in the order of time.

    REQUEST is its id, or how it begins if no other begins so.
    """
    reading = Reading()
    lives, collected = _one_request(request_id, path, reading)
    others = collected.others.lines()
    notes = [*reading.notes(), *collected.notes()]
    if as_json:
        told = [life_dict(life, _within(life, others, lives)) for life in lives]
        say_json(
            {"v": 1, "request": lives[0].request_id, "lives": told, "notes": notes}
        )
        return
    for life in lives:
        say_life(life, _within(life, others, lives))
    say_notes(notes)


@trace.command(epilog=examples("ucm trace why cmpl-4f2a --log /var/log/ucm"))
@click.argument("request_id", metavar="[REQUEST]", required=False)
@_log
@click.option(
    "--store",
    type=click.Path(readable=False, path_type=Path),
    help="The slab (store.path): also say what it knows of each block by now.",
)
@json_option
def why(request_id: str | None, path: Path, store: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Say why a request, or requests on the whole, had to be computed."""
    reading = Reading()
    if request_id is None:
        totals = totals_of(_lines(path, reading))
        say_reasons(totals, reading.notes(), as_json=as_json)
        return
    lives, collected = _one_request(request_id, path, reading)
    found = [reason for life in lives for reason in reasons_of(life, store)]
    is_told = found or any(life.ended or life.matched for life in lives)
    none = [] if is_told else [NONE_LOGGED]
    notes = [*reading.notes(), *collected.notes()]
    if as_json:
        answer = {"v": 1, "request": lives[0].request_id, "reasons": found}
        say_json(answer | {"notes": [*none, *notes]})
        return
    out = console()
    if not found:
        well = "No look-up of it fell short, and no load of it failed."
        out.print(well if is_told else NONE_LOGGED)
    for each in found:
        out.print(clean(f"{each['kind'].capitalize()}: {each['reason']}"))
        for name in ("where", "meaning", "detail", "now", "remedy"):
            if each[name]:
                out.print(f"  {clean(each[name])}")
    say_notes(notes)


@trace.command(epilog=examples("ucm trace stats --log /var/log/ucm --json"))
@_log
@json_option
def stats(path: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Add up outcomes, bytes and tokens, and how long each stage took."""
    reading = Reading()
    totals = totals_of(_lines(path, reading))
    if as_json:
        say_json({"v": 1, **totals.to_dict(), "notes": reading.notes()})
        return
    say_totals(totals)
    say_notes(reading.notes())


@trace.command(epilog=examples("ucm trace diff /var/log/ucm-old /var/log/ucm-new"))
@click.argument("before", metavar="A", type=click.Path(readable=False, path_type=Path))
@click.argument("after", metavar="B", type=click.Path(readable=False, path_type=Path))
@json_option
def diff(before: Path, after: Path, as_json: bool) -> None:  # noqa: FBT001 - click's
    """Compare two runs: directories of logs, or files."""
    runs = [(path, Reading()) for path in (before, after)]
    olds, news = (dict(totals_of(_lines(*run)).numbers()) for run in runs)
    notes = [f"{path}: {note}" for path, reading in runs for note in reading.notes()]
    names = [*olds, *(name for name in news if name not in olds)]
    rows = [(name, olds.get(name), news.get(name)) for name in names]
    if as_json:
        told = [{"name": name, "a": old, "b": new} for name, old, new in rows]
        answer = {"v": 1, "a": str(before), "b": str(after), "numbers": told}
        say_json(answer | {"notes": notes})
        return
    shown = [
        (name, *map(number_text, (old, new)), change_text(old, new))
        for name, old, new in rows
    ]
    console().print(table("", ("", "A", "B", "change"), shown))
    say_notes(notes)


@trace.command(
    epilog=examples("ucm trace timeline -o timeline.html --log /var/log/ucm")
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HTML file to write; needs nothing but a browser, and no network.",
)
@click.option(
    "--perfetto",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write in Chrome's trace event format, for ui.perfetto.dev.",
)
@click.option("--request", "request_id", help="Only requests whose id begins so.")
@click.option(
    "--limit",
    type=click.IntRange(1, 50_000),
    default=2000,
    show_default=True,
    help="Newest tickets, and newest requests, that are drawn.",
)
@_log
@json_option
def timeline(
    output: Path | None,
    perfetto: Path | None,
    request_id: str | None,
    limit: int,
    path: Path,
    as_json: bool,  # noqa: FBT001 - click's
) -> None:
    """Draw requests and the stages of their saves and loads over time."""
    if output is None and perfetto is None:
        raise click.UsageError(
            "name a file: -o FILE.html, --perfetto FILE.json, or both"
        )
    reading, begins = Reading(), id_in_log(request_id or "")
    collected = collect(
        _lines(path, reading, begins),
        lambda line: not isinstance(line, Other) and _names(line, begins),
        Collected.upto(limit, limit),
    )
    notes = [*reading.notes(), *collected.notes()]
    drawing = draw(lives_of(collected), notes)
    if not drawing.bars:
        raise _nothing(f"{path} tells of no such request and no ticket", reading)
    if output is not None:
        with writing(output):
            output.write_text(page_of(drawing), encoding="utf-8")
    if perfetto is not None:
        with writing(perfetto):
            perfetto.write_text(json.dumps(events_of(drawing)), encoding="utf-8")
    written = [str(each) for each in (output, perfetto) if each is not None]
    if as_json:
        say_json(
            {"v": 1, "written": written, "bars": len(drawing.bars), "notes": notes}
        )
        return
    for name in written:
        console().print(f"wrote {clean(name)}: {len(drawing.bars)} bars")
    say_notes(notes)


def _lines(path: Path, reading: Reading, about: str = "") -> Iterator[Line]:
    """Yield the lines of a log, at least those about a request; shows progress where somebody looks."""
    files, done = find_logs(path), 0
    with progress("read", sum(file.nbytes for file in files)) as tell:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            tell(done)

        yield from read_logs(files, reading, advance, about)
    if not reading.lines:
        raise _nothing(f"{path} has no line of a log of ucm", reading)


def _nothing(problem: str, reading: Reading) -> NoLogError:
    """Return that nothing was found, and what was passed over, which may have had it."""
    return NoLogError("; ".join((problem, *reading.notes())))


def _names(line: Line, request_id: str) -> bool:
    return any(_begins(owner, request_id) for owner in line.owners)


def _begins(name: str, request_id: str) -> bool:
    return name.startswith(request_id) or _asked_for(name).startswith(request_id)


def _asked_for(name: str) -> str:
    """Return what a client calls a request: of several samples of one the engine has ``0_NAME`` and so on."""
    number, _, rest = name.partition("_")
    return rest if rest and number.isdecimal() else name


def _one_request(
    request_id: str, path: Path, reading: Reading
) -> tuple[list[Life], Collected]:
    """Return the lives of one request, and all lines that name it."""
    if not request_id:
        raise click.UsageError("REQUEST is empty")
    request_id = id_in_log(request_id)
    lines = _lines(path, reading, request_id)
    collected = collect(lines, lambda line: _names(line, request_id))
    lives = [
        life for life in lives_of(collected) if _begins(life.request_id, request_id)
    ]
    exact = [life for life in lives if life.request_id == request_id]
    whole = [life for life in lives if _begins(life.request_id, f"{request_id}-")]
    lives = exact or whole or lives
    names = sorted({life.request_id for life in lives})
    if not lives:
        raise _nothing(f"no line of {path} tells of a request {request_id}", reading)
    if len(names) > 1:
        some = ", ".join(names[:_MOST_NAMED])
        raise click.UsageError(f"{len(names)} requests begin so, such as {some}")
    return lives, collected


def _within(life: Life, others: list[Other], lives: list[Life]) -> list[Other]:
    """Return lines of other kinds that name the request, in the life they fall into."""
    later = [each.begin_s for each in lives if each.begin_s > life.begin_s]
    until = min(later, default=float("inf"))
    since = life.begin_s if life is not lives[0] else 0.0
    return [
        line
        for line in others
        if since <= line.when_s < until and life.request_id in line.owners
    ]
