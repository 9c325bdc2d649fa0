# SPDX-License-Identifier: Apache-2.0
"""
Requests per second where nothing is ever found, without a connector and with ours.

Prompts of 32 to 256 tokens and answers of 8 to 96, so that prompts and decoding share
most steps. The model is tiny: its steps are about as short as an accelerator's, which
leaves no room to hide in. ``mixed`` gives an engine in processes of its own 64 at once;
``served`` is ``vllm serve`` with 32 clients, each of which asks again when it is answered: servers
of all sides are up, and asked in turn. Two have no connector, and show how far equal ones
differ; one has a connector that does nothing, whose steps cost the engine what any does.
The sides take turns, forwards and backwards. Run ``python -m benchmarks.load``.
"""

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.engine_side import all_cpus
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.sides import EMPTY, PLAIN, Side, empty, ours, plain
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import EXTERNAL_HITS, counter, in_process_engine, run_function
from tests.e2e.models import LLAMA, make_model
from tests.e2e.server import Server, serve

OURS = "ucm"
SIDES = {PLAIN: Side(MEMORY, plain), OURS: Side(MEMORY, ours("1GiB"))}
_AGAIN, _EMPTY = f"{PLAIN}, again", Side(MEMORY, empty)
BLOCK_TOKENS = 32
AT_ONCE, CLIENTS = 64, 32

_Config = Mapping[str, object] | None
_Request = tuple[list[int], int]
"""A prompt, and how many tokens it is given."""


def _requests(count: int, seed: int) -> list[_Request]:
    """Return requests of which no two share a prefix."""
    drawn = random.Random(seed)
    return [
        (
            [drawn.randrange(5, 500) for _ in range(drawn.randrange(32, 257))],
            drawn.randrange(8, 97),
        )
        for _ in range(count)
    ]


def mixed(kv_transfer_config: _Config, requests: int, repeats: int) -> list[float]:
    """Return the requests per second of some batches; runs in the engine's process."""
    from vllm import SamplingParams

    rates = []
    with in_process_engine(
        make_model(LLAMA),
        kv_transfer_config=kv_transfer_config,
        kv_cache_memory_bytes=256 << 20,
        block_size=BLOCK_TOKENS,
        max_num_seqs=AT_ONCE,
        multiprocess=True,
    ) as llm:
        for batch in range(repeats + 1):
            prompts, answers = zip(*_requests(requests, batch), strict=True)
            sampling = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
                for tokens in answers
            ]
            begun = time.perf_counter()
            llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                sampling,
                use_tqdm=False,
            )
            rates.append(requests / (time.perf_counter() - begun))
        if counter(llm, EXTERNAL_HITS):
            raise AssertionError("prompts share a prefix")
    return rates[1:]  # the first has warmed the kernels up


def _mixed(config: _Config, scale: Scale) -> list[float]:
    requests, repeats = (96, 1) if scale.is_quick else (256, 2)
    rates: list[float] = run_function(
        mixed,
        env=all_cpus(),
        kv_transfer_config=config,
        requests=requests,
        repeats=repeats,
    )
    return rates


def _served(scale: Scale) -> Told:
    """Measure servers that are all up, each asked by its clients while the others stand idle."""
    requests = 64 if scale.is_quick else 192
    rounds = 1 if scale.is_quick else 2 * (scale.rounds or 4)
    sides = {
        PLAIN: SIDES[PLAIN],
        _AGAIN: SIDES[PLAIN],
        EMPTY: _EMPTY,
        OURS: SIDES[OURS],
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(_server(side)) for name, side in sides.items()
        }
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        for batch in range(1 + rounds):
            order = list(sides) if batch % 2 else list(reversed(sides))
            for name in order:
                asked = _requests(requests, batch)
                begun = time.perf_counter()
                list(clients.map(servers[name].complete, *zip(*asked, strict=True)))
                rates[name].append(requests / (time.perf_counter() - begun))
        for name, server in servers.items():
            if server.counter(EXTERNAL_HITS):
                raise AssertionError(f"{name}: prompts share a prefix")
    case = f"served, {CLIENTS} clients"
    taken = {name: each[1:] for name, each in rates.items()}  # the first warms up
    for mine, other, target in (
        (OURS, PLAIN, ">= 0.98"),
        (OURS, EMPTY, ""),
        (EMPTY, PLAIN, ""),
        (_AGAIN, PLAIN, ""),
    ):
        ratios = [a / b for a, b in zip(taken[mine], taken[other], strict=True)]
        yield Figure.over(case, f"{mine} / {other}", "ratio", ratios, target)
    for name, each in taken.items():
        yield Figure.over(case, name, "req/s", each)


@contextlib.contextmanager
def _server(side: Side) -> Iterator[Server]:
    """Run ``vllm serve``."""
    with (
        tempfile.TemporaryDirectory(prefix="ucm-load-") as home,
        side.ready() as config,
        serve(
            make_model(LLAMA),
            *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", str(CLIENTS)),
            log=Path(home) / "log",
            kv_transfer_config=config,
            env=all_cpus(),
        ) as server,
    ):
        yield server


def _measure_mixed(scale: Scale) -> Told:
    """Measure both sides in turn."""
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    order = list(SIDES) if scale.is_quick else [*SIDES, *reversed(SIDES)]
    for name in order * (scale.rounds or 1):
        with SIDES[name].ready() as config:
            rates[name] += _mixed(config, scale)
    values = [
        mine / other for mine, other in zip(rates[OURS], rates[PLAIN], strict=True)
    ]
    yield Figure.over("mixed", f"{OURS} / {PLAIN}", "ratio", values, ">= 0.98")
    for name, taken in rates.items():
        yield Figure.over("mixed", name, "req/s", taken)


CASES: dict[str, Callable[[Scale], Told]] = {
    "mixed": _measure_mixed,
    "served": _served,
}


if __name__ == "__main__":
    main("load", CASES)
