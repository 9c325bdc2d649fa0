# SPDX-License-Identifier: Apache-2.0
"""
Traces of requests for ``benchmarks.replay``: read, checked, made up and written.

A trace has one JSON object a line: ``timestamp`` in milliseconds, ``input_length`` in
tokens and ``hash_ids``, one number for each block of the prompt. Equal numbers are equal
blocks behind equal blocks, so that a number has one predecessor wherever it stands.
"""

import heapq
import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

__all__ = ["WORKLOADS", "Request", "Trace", "TraceError", "generate", "read", "write"]

_NS_PER_MS = 1_000_000
_MAX_MS = 10**12
_MAX_LINE = 1 << 24
_FIRST = object()


class TraceError(Exception):
    """A file is no trace; says where and why."""


@attrs.frozen
class Request:
    """
    A prompt that arrives.

    Args:
        moment: Virtual nanoseconds since the start of the trace.
        num_tokens: Of the prompt.
        blocks: Hash ids of its blocks; the last may be partly filled.
    """

    moment: int
    num_tokens: int
    blocks: tuple[int, ...]


@attrs.frozen
class Trace:
    """
    Requests in order of arrival, no two at one moment.

    Args:
        name: For titles.
        block_tokens: Of a whole block.
        requests: All of them.
    """

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    def distinct_blocks(self) -> int:
        """Return how many blocks a store for all of them has."""
        return len({block for each in self.requests for block in each.blocks})

    def used_once(self) -> float:
        """Return the share of the distinct blocks that only one request has."""
        uses: dict[int, int] = {}
        for request in self.requests:
            for block in request.blocks:
                uses[block] = uses.get(block, 0) + 1
        return sum(count == 1 for count in uses.values()) / max(1, len(uses))

    def seconds(self) -> float:
        """Return the time between the first arrival and the last."""
        return (self.requests[-1].moment - self.requests[0].moment) / 1e9


# -- files -------------------------------------------------------------------------


def read(path: Path, block_tokens: int) -> Trace:
    """
    Read a trace.

    Raises:
        TraceError: It cannot be read, or is none; names the line.
    """
    stamps: list[float] = []
    prompts: list[tuple[int, tuple[int, ...]]] = []
    before: dict[int, object] = {}
    for number, line in enumerate(_lines(path), start=1):
        try:
            stamp, num_tokens, blocks = _parse(line, block_tokens)
            _check_prefix(blocks, before)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        if stamps and stamp < stamps[-1]:
            raise TraceError(f"{path}, line {number}: arrives before the line above")
        stamps.append(stamp)
        prompts.append((num_tokens, blocks))
    if not any(blocks for _, blocks in prompts):
        raise TraceError(f"{path}: no request with a block")
    moments = _apart(stamps)
    return Trace(
        path.name.removesuffix(".jsonl"),
        block_tokens,
        tuple(
            Request(moment, *prompt)
            for moment, prompt in zip(moments, prompts, strict=True)
        ),
    )


def write(path: Path, trace: Trace) -> None:
    """Write a trace as ``read`` takes it; moments are cut to milliseconds."""
    with path.open("w", encoding="utf-8") as file:
        for request in trace.requests:
            fields = {
                "timestamp": request.moment // _NS_PER_MS,
                "input_length": request.num_tokens,
                "hash_ids": request.blocks,
            }
            file.write(json.dumps(fields) + "\n")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path}: this is no text") from None


def _parse(line: str, block_tokens: int) -> tuple[float, int, tuple[int, ...]]:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError("no JSON object; was the file cut off?") from None
    except RecursionError:
        raise ValueError("no request") from None
    if not isinstance(fields, dict) or "hash_ids" not in fields:
        raise ValueError("no request: an object with 'hash_ids' is expected")
    stamp, ids = fields.get("timestamp"), fields["hash_ids"]
    if not _is_number(stamp) or not 0 <= stamp < _MAX_MS:
        raise ValueError("'timestamp' has to be milliseconds")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ValueError("'hash_ids' has to be a list of whole numbers")
    num_tokens = fields.get("input_length", len(ids) * block_tokens)
    if type(num_tokens) is not int:
        raise ValueError("'input_length' has to be a number of tokens")
    # The last block may be partly filled, or left out if it is.
    if not (len(ids) - 1) * block_tokens < num_tokens < (len(ids) + 1) * block_tokens:
        raise ValueError(
            f"{num_tokens} tokens are not {len(ids)} blocks of {block_tokens} tokens"
        )
    return stamp, num_tokens, tuple(ids)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_prefix(blocks: Sequence[int], before: dict[int, object]) -> None:
    """Make sure that each block always stands behind the same one."""
    previous: object = _FIRST
    for block in blocks:
        if before.setdefault(block, previous) != previous:
            raise ValueError(f"block {block} stands behind two others; no prefix hash")
        previous = block


def _apart(stamps: Sequence[float]) -> list[int]:
    """Spread those of one millisecond over the time until the next."""
    moments: list[int] = []
    first = 0
    while first < len(stamps):
        stop = first
        while stop < len(stamps) and stamps[stop] == stamps[first]:
            stop += 1
        start = int(stamps[first] * _NS_PER_MS)
        end = stamps[stop] if stop < len(stamps) else stamps[first] + 1000
        step = max(1, (int(end * _NS_PER_MS) - start) // (stop - first))
        moments += [start + at * step for at in range(stop - first)]
        first = stop
    if any(later <= earlier for earlier, later in pairwise(moments)):
        raise TraceError("more requests in a millisecond than nanoseconds")
    return moments


# -- made up -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Workload:
    """
    Sessions of one kind.

    Args:
        share: Of all sessions.
        heads: How many shared beginnings there are; the n-th is taken as often as 1/n.
        head_blocks: Median length of one.
        first_blocks: Median length of a session's own first input.
        turns: Mean number of requests of a session.
        turn_blocks: Median growth from one request to the next, output included.
        pause_s: Median time between them.
        max_turns: Never more requests than these.
    """

    share: float = 1.0
    heads: int
    head_blocks: float
    first_blocks: float
    turns: float
    turn_blocks: float = 0.0
    pause_s: float = 1.0
    max_turns: int = 1000


CHAT = Workload(
    heads=20, head_blocks=2, first_blocks=8, turns=3, turn_blocks=2, pause_s=110
)
AGENT = Workload(
    heads=5, head_blocks=10, first_blocks=4, turns=15, turn_blocks=2, pause_s=8
)
DOCUMENT = Workload(
    heads=400, head_blocks=50, first_blocks=1, turns=1.5, turn_blocks=1, pause_s=60
)
ONCE = Workload(heads=3, head_blocks=1, first_blocks=25, turns=1)
PAIR = Workload(
    heads=1, head_blocks=1, first_blocks=15, turns=math.inf, pause_s=20, max_turns=2
)
"""Each prompt comes exactly twice: the worst for whoever waits for a second use."""

WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "chat": (CHAT,),
    "agent": (AGENT,),
    "document": (DOCUMENT,),
    "pair": (PAIR,),
    "mixed": (
        attrs.evolve(CHAT, share=0.5),
        attrs.evolve(AGENT, share=0.1),
        attrs.evolve(DOCUMENT, share=0.2),
        attrs.evolve(ONCE, share=0.2),
    ),
}


@attrs.define
class _Session:
    workload: Workload
    head: list[tuple[object, ...]]
    num_tokens: int
    turns_left: int


def generate(
    name: str, *, minutes: float, rate: float, seed: int, block_tokens: int = 512
) -> Trace:
    """
    Make up a trace; equal arguments give an equal one.

    Args:
        name: Of ``WORKLOADS``.
        minutes: How long sessions arrive; what comes later is left out.
        rate: Sessions per second.
        seed: Of the random numbers.
        block_tokens: Of a whole block.

    Raises:
        TraceError: Nothing would arrive.
    """
    draw = random.Random(seed)
    kinds = WORKLOADS[name]
    waiting: list[tuple[float, int, _Session]] = []
    now, number, end = 0.0, 0, minutes * 60
    while (now := now + draw.expovariate(rate)) < end:
        kind = draw.choices(kinds, [each.share for each in kinds])[0]
        waiting.append((now, number, _begin(kind, draw, f"{seed}", block_tokens)))
        number += 1
    heapq.heapify(waiting)
    if not waiting:
        raise TraceError("no session begins in so short a time at that rate")
    ids: dict[tuple[object, ...], int] = {}
    stamps, prompts = [], []
    while waiting:
        now, number, session = heapq.heappop(waiting)
        stamps.append(now * 1000)
        blocks = _blocks(session, number, block_tokens)
        prompts.append(
            (
                session.num_tokens,
                tuple(ids.setdefault(each, len(ids)) for each in blocks),
            )
        )
        kind = session.workload
        session.turns_left -= 1
        session.num_tokens += round(_around(kind.turn_blocks, draw) * block_tokens)
        later = now + _around(kind.pause_s, draw)
        if session.turns_left > 0 and later < end and draw.random() > 1 / kind.turns:
            heapq.heappush(waiting, (later, number, session))
    return Trace(
        f"generated {name}",
        block_tokens,
        tuple(
            Request(moment, *prompt)
            for moment, prompt in zip(_apart(stamps), prompts, strict=True)
        ),
    )


def _around(median: float, draw: random.Random) -> float:
    return median * math.exp(draw.gauss(0.0, 0.8))


def _begin(
    kind: Workload, draw: random.Random, seed: str, block_tokens: int
) -> _Session:
    ranks = range(kind.heads)
    head = draw.choices(ranks, [1 / (rank + 1) for rank in ranks])[0]
    name = f"{seed} {kind.head_blocks} {head}"
    # Of random numbers of its own: a head is equally long each time.
    length = max(1, round(_around(kind.head_blocks, random.Random(name))))
    first = max(1, round(_around(kind.first_blocks, draw) * block_tokens))
    return _Session(
        kind,
        [(name, at) for at in range(length)],
        length * block_tokens + first,
        kind.max_turns,
    )


def _blocks(
    session: _Session, number: int, block_tokens: int
) -> Iterator[tuple[object, ...]]:
    """Yield what tells the blocks of the next prompt apart."""
    yield from session.head
    whole, rest = divmod(session.num_tokens, block_tokens)
    for at in range(len(session.head), whole):
        yield ("own", number, at)
    if rest:  # a longer prompt of this session has another block there
        yield ("part", number, session.num_tokens)
