# SPDX-License-Identifier: Apache-2.0
"""Traces of requests for ``benchmarks.replay``: made up, and written as they are read."""

import heapq
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import attrs

from ucm.replay.traces import Request, Trace, TraceError, apart

__all__ = ["WORKLOADS", "generate", "write"]

_NS_PER_MS = 1_000_000


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
            for moment, prompt in zip(apart(stamps), prompts, strict=True)
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
