# SPDX-License-Identifier: Apache-2.0
"""Batched prompts are loaded as far as the engine's pool has room, idle blocks included."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from tests.e2e.models import LLAMA
from tests.integration.transformers.batching import Engine
from tests.integration.transformers.kit import BLOCK, model_of, prompt

POOL = 100
"""Blocks; a batch has 32 of them."""
LONG = prompt(6, 60 * BLOCK + 5)[0].tolist()
OTHER = prompt(5, 50 * BLOCK + 5)[0].tolist()


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., list[list[int]]]]:
    """What the model says that remembers nothing."""
    with Engine(model_of(LLAMA)) as engine:
        yield engine.ask


def filled(directory: Path, tokens: list[int]) -> None:
    """Have a prompt answered and saved by an engine that ends then."""
    with Engine(model_of(LLAMA), directory) as engine:
        engine.ask(tokens)
        engine.prompts.cache.flush()


@pytest.mark.slow
class TestRoom:
    def test_request_that_waits_for_room_is_loaded_when_it_has_it(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """R-81: a pool in which another request leaves less than it needs."""
        other = prompt(2, 100)[0].tolist()
        filled(tmp_path, LONG[:100])
        with Engine(model_of(LLAMA), tmp_path, num_blocks=10) as engine:
            # They are sorted: the one with the larger first token has its turn first.
            both = sorted([LONG[:100], other])
            expected = [alone(each)[0] for each in both]
            engine.ask(other)
            engine.forget()
            assert expected == engine.ask(*both)
            assert 6 <= engine.loaded() <= 12
            assert 0 == engine.lost_blocks()

    def test_prompt_that_finds_no_room_is_hashed_no_further(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is searched for in each step, as all that wait are: what that costs goes by
        the room that there is, not by their length."""
        hashed = []
        inner = cache_allocator.compute_block_hash

        def count(before: int | None, tokens: list[int]) -> int:
            hashed.append(before)
            return int(inner(before, tokens))

        with Engine(model_of(LLAMA), tmp_path, num_blocks=10) as engine:
            with engine.manager.pause():
                monkeypatch.setattr(cache_allocator, "compute_block_hash", count)
                engine.prompts._restore(prompt(3, 64 * BLOCK)[0].tolist())
            assert 10 == len(hashed)

    def test_idle_blocks_of_others_give_way_to_a_load(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """R-81: the engine keeps what it may forget at any time, and begins a prompt that
        has not room for all of it; blocks of that prompt stay."""
        filled(tmp_path, LONG)
        with Engine(model_of(LLAMA), tmp_path, num_blocks=POOL) as engine:
            engine.ask(LONG[: 8 * BLOCK + 1])
            engine.ask(OTHER)
            loaded = engine.loaded()
            with engine.manager.pause():
                assert engine.prompts._num_free() < 52
                assert 60 * BLOCK == engine.prompts._match("first", LONG)
                engine.paged.free_blocks("first")
            assert alone(LONG) == engine.ask(LONG)
            assert 52 == engine.loaded() - loaded
            assert 0 == engine.lost_blocks()

    def test_prompt_is_loaded_as_far_as_there_is_room(
        self, tmp_path: Path, alone: Callable[..., list[list[int]]]
    ) -> None:
        """R-81: the engine begins it with room for a batch of it, which is left to it."""
        filled(tmp_path, LONG)
        with Engine(model_of(LLAMA), tmp_path, num_blocks=POOL) as engine:
            with engine.manager.pause():
                running = engine.prompts._take(45)
                engine.prompts._restore(LONG)
                assert (100 - 45) - 32 == len(engine.allocator.ledger.cached_blocks)
                engine.allocator.pool.free_blocks(engine.allocator.index, running)
            assert alone(LONG) == engine.ask(LONG)
            assert 60 == engine.loaded()
            assert 0 == engine.lost_blocks()
