# SPDX-License-Identifier: Apache-2.0
"""Below the slab, on the real engine: blocks come back from a tier, exact or not at all."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import LOADED, halves, prompt, ucm_config
from tests.e2e.engine import ROOT, generate, in_process_engine, reset_prefix_cache
from tests.e2e.test_store_trouble import labelled
from tests.kit.agents import end_agent
from tests.kit.file_tier import registration
from ucm.integration.vllm.tiers import Tiers
from ucm.scheduler.prompts import PromptSpeed

WANTS = "vllm:ucm_fetch_wants"
HITS = "vllm:ucm_hit_tokens"
MISSED = "vllm:ucm_missed_lookups"
TOKENS = 8
PROMPTS = [prompt(7000 + n, 300) for n in range(4)]
"""Two whole blocks of 128 tokens each."""
HIT = 256
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """Return what the engine without a connector says to each prompt."""
    with in_process_engine(llama) as llm:
        return generate(llm, PROMPTS, TOKENS).token_ids


class Machine:
    """An engine over a slab of its own."""

    def __init__(
        self, llm: Any, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        self.llm = llm
        self._prompts = prompts
        self._expected = expected

    @property
    def tiers(self) -> Tiers:
        """What asks the agent."""
        return halves(self.llm)[0]._scheduler._tiers

    def until(self, is_so: Callable[[], bool]) -> None:
        """Let the engine run small steps until something is so."""
        until = time.monotonic() + LIMIT_S
        while not is_so():
            assert until > time.monotonic()
            generate(self.llm, [[3]], 1)

    def ask(self, *numbers: int) -> int:
        """Ask prompts anew, hold the answers against the right ones; return tokens loaded."""
        reset_prefix_cache(self.llm)
        said = generate(self.llm, [self._prompts[n] for n in numbers], TOKENS)
        assert [self._expected[n] for n in numbers] == said.token_ids
        return said.external_tokens

    def wants(self, reason: str) -> float:
        """Return how many requests waited for their blocks, by how that ended."""
        return labelled(self.llm, WANTS, reason=reason)

    @property
    def is_joined(self) -> bool:
        """Whether the agent is there."""
        return self.tiers._client is not None and self.tiers._client.is_up


@pytest.fixture
def machine(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[int]],
) -> Callable[..., Any]:
    """Return what starts an engine on a machine by name; all have one tier in common."""
    return machines(llama, tmp_path, monkeypatch, PROMPTS, expected)


def machines(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: list[list[int]],
    **engine: Any,
) -> Callable[..., Any]:
    """Return what starts an engine with a model on a machine by name, over one tier."""
    path = registration(tmp_path / "registration")
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(ROOT)]))

    @contextmanager
    def start(name: str) -> Iterator[Machine]:
        tier = {"type": "file-tier", "path": str(tmp_path / "tier")}
        config = ucm_config(tmp_path / name, tiers=[tier])
        with in_process_engine(model, kv_transfer_config=config, **engine) as llm:
            made = Machine(llm, prompts, expected)
            made.until(lambda: made.is_joined)
            yield made

    return start


def stored(tmp_path: Path) -> list[Path]:
    """Return the files of blocks in the tier."""
    return [path for path in (tmp_path / "tier").iterdir() if not path.suffix]


class _AtOnce(PromptSpeed):
    """Knows an engine that computes anything in no time."""

    def seconds_of(self, tokens: int) -> float:
        """Return next to nothing."""
        return 1e-6


class TestTiers:
    def test_prompt_of_one_machine_is_warm_on_another(
        self, machine: Callable[..., Any], tmp_path: Path
    ) -> None:
        """R-53, R-54, R-63: what machine A has computed machine B loads from the tier, once,
        with the same tokens; an agent that is killed costs hits and no answer, and one that
        is back serves again."""
        with machine("a") as a:
            assert 0 == a.ask(0, 1, 2)
            a.until(lambda: len(stored(tmp_path)) >= 6)
            assert 3 == a.wants("absent")
        with machine("b") as b:
            assert HIT == b.ask(0)
            assert 1 == b.wants("")
            assert 2 == labelled(b.llm, LOADED)
            assert HIT == b.ask(0)
            assert 1 == b.wants("")
            end_agent(b.tiers._client._launch)
            assert 0 == b.ask(3)
            b.until(lambda: b.is_joined)
            assert 2 * HIT == b.ask(1, 2)
            assert 3 == b.wants("")
            assert {} == {
                n: size for n, size in b.tiers._client.counts().items() if size
            }

    def test_damaged_tier_is_a_miss(
        self, machine: Callable[..., Any], tmp_path: Path
    ) -> None:
        """R-51, R-53: no byte of a block that was damaged below the slab reaches an answer."""
        with machine("a") as a:
            a.ask(0)
            a.until(lambda: len(stored(tmp_path)) >= 2)
        for path in stored(tmp_path):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        with machine("b") as b:
            assert 0 == b.ask(0)
            assert 1 == b.wants("corrupt")
            b.until(lambda: len(stored(tmp_path)) >= 2)
        with machine("c") as c:
            assert HIT == c.ask(0)
            self._slower(c)

    def _slower(self, c: Machine) -> None:
        """R-59: once the tier is known, a prompt that is computed sooner is not fetched."""
        store = halves(c.llm)[1]._worker._store
        for _ in range(4):
            store.clear(b"")
            assert HIT == c.ask(0)
        c.tiers._predicts, c.tiers._prompts = True, _AtOnce()
        store.clear(b"")
        assert 0 == c.ask(0)
        assert (1, 1) == (c.wants("slower"), labelled(c.llm, MISSED, reason="slower"))


@pytest.mark.parametrize(
    ("recipe", "blocks", "first", "brought"),
    [(models.GEMMA3, 15, 384, 640), (models.QWEN3_NEXT, 6, 0, 640 - 384)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_prompt_that_goes_on_otherwise_is_warm(
    recipe: models.Recipe,
    blocks: int,
    first: int,
    brought: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R-53, R-54: a model with windows or states loads from a tier up to where another machine has
    computed the same and kept a state: what that hit needs is brought, not what the whole prompt would."""
    model = models.make_model(recipe)
    whole = prompt(7100, 700)
    prompts = [whole, whole[:460] + prompt(7101, 300), whole + prompt(7102, 200)]
    with in_process_engine(model, dtype=recipe.dtype) as llm:
        expected = generate(llm, prompts, TOKENS).token_ids
    start = machines(
        model, tmp_path, monkeypatch, prompts, expected, dtype=recipe.dtype
    )
    with start("a") as a:
        assert 0 == a.ask(0)
        a.until(lambda: len(stored(tmp_path)) >= blocks)
    with start("b") as b:
        assert [first, 640] == [b.ask(1), b.ask(2)]
        assert 2 == b.wants("absent")
        # What the first has not loaded it has computed and saved; each block comes once.
        assert 384 == labelled(b.llm, HITS, tier="slab")
        assert brought == labelled(b.llm, HITS, tier="other")  # of no tier of ours
