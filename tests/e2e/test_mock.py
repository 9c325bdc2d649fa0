# SPDX-License-Identifier: Apache-2.0
"""Sizing on the real engine: made-up hits, and saves that keep nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import LOADED, SAVED, halves, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.test_refusals import change, start
from tests.kit.lockstep import read_traces
from tests.traces import traces_of
from ucm.errors import ConfigError
from ucm.tracing import SETTING_UNSAFE

PROMPTS = [prompt(7001, 700), prompt(7002, 300)]
TOKENS = 8


@pytest.fixture(params=["llama", "gemma3", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each kind of KV cache of attention."""
    path: Path = request.getfixturevalue(request.param)
    return path


def mock_config(store: Path, hit_ratio: float) -> dict[str, Any]:
    """Return a connector configuration that makes up hits."""
    return ucm_config(store, hit_ratio=hit_ratio)


class TestHitRatio:
    @pytest.mark.parametrize(
        "recipe",
        [models.LLAMA, models.GEMMA3, models.DEEPSEEK, models.QWEN3_NEXT],
        ids=lambda recipe: recipe.name,
    )
    def test_prompts_that_were_never_seen_hit_by_the_ratio(
        self, recipe: models.Recipe, tmp_path: Path
    ) -> None:
        """S4-33: the engine computes what the ratio leaves of each prompt, to its end;
        nothing is saved or loaded, no store is made, and nothing is kept."""
        slab = tmp_path / "slab"
        with in_process_engine(
            models.make_model(recipe),
            dtype=recipe.dtype,
            max_num_seqs=4,
            kv_transfer_config=mock_config(slab, 0.5),
        ) as llm:
            done = generate(llm, PROMPTS, TOKENS)
            block = llm.llm_engine.vllm_config.cache_config.block_size
            for half in halves(llm):
                inner = half._scheduler or half._worker
                assert not any(inner.counts().values())
            assert (0, 0) == (counter(llm, SAVED), counter(llm, LOADED))
        claimed = [len(one) // 2 // block * block for one in PROMPTS]
        assert claimed == done.cached_tokens
        assert sum(claimed) == done.external_tokens > 0
        assert [TOKENS] * len(PROMPTS) == [len(one) for one in done.token_ids]
        assert not slab.exists()

    def test_real_engine_finds_nothing_of_a_mock(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """S4-33: an engine that is configured alike but for the ratio computes what a
        mock has claimed, and its tokens are those of the plain engine."""
        with in_process_engine(llama) as llm:
            expected = generate(llm, PROMPTS, TOKENS)
        slab = tmp_path / "slab"
        with in_process_engine(llama, kv_transfer_config=mock_config(slab, 1.0)) as llm:
            generate(llm, PROMPTS, TOKENS)
        with in_process_engine(llama, kv_transfer_config=ucm_config(slab)) as llm:
            real = generate(llm, PROMPTS, TOKENS)
        assert 0 == real.external_tokens
        assert expected.token_ids == real.token_ids

    def test_start_is_warned_of(self, llama: Path, tmp_path: Path) -> None:
        """S4-33: the log says once, by the key, that the output is garbage."""
        slab = tmp_path / "slab"
        with in_process_engine(llama, kv_transfer_config=mock_config(slab, 0.0)):
            pass
        lines = [
            line
            for line in read_traces(traces_of(slab))
            if line["event"] == SETTING_UNSAFE
        ]
        assert [("hit_ratio", 0.0)] == [(one["key"], one["value"]) for one in lines]
        assert "garbage" in lines[0]["remedy"]

    def test_mock_beside_another_connector_is_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """S4-33: a connector that would store the mock's garbage is not started."""
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [
                    mock_config(tmp_path / "slab", 0.5),
                    ucm_config(tmp_path / "other"),
                ]
            },
        }
        with pytest.raises(ConfigError, match=r"hit_ratio=0\.5.*MultiConnector"):
            start(llama, config)


class TestNullStore:
    def test_all_is_saved_and_nothing_found(self, model: Path, tmp_path: Path) -> None:
        """A store that keeps nothing takes each save, again when the prompt comes
        again, and changes no token."""
        with in_process_engine(model) as llm:
            expected = generate(llm, PROMPTS, TOKENS)
        config = ucm_config(tmp_path / "slab")
        config = change(config, store={"type": "null"})
        with in_process_engine(model, kv_transfer_config=config) as llm:
            cold = generate(llm, PROMPTS, TOKENS)
            saved = await_counter(llm, SAVED, 1)
            assert {} == quiesced(llm)
            reset_prefix_cache(llm)
            again = generate(llm, PROMPTS, TOKENS)
            assert await_counter(llm, SAVED, saved + 1) > saved
            assert {} == quiesced(llm)
            assert 0 == counter(llm, LOADED)
        assert expected.token_ids == cold.token_ids == again.token_ids
        assert 0 == cold.external_tokens == again.external_tokens
        assert not (tmp_path / "slab").exists()
