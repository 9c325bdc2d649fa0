# SPDX-License-Identifier: Apache-2.0
"""How ``ucm trace`` answers: what it prints, and the same for programs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ucm.blocks import PackedKey
from ucm.cli.output import clean, console, say_json, table
from ucm.settings import seconds_text, size_text
from ucm.stores.slab import explain
from ucm.story.lines import Other
from ucm.story.lives import Life
from ucm.story.misses import (
    Explained,
    explain_end,
    explain_failure,
    explain_miss,
    explain_missed,
)
from ucm.story.told import happenings_of, summary_of
from ucm.story.totals import Totals

__all__ = [
    "NONE_LOGGED",
    "change_text",
    "life_dict",
    "number_text",
    "reasons_of",
    "say_life",
    "say_notes",
    "say_reasons",
    "say_totals",
]

NONE_LOGGED: Final = (
    "No look-up was logged: a host of its own logs none, and an engine when a request ends. "
    "'ucm trace stats' counts saves and loads."
)
_WIDE = 110


def say_life(life: Life, others: list[Other]) -> None:
    """Print the story of a life."""
    out = console()
    marks = "".join(f", {mark}" for mark in life.marks)
    took = seconds_text(life.end_s - life.begin_s)
    head = f"Request {life.request_id}: {life.outcome}{marks}, {took}"
    out.print(clean(head))
    for sentence in summary_of(life):
        out.print(f"  {clean(sentence)}")
    rows = [
        (f"+{each.when_s - life.begin_s:.6f}", each.process, each.what, each.text)
        for each in happenings_of(life, others)
    ]
    out.print(table("", ("seconds", "who", "what", ""), rows))


def life_dict(life: Life, others: list[Other]) -> dict[str, object]:
    """Return the story of a life, for programs."""
    happened = happenings_of(life, others)
    return {
        "life": life.number,
        "outcome": life.outcome,
        "marks": life.marks,
        "began_s": life.begin_s,
        "ended_s": life.end_s,
        "summary": summary_of(life),
        "hit_tokens": life.hit_tokens,
        "happened": [
            {
                "after_s": round(each.when_s - life.begin_s, 6),
                "process": each.process,
                "what": each.what,
                "text": each.text,
            }
            for each in happened
        ],
    }


def reasons_of(life: Life, store: Path | None = None) -> Iterator[dict[str, Any]]:
    """
    Yield why a life's tokens were computed: its misses, and its failed load.

    Raises:
        UCMError: The slab at *store* cannot be read.
    """
    ended = life.ended
    for missed in life.missed:
        where = f"{missed.found_tokens} of {missed.wanted_tokens} tokens were found"
        if missed.block is not None:
            where += f"; the first missing block is number {missed.block}"
            where += f", its key {missed.key}" if missed.key else ""
        explained, detail = explain_missed(missed)
        now = "" if store is None else _now(store, missed.key)
        yield _reason("miss", missed.reason, explained, where, detail) | {"now": now}
    if ended is None:
        return
    if ended.miss and not life.missed:
        has_place = ended.first_missing is not None
        where = f"the first missing block is number {ended.first_missing}"
        place = where if has_place else ""
        yield _reason("miss", ended.miss, explain_miss(ended.miss), place, "")
    if reason := ended.load_failure:
        errors = "; ".join(sorted({each.error for each in life.tickets if each.error}))
        yield _reason("failed load", reason, explain_failure(reason), "", errors)


def _now(store: Path, key: str) -> str:
    """Return what a slab knows of a block; nothing of a key that is none."""
    try:
        packed = PackedKey(bytes.fromhex(key))
    except ValueError:
        return ""
    if not packed:
        return ""
    told = explain(store, packed).told
    ago = "" if told.age_s is None else f", for {seconds_text(told.age_s)}"
    return f"in the slab by now: {told.fate.value}{ago}"


def _reason(
    kind: str, reason: str, explained: Explained, where: str, detail: str
) -> dict[str, Any]:
    told = {"kind": kind, "reason": reason, "where": where, "detail": detail, "now": ""}
    return told | explained._asdict()


def say_reasons(totals: Totals, notes: list[str], *, as_json: bool) -> None:
    """Print how often each reason made an engine compute, or that none was logged."""
    rows = [
        (
            *("miss", reason, count, totals.missing_tokens[reason]),
            explain_miss(reason).meaning,
            " ".join(remedy for remedy, _ in totals.remedies[reason].items()),
        )
        for reason, count in totals.misses.items()
    ] + [
        ("failed load", reason, count, None, *explain_failure(reason))
        for reason, count in totals.failed_loads.items()
    ]
    keys = ("kind", "reason", "count", "missing_tokens", "meaning", "remedy")
    if as_json:
        told = [dict(zip(keys, row, strict=True)) for row in rows]
        none = [] if rows or totals.lives.items() else [NONE_LOGGED]
        say_json({"v": 1, "reasons": told, "notes": [*none, *notes]})
        return
    if not rows:
        is_told = bool(totals.lives.items())
        console().print(
            "No look-up fell short, and no load failed." if is_told else NONE_LOGGED
        )
        say_notes(notes)
        return
    shown = [(row[0], row[1], row[2], number_text(row[3]), row[4]) for row in rows]
    title = "Why tokens were computed"
    console().print(table(title, ("", "reason", "count", "tokens", "meaning"), shown))
    for kind, reason, count, *_, remedy in rows:
        ways = totals.remedies[reason].items() if kind == "miss" else [(remedy, count)]
        for way, times in ways:
            share = f", {times} of {count}" if times < count else ""
            console().print(f"{clean(reason)}{share}: {clean(way)}")
    say_notes(notes)


def say_totals(totals: Totals) -> None:
    """Print what all lines amount to."""
    out = console()
    loaded, prompt = totals.hit_ratio()
    local, _ = totals.hit_ratio("computed")
    if prompt:
        whose = ""
        if preempted := totals.lives["preempted"]:
            whose = f", without those of {preempted} preempted request(s)"
        out.print(
            f"Loaded: {loaded} of {prompt} prompt tokens ({loaded / prompt:.1%}){whose}."
        )
        out.print(f"In the engine's own cache: {local} of them ({local / prompt:.1%}).")
    rows = [("requests", word, count, "") for word, count in totals.lives.items()]
    for direction, tally in sorted(totals.tickets.items()):
        rows += [
            (f"{direction} tickets", word, count, "") for word, count in tally.items()
        ]
    for direction, tally in sorted(totals.nbytes.items()):
        rows += [
            (f"{direction} bytes", word, count, size_text(count))
            for word, count in tally.items()
        ]
    rows += [
        ("request blocks", word, count, "") for word, count in totals.blocks.items()
    ]
    out.print(table("Outcomes", ("", "", "count", ""), rows))
    if ends := list(totals.ends()):
        heads = ("", "outcome", "reason", "tickets", "blocks")
        out.print(table("Why saves and loads came to nothing", heads, ends))
        for reason in dict.fromkeys(end.reason for end in ends):
            if told := explain_end(reason):
                out.print(f"{clean(reason)}: {told.meaning} {told.remedy}")
    is_wide = out.width >= _WIDE
    took = [
        (
            name,
            each.count,
            *map(seconds_text, (each.mean_s, each.quantile(0.5), each.quantile(0.95))),
            seconds_text(each.greatest_s),
            *((_bars(each.histogram()),) if is_wide else ()),
        )
        for name, each in sorted(totals.durations.items())
    ]
    columns = ("", "count", "mean", "half in", "95 % in", "longest", "by doubling")
    shown = columns if is_wide else columns[:-1]
    out.print(table("How long it took", shown, took))


def _bars(histogram: list[tuple[float, int]]) -> str:
    """Return a histogram of durations as a row of bars, from its least upper bound."""
    if not histogram:
        return ""
    most = max(count for _, count in histogram)
    bars = "".join("▁▂▃▄▅▆▇█"[(8 * count - 1) // most] for _, count in histogram)
    return f"{bars} from {seconds_text(histogram[0][0])}"


def number_text(value: float | None) -> str:
    """Return a number as short as it can be; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def change_text(old: float | None, new: float | None) -> str:
    """Return by which share a number has changed."""
    if old is None or new is None or old == new:
        return ""
    return "new" if not old else f"{(new - old) / old:+.1%}"


def say_notes(notes: list[str]) -> None:
    """Say on standard error what was passed over or left out."""
    for note in notes:
        console(stderr=True).print(clean(note))
