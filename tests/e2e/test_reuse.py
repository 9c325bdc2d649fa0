# SPDX-License-Identifier: Apache-2.0
"""
Saved prefixes come back token-exact, however the engine cuts and caches them.

``test_models.py`` has the same for each model and mode.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import SAVED, prompt, ucm_config
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)

PROMPTS = [prompt(1, 700), prompt(2, 555), [*prompt(1, 400), *prompt(3, 200)]]
TOKENS = 12


@pytest.fixture(scope="module", params=["llama", "gemma3", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each kind of KV cache that the door can map."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What the engine says without any connector."""
    with in_process_engine(model) as llm:
        return generate(llm, PROMPTS, TOKENS).token_ids


class TestChunks:
    def test_chunked_prefill_and_small_blocks_are_exact(
        self, model: Path, expected: list[list[int]], tmp_path: Path
    ) -> None:
        """Blocks that fill up in the middle of a chunk are saved and come back."""
        config = ucm_config(tmp_path / "slab", queue={"span_bytes": "64KiB"})
        small: dict[str, Any] = {
            "max_num_batched_tokens": 200,
            "enable_chunked_prefill": True,
            "kv_transfer_config": config,
            "max_num_seqs": 4,
        }
        if model.name.startswith("deepseek"):
            del small["max_num_batched_tokens"], small["enable_chunked_prefill"]
        else:
            small["block_size"] = 32
        with in_process_engine(model, **small) as llm:
            cold = generate(llm, PROMPTS, TOKENS)
            reset_prefix_cache(llm)
            warm = generate(llm, PROMPTS, TOKENS)
        assert expected == cold.token_ids == warm.token_ids
        assert warm.external_tokens > 1500


class TestEdges:
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_prompt_that_hits_completely_is_exact(
        self, name: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        """H-08: all blocks of a prompt may hit; the engine computes its last token."""
        whole = prompt(5, 512)
        config = ucm_config(tmp_path / "slab")
        path = request.getfixturevalue(name)
        with in_process_engine(path, kv_transfer_config=config) as llm:
            cold = generate(llm, [whole], 8)
            reset_prefix_cache(llm)
            warm = generate(llm, [whole], 8)
        assert cold.token_ids == warm.token_ids
        assert 512 == warm.external_tokens

    def test_engine_cache_off_still_hits_the_store(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """Without the engine's own prefix cache every repeat is served by ucm."""
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(
            llama, kv_transfer_config=config, enable_prefix_caching=False
        ) as llm:
            cold = generate(llm, [PROMPTS[0]], 8)
            await_counter(llm, SAVED, 5)
            warm = generate(llm, [PROMPTS[0]], 8)
        assert cold.token_ids == warm.token_ids
        assert 640 == warm.external_tokens

    def test_cache_salt_keeps_tenants_apart(self, llama: Path, tmp_path: Path) -> None:
        """The same tokens under another salt are not found."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            for salt, hits in (("a", 0), ("b", 0), ("a", 640)):
                reset_prefix_cache(llm)
                before = counter(llm, "vllm:external_prefix_cache_hits")
                llm.generate(
                    {"prompt_token_ids": PROMPTS[0], "cache_salt": salt},
                    sampling,
                    use_tqdm=False,
                )
                after = counter(llm, "vllm:external_prefix_cache_hits")
                assert hits == after - before

    def test_blocks_lost_by_the_store_are_saved_again(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """A prefix that the engine still has but the store lost is stored anew."""
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            generate(llm, [PROMPTS[0]], 4)
            saved = await_counter(llm, SAVED, 5)
            half = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
            assert 5 == half._store.clear(b"")
            generate(llm, [PROMPTS[0]], 4)
            assert saved + 5 == await_counter(llm, SAVED, saved + 5)
            reset_prefix_cache(llm)
            assert 640 == generate(llm, [PROMPTS[0]], 4).external_tokens
