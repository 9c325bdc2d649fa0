# SPDX-License-Identifier: Apache-2.0
"""One life of a request as text, in the order of time and over all processes."""

from collections.abc import Iterable, Iterator, Mapping

import attrs

from ucm.settings import seconds_text, size_text
from ucm.story.lines import Ended, Other, Settled, details_of
from ucm.story.lives import Life
from ucm.story.misses import (
    explain_failure,
    explain_miss,
    explain_missed,
)

__all__ = [
    "Happening",
    "happenings_of",
    "summary_of",
]

_MOST_DETAIL = 1000
_MOST_PLACES = 16


@attrs.frozen
class Happening:
    """
    One thing that happened.

    Args:
        when_s: In Unix time.
        process: Role and process id of who told it.
        what: A few words, such as ``save 7 committed``.
        text: The rest.
    """

    when_s: float
    process: str
    what: str
    text: str


def summary_of(life: Life) -> list[str]:
    """Return what is to be said of a life before all else, as sentences."""
    ended, found = life.ended, _places_of(life.hit_tokens)
    told = [f"Found: {found}."] if found else []
    if ended is None:
        return ["No line tells of its end: it still runs, or its engine died.", *told]
    matched, loaded = ended.matched_tokens, ended.loaded_tokens
    told.insert(0, _shares_of(ended))
    if matched > loaded:
        told.append(f"{matched} tokens were found; not all of them were loaded.")
    if ended.saved_blocks or ended.dropped_blocks:
        told.append(
            f"{ended.saved_blocks} blocks were saved, {ended.dropped_blocks} dropped."
        )
    if ended.unsettled_blocks:
        told.append(f"{ended.unsettled_blocks} blocks were still on their way.")
    if ended.preemptions:
        told.append(f"The engine preempted it {ended.preemptions} time(s).")
    if ended.load_failure:
        meaning = explain_failure(ended.load_failure).meaning
        told.append(f"Its load failed ({ended.load_failure}): {meaning}")
    if ended.miss:
        has_place = ended.first_missing is not None
        place = f" at block {ended.first_missing}" if has_place else ""
        told.append(
            f"It missed{place} ({ended.miss}): {explain_miss(ended.miss).meaning}"
        )
    return told


def _shares_of(ended: Ended) -> str:
    """Return where the tokens came from; what was preempted loads its own again."""
    prompt, own = ended.prompt_tokens, ended.computed_tokens
    loaded = ended.loaded_tokens
    if ended.never_ran:
        return (
            f"{prompt} prompt tokens: none was computed, its client went away before."
        )
    if ended.preemptions:
        return (
            f"{prompt} prompt tokens: {own} in the engine's own cache at first; "
            f"{loaded} loaded over {ended.life} times in memory, its own among them."
        )
    computed = max(0, prompt - own - loaded)
    share = f"{own} in the engine's own cache, {loaded} loaded, {computed} computed"
    return f"{prompt} prompt tokens: {share}."


def _places_of(hit_tokens: Mapping[str, int]) -> str:
    """Return where tokens were found, the most first: the slab, and tiers by their names."""
    most = sorted(hit_tokens.items(), key=lambda item: -item[1])[:_MOST_PLACES]
    return ", ".join(f"{count} tokens in {name}" for name, count in most if count)


def happenings_of(life: Life, others: Iterable[Other] = ()) -> list[Happening]:
    """Return what happened in a life, and the lines of other kinds that name it."""
    found = [*_from_scheduler(life)]
    for ticket in life.tickets:
        found.extend(_from_ticket(ticket))
    for other in others:
        told = details_of(other).items()
        text = ", ".join(f"{key} {value}" for key, value in told)
        found.append(
            Happening(other.when_s, other.process, other.event, text[:_MOST_DETAIL])
        )
    return sorted(found, key=lambda each: each.when_s)


def _from_scheduler(life: Life) -> Iterator[Happening]:
    ended = life.ended
    if ended is not None and ended.began_s is not None:
        yield Happening(ended.began_s, ended.process, "began", "first look-up")
    for missed in life.missed:
        place = "" if missed.block is None else f", at block {missed.block}"
        if missed.group is not None:
            place += f" of group {missed.group}"
        explained, detail = explain_missed(missed)
        text = (
            f"{missed.found_tokens} of {missed.wanted_tokens} tokens were found{place}; "
            f"{missed.reason}: {explained.meaning} {detail}"
        )
        yield Happening(missed.timestamp_s, missed.process, "missed", text.rstrip())
    for matched in life.matched:
        text = (
            f"{matched.external_tokens} tokens are to be loaded, "
            f"{matched.computed_tokens} were in the engine's own cache"
        )
        if found := _places_of(matched.hit_tokens):
            text += f"; found: {found}"
        yield Happening(matched.timestamp_s, matched.process, "matched", text)
    if ended is not None:
        yield Happening(ended.timestamp_s, ended.process, *_end_of(ended))


def _end_of(ended: Ended) -> tuple[str, str]:
    took = ""
    if ended.began_s is not None:
        took = f"nothing open after {seconds_text(ended.timestamp_s - ended.began_s)}"
    if ended.load_s:
        took += f"; it waited {seconds_text(ended.load_s)} for its load"
    return ended.outcome, took


def _from_ticket(ticket: Settled) -> Iterator[Happening]:
    name = ticket.direction if ticket.number is None else ""
    name = name or f"{ticket.direction} {ticket.number}"
    text = f"{ticket.blocks} blocks, {size_text(ticket.nbytes)}"
    if ticket.num_requests > 1:
        text += f", shared by {ticket.num_requests} requests"
    yield Happening(ticket.when_s, ticket.process, f"{name} asked for", text)
    for stage, begin, end in ticket.edges:
        yield Happening(
            ticket.when_s + begin,
            ticket.process,
            f"{name} {stage}",
            f"took {seconds_text(end - begin)}",
        )
    if ticket.released_s is not None:
        text = f"after {seconds_text(ticket.released_s)}; the engine may reuse them"
        when_s = ticket.when_s + ticket.released_s
        yield Happening(when_s, ticket.process, f"{name} released its blocks", text)
    parts = [f"after {seconds_text(ticket.end_s - ticket.when_s)}"]
    if ticket.committed not in (0, ticket.blocks):
        parts.append(f"{ticket.committed} of {ticket.blocks} blocks")
    if ticket.skipped:
        parts.append(f"{ticket.skipped} blocks were stored already")
    parts += filter(None, (ticket.reason, ticket.error))
    what = f"{name} {ticket.outcome}"
    yield Happening(ticket.end_s, ticket.process, what, ", ".join(parts))
