# SPDX-License-Identifier: Apache-2.0
"""
The real engine, without a connector and with several.

Time to the first token of prompts of which nothing, half or all but a short question
was seen before, and throughput where nothing is ever seen twice. Each side is an engine in
processes of its own, with a store of its own that is empty at first; sides take turns,
forwards and backwards, several rounds long. The model has 116 million random weights.
Prompts of which nothing was seen are the first behind a start, while a slab's memory comes.

*Own cache* is the engine without a connector, whose hits are in its own memory; the
others' cache is emptied before each prompt. LMCache takes part if it is installed; it
brings a server, which runs beside the engine. Run ``python -m benchmarks.engine``.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping

from benchmarks import engine_side
from benchmarks.harness import Figure, Note, Scale, Told, main
from benchmarks.sides import (
    EXAMPLE,
    LMCACHE,
    PLAIN,
    ServedSide,
    Side,
    absent,
    example,
    has_server,
    ours,
    plain,
)
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function

OURS = "ucm, slab in DRAM"
ROWWISE = "ucm layer-wise, slab in DRAM"
TIMEOUT_S = 600.0
CHUNK_TOKENS = 4096
"""Of one step, by the engine's own choice on CPUs."""

_Means = dict[str, list[dict[str, float]]]
"""Side to one record per round: what was measured to its mean in seconds."""


def sides(scale: Scale) -> dict[str, Side]:
    """Return the sides that can take part here."""
    there = {
        PLAIN: Side(MEMORY, plain),
        OURS: Side(MEMORY, ours()),
        ROWWISE: Side(MEMORY, ours(use_layerwise=True)),
        EXAMPLE: Side(MEMORY, example),
    }
    if has_server():
        there[LMCACHE] = ServedSide()
    return there


def in_turn(
    scale: Scale,
    rounds: int,
    function: Callable[..., dict[str, list[float]]],
    *,
    without: str = "",
    **arguments: object,
) -> _Means:
    """Run the sides in turn, forwards and backwards; return means by round."""
    rounds = scale.rounds or rounds
    there = sides(scale)
    there.pop(without, None)
    means: _Means = {name: [] for name in there}
    for _ in range(rounds):
        taken: dict[str, list[dict[str, list[float]]]] = {name: [] for name in there}
        for name in there if scale.is_quick else (*there, *reversed(there)):
            with there[name].ready() as config:
                taken[name].append(
                    run_function(
                        function,
                        timeout=TIMEOUT_S,
                        kv_transfer_config=config,
                        **arguments,
                    )
                )
        for name, runs in taken.items():
            medians = [
                {what: statistics.median(run[what]) for what in run} for run in runs
            ]
            means[name].append(
                {
                    what: statistics.mean(run[what] for run in medians)
                    for what in runs[0]
                }
            )
    return means


def against(
    means: _Means, what: str, case: str, bounds: Mapping[tuple[str, str], str]
) -> Iterator[Figure]:
    """Return how much longer one side takes than another, for pairs and bounds."""
    for (one, other), bound in bounds.items():
        if one in means and other in means:
            pairs = zip(means[one], means[other], strict=True)
            values = [a[what] / b[what] for a, b in pairs]
            text = (
                f"{one} / {'own cache' if other == PLAIN and what != '0 %' else other}"
            )
            yield Figure.over(case, text, "ratio", values, bound)


def measure_ttft(tokens: int, rounds: int, scale: Scale) -> Told:
    """Measure the time to the first token."""
    recipe = "llama-demo"
    if scale.is_quick:
        recipe, tokens, rounds = "llama", tokens // 8, 1
    in_chunks = tokens > CHUNK_TOKENS
    means = in_turn(
        scale,
        rounds,
        engine_side.ttft,
        without=EXAMPLE if in_chunks else "",
        recipe=recipe,
        tokens=tokens,
        repeats=1 if scale.is_quick else 2,
    )
    bounds = {
        "0 %": {
            (OURS, PLAIN): "<= 1.02",
            (ROWWISE, PLAIN): "",
            (EXAMPLE, PLAIN): "",
        },
        "50 %": {
            (OURS, PLAIN): "",
            (ROWWISE, PLAIN): "",
            (OURS, EXAMPLE): "",
        },
        "100 %": {
            (OURS, PLAIN): "<= 1.3",
            (ROWWISE, PLAIN): "",
            (OURS, EXAMPLE): "<= 1",
            (OURS, LMCACHE): "<= 1",
            (EXAMPLE, PLAIN): "",
        },
    }
    for share, pairs in bounds.items():
        case = f"TTFT, {tokens} tokens, {share} reuse"
        yield from against(means, share, case, pairs)
        for name, rounds_of in means.items():
            values = [1e3 * each[share] for each in rounds_of]
            yield Figure.over(case, name, "ms", values)
    case = f"TTFT, {tokens} tokens"
    if in_chunks:
        text = "absent, the engine dies of its loads of prompts computed in chunks."
        yield Note(case, f"{EXAMPLE}: {text}")
    else:
        text = "finds whole prompts only: it computes all at 50 %."
        yield Note(case, f"{EXAMPLE} {text}")
    yield from absent(case)


def measure_throughput(scale: Scale) -> Told:
    """Measure throughput where no prefix is ever seen twice."""
    quick = scale.is_quick
    requests, tokens = (4, 256) if quick else (16, 256)
    means = in_turn(
        scale,
        1 if quick else 3,
        engine_side.throughput,
        recipe="llama" if quick else "llama-demo",
        requests=requests,
        tokens=tokens,
        repeats=1 if quick else 3,
    )
    case = "throughput, no reuse at all"
    plain = [each["batch"] for each in means[PLAIN]]
    for name, rounds_of in means.items():
        taken = [each["batch"] for each in rounds_of]
        if name != PLAIN:
            values = [theirs / mine for mine, theirs in zip(taken, plain, strict=True)]
            target = ">= 0.98" if name == OURS else ""
            yield Figure.over(case, f"{name} / {PLAIN}", "ratio", values, target)
        rates = [requests * (tokens + tokens // 8) / spent for spent in taken]
        yield Figure.over(case, name, "tok/s", rates)
    yield from absent(case)


CASES: dict[str, Callable[[Scale], Told]] = {
    "throughput": measure_throughput,
    "ttft 4k": lambda scale: measure_ttft(4096, 3, scale),
    "ttft 8k": lambda scale: measure_ttft(8192, 2, scale),
}


if __name__ == "__main__":
    main("engine", CASES)
