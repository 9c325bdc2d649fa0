# SPDX-License-Identifier: Apache-2.0
"""The real engine over tiers: time to the first token, and a tier that is dead."""

import functools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import decode_side, tiers_bare
from benchmarks.engine_side import BLOCK_TOKENS, QUESTION, SAVED, all_cpus
from benchmarks.harness import Figure, Scale, Told
from benchmarks.sides import PLAIN, Side, ours, plain
from benchmarks.stores import MEMORY
from benchmarks.tiers_moves import Blocks, Medium
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.backends.servers import redis_server
from tests.e2e.engine import (
    await_counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
    run_function,
)
from tests.e2e.models import LLAMA, LLAMA_DEMO, make_model
from ucm.agent.protocol import (
    FRAME_HEADER,
    SOCKET_NAME,
    FromAgent,
    GetStatus,
    Status,
    decode_frame,
    encode_frame,
)
from ucm.stores.slab import SlabStore, SlabSurvey

__all__ = ["agent_status", "dead", "first_tokens"]

TIMEOUT_S = 600.0
COMPUTED, SLAB, TIER = "computed", "slab", "tier"
_HUNG = "ucm, a tier that hangs"
_OURS = "ucm"
_RECIPES = {recipe.name: recipe for recipe in (LLAMA, LLAMA_DEMO)}
_Config = dict[str, Any]


# -- in the engine's process ---------------------------------------------------------


class _Asker:
    """
    Asks one engine over a slab with one tier.

    Args:
        llm: The engine.
        slab: Directory.
    """

    def __init__(self, llm: Any, slab: Path) -> None:  # noqa: ANN401
        self._llm = llm
        self._slab = slab
        self._num_saved = 0

    def ask(self, seed: int, tokens: int, hit: int) -> float:
        """Return the time to the first token of a prompt; it must hit so many tokens."""
        reset_prefix_cache(self._llm)
        prompt = [(seed * 7919 + at * 104_729) % 491 + 5 for at in range(tokens)]
        told = generate(self._llm, [[*prompt, *range(5, 5 + QUESTION)]], 1)
        if told.external_tokens != hit:
            raise AssertionError(f"{told.external_tokens} tokens were hits, not {hit}")
        if not hit:
            self._num_saved += tokens // BLOCK_TOKENS
            await_counter(self._llm, SAVED, self._num_saved)
            self._await_spilled()
        return told.elapsed_s

    def empty(self) -> None:
        """Empty the slab."""
        with SlabSurvey(self._slab) as survey:
            sizes = [each.geometry.slot_bytes for each in survey.classes]
        for size in sizes:
            with SlabStore.join(self._slab, block_bytes=size, index_only=True) as store:
                store.clear(b"")

    def _await_spilled(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for told in agent_status(self._slab)["slots"].values():
                (tier,) = told["spilled"]
                over = tier["spilled"] + tier["skipped"]
                if over >= self._num_saved and over == tier["offered"]:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(agent_status(self._slab))
            time.sleep(0.02)


def agent_status(slab: Path) -> Any:  # noqa: ANN401
    """Ask the agent of a slab how it is."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(TIMEOUT_S)
        until = time.monotonic() + TIMEOUT_S
        while True:  # an engine does not wait for its agent
            try:
                peer.connect(str(slab / SOCKET_NAME))
                break
            except (FileNotFoundError, ConnectionRefusedError):  # nobody listens yet
                if time.monotonic() > until:
                    raise
            time.sleep(0.02)
        peer.sendall(encode_frame(GetStatus()))
        data = b""
        while piece := peer.recv(1 << 16):
            data += piece
    decoder: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
    status = decode_frame(data[FRAME_HEADER.size :], decoder)
    assert isinstance(status, Status)
    return status.told


def ask_first_tokens(
    kv_transfer_config: _Config, recipe: str, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return times to the first token, by where the prompt is, in turn."""
    os.environ |= all_cpus()
    store = kv_transfer_config["kv_connector_extra_config"]["store"]
    told: dict[str, list[float]] = {COMPUTED: [], SLAB: [], TIER: []}
    with in_process_engine(
        make_model(_RECIPES[recipe]),
        kv_transfer_config=kv_transfer_config,
        kv_cache_memory_bytes=1 << 30,
        block_size=BLOCK_TOKENS,
        max_model_len=tokens + 2 * BLOCK_TOKENS,
        multiprocess=True,
    ) as llm:
        asker = _Asker(llm, Path(store["path"]))
        for seed in (1, 2):  # warms the kernels up
            asker.ask(seed, tokens, 0)
        for at in range(2 * repeats):
            for where in list(told)[:: 1 if at % 2 else -1]:
                if where == TIER:
                    asker.empty()
                hit = 0 if where == COMPUTED else tokens
                seed = 100 + at if where == COMPUTED else 1
                told[where].append(asker.ask(seed, tokens, hit))
    return told


# -- here ----------------------------------------------------------------------------


def first_tokens(
    name: str,
    opener: Callable[[Path, Blocks], AbstractContextManager[Medium]],
    scale: Scale,
) -> Told:
    """Measure the time to the first token of a prompt that is in one kind of tier."""
    recipe, tokens = ("llama", 512) if scale.is_quick else ("llama-demo", 4096)
    case = f"{name}, TTFT, {tokens} tokens"
    with (
        tempfile.TemporaryDirectory(prefix=f"ucm-{name}-", dir=scale.directory) as home,
        tempfile.TemporaryDirectory(prefix="ucm-tiers-", dir=MEMORY) as slab,
        opener(Path(home), Blocks(64, 4 << 20)) as medium,
    ):
        config = ours(
            "3GiB",
            tiers=[medium.settings | _sized(medium)],
            timeout={"fetch": 60.0, "tier": 60.0},
            predict_loads=False,
        )(Path(slab))
        told = run_function(
            ask_first_tokens,
            timeout=TIMEOUT_S,
            kv_transfer_config=config,
            recipe=recipe,
            tokens=tokens,
            repeats=1 if scale.is_quick else 3,
        )
    for where, values in told.items():
        yield Figure.over(case, where, "ms", [1e3 * each for each in values])
    for where in (SLAB, TIER):
        pairs = zip(told[where], told[COMPUTED], strict=True)
        shares = [one / other for one, other in pairs]
        yield Figure.over(case, f"{where} / {COMPUTED}", "ratio", shares)


def _sized(medium: Medium) -> dict[str, object]:
    return {"capacity": "4GiB"} if medium.name == "disk" else {}


def dead(scale: Scale) -> Told:
    """Measure steps of an engine whose only tier takes connections and says nothing."""
    requests, total = 32, 64 if scale.is_quick else 384
    runs: dict[str, list[Any]] = {PLAIN: [], _OURS: [], _HUNG: []}
    with (
        tempfile.TemporaryDirectory(prefix="ucm-dead-", dir=scale.directory) as home,
        redis_server(Path(home)) as (server, port),
    ):
        server.stop()
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{port}/0"}
        sides = {
            PLAIN: Side(MEMORY, plain),
            _OURS: Side(MEMORY, ours("1GiB")),
            _HUNG: Side(MEMORY, ours("1GiB", tiers=[tier])),
        }
        order = list(sides) if scale.is_quick else [*sides, *reversed(sides)]
        for name in order * (scale.rounds or 1):
            with sides[name].ready() as config:
                runs[name].append(
                    run_function(
                        decode_side.decode,
                        timeout=TIMEOUT_S,
                        kv_transfer_config=config,
                        model="64 KB blocks",
                        requests=requests,
                        total=total,
                        waits="",
                    )
                )
    case = f"dead tier, {requests} decoding"
    if len({run["digest"] for side in runs.values() for run in side}) != 1:
        raise AssertionError("the sides gave different tokens")
    for name, side in runs.items():
        yield from _steps(case, name, side)
    for name in (_OURS, _HUNG):
        yield from _against(case, name, PLAIN, runs)
    yield from _against(case, _HUNG, _OURS, runs)
    parts = [
        [_own_share(run, other) for run, other in zip(side, runs[PLAIN], strict=True)]
        for side in (runs[_HUNG], runs[_OURS])
    ]
    added = [hung - alive for hung, alive in zip(*parts, strict=True)]
    what = "what a tier that hangs adds to our share of a step"
    yield Figure.over(case, what, "ratio", added, "<= 0.05")


def _steps(case: str, name: str, side: list[Mapping[str, Any]]) -> Iterator[Figure]:
    for part in ("step", "scheduler's hooks", "worker's hooks"):
        values = [1e3 * _median(run, part) for run in side]
        if any(values):
            yield Figure.over(case, f"{name}, {part}", "ms", values)
    if name != PLAIN:
        values = [1e3 * run["new"]["cpu"] / run["new"]["num_steps"] for run in side]
        yield Figure.over(case, f"{name}, CPU of our threads per step", "ms", values)


def _against(
    case: str, one: str, other: str, runs: Mapping[str, list[Any]]
) -> Iterator[Figure]:
    values = [
        _median(mine, "step") / _median(theirs, "step")
        for mine, theirs in zip(runs[one], runs[other], strict=True)
    ]
    yield Figure.over(case, f"{one} / {other}, step", "ratio", values)


def _own_share(run: Mapping[str, Any], plain_run: Mapping[str, Any]) -> float:
    """Return what hooks take and our threads compute in a step, as a share of one without us."""
    hooks = _median(run, "scheduler's hooks") + _median(run, "worker's hooks")
    cpu = run["new"]["cpu"] / run["new"]["num_steps"]
    return float((hooks + cpu) / _median(plain_run, "step"))


def _median(run: Mapping[str, Any], part: str) -> float:
    return statistics.median(run["new"]["steps"].get(part, [0.0]))


TTFT: dict[str, Callable[[Scale], Told]] = {
    f"ttft {name}": functools.partial(first_tokens, name, opener)
    for name, opener in (
        ("disk", tiers_bare.disk),
        ("files", tiers_bare.files),
        ("object", tiers_bare.objects),
        ("redis", tiers_bare.redis),
    )
}
