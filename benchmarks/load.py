# SPDX-License-Identifier: Apache-2.0
"""
Requests per second where nothing is ever found, without a connector and with ours.

Prompts of 32 to 256 tokens and answers of 8 to 96, so that prompts and decoding share
most steps. The model is tiny: its steps are about as short as an accelerator's, which
leaves no room to hide in. ``mixed`` gives an engine in processes of its own 64 at once;
``served`` is ``vllm serve`` with 32 clients, each of which asks again when it is answered.
The sides take turns, forwards and backwards. Run ``python -m benchmarks.load``.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.engine_side import all_cpus
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.sides import PLAIN, Side, ours, plain
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import EXTERNAL_HITS, counter, in_process_engine, run_function
from tests.e2e.models import LLAMA, make_model
from tests.e2e.server import serve

OURS = "ucm"
SIDES = {PLAIN: Side(MEMORY, plain), OURS: Side(MEMORY, ours("1GiB"))}
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


def _served(config: _Config, scale: Scale) -> list[float]:
    """Return the requests per second of a server and its clients."""
    requests, repeats = (64, 1) if scale.is_quick else (256, 2)
    rates = []
    with (
        tempfile.TemporaryDirectory(prefix="ucm-load-") as home,
        serve(
            make_model(LLAMA),
            *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", str(CLIENTS)),
            log=Path(home) / "log",
            kv_transfer_config=config,
            env=all_cpus(),
        ) as server,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        for batch in range(repeats + 1):
            asked = _requests(requests, batch)
            begun = time.perf_counter()
            list(clients.map(server.complete, *zip(*asked, strict=True)))
            rates.append(requests / (time.perf_counter() - begun))
        if server.counter(EXTERNAL_HITS):
            raise AssertionError("prompts share a prefix")
    return rates[1:]


def measure(
    case: str, run: Callable[[_Config, Scale], list[float]], scale: Scale
) -> Told:
    """Measure both sides in turn."""
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    order = list(SIDES) if scale.is_quick else [*SIDES, *reversed(SIDES)]
    for name in order * (scale.rounds or 1):
        with SIDES[name].ready() as config:
            rates[name] += run(config, scale)
    values = [
        mine / other for mine, other in zip(rates[OURS], rates[PLAIN], strict=True)
    ]
    yield Figure.over(case, f"{OURS} / {PLAIN}", "ratio", values, ">= 0.98")
    for name, taken in rates.items():
        yield Figure.over(case, name, "req/s", taken)


CASES: dict[str, Callable[[Scale], Told]] = {
    "mixed": lambda scale: measure("mixed", _mixed, scale),
    "served": lambda scale: measure("served, 32 clients", _served, scale),
}


if __name__ == "__main__":
    main("load", CASES)
