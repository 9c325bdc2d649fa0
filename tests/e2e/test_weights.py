# SPDX-License-Identifier: Apache-2.0
"""Weights that change in place, resets and sleep, on the real engine."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.e2e.connector import SAVED, prompt, ucm_config
from tests.e2e.engine import (
    EXTERNAL_HITS,
    Generation,
    await_counter,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.models import LLAMA, make_model

PROMPT = prompt(1, 700)
HITS = 640


@pytest.fixture(scope="module")
def other() -> Path:
    """Another training of the same model."""
    return make_model(attrs.evolve(LLAMA, seed=8))


@pytest.fixture(scope="module")
def others_tokens(other: Path) -> list[int]:
    """What the other weights say, without any connector."""
    with in_process_engine(other) as llm:
        return ask(llm).token_ids[0]


def ask(llm: Any) -> Generation:
    """Let the engine complete the one prompt."""
    return generate(llm, [PROMPT], 8)


def reload_weights(llm: Any, model: Path) -> None:
    """Load weights in place, as an operator does."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def sleep(llm: Any) -> None:
    """Sleep and wake; on CPU no memory goes away, but all caches are reset."""
    llm.sleep(level=1)
    llm.wake_up()


class TestWeights:
    @pytest.mark.timeout(240)
    def test_readable_weights_are_told_apart_by_their_bytes(
        self,
        llama: Path,
        other: Path,
        others_tokens: list[int],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """R-07, R-08: with weights in parameters, as on a GPU: new weights find nothing
        of the old ones whichever caches are reset, each of both finds its own again,
        equal weights and sleep lose nothing, and a restart finds all of the start's."""
        from vllm import _custom_ops

        monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            cold = ask(llm)
            await_counter(llm, SAVED, 5)

            def expect(tokens: list[int], hits: int) -> None:
                found = ask(llm)
                assert tokens == found.token_ids[0]
                assert hits == found.external_tokens

            reload_weights(llm, llama)
            reset_prefix_cache(llm)
            expect(cold.token_ids[0], HITS)
            for reset_external in (False, True):
                reload_weights(llm, other)
                reset_prefix_cache(llm, reset_external=reset_external)
                expect(others_tokens, HITS if reset_external else 0)
                await_counter(llm, SAVED, 10)
                reload_weights(llm, llama)
                reset_prefix_cache(llm, reset_external=reset_external)
                expect(cold.token_ids[0], HITS)
            sleep(llm)
            expect(cold.token_ids[0], HITS)
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            expect(cold.token_ids[0], HITS)

    @pytest.mark.timeout(240)
    def test_packed_weights_are_told_apart_by_packing(
        self,
        llama: Path,
        other: Path,
        others_tokens: list[int],
        tmp_path: Path,
    ) -> None:
        """R-07, R-08: with weights that kernels keep out of reach, as on CPU: resets
        and sleep lose nothing, and what was loaded finds nothing of before, though it
        may be the same. Without a reset nothing is saved or found."""
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            cold = ask(llm)
            await_counter(llm, SAVED, 5)
            for reset in (
                reset_prefix_cache,
                lambda llm: reset_prefix_cache(llm, reset_external=True),
                sleep,
            ):
                reset(llm)
                found = ask(llm)
                assert cold.token_ids == found.token_ids
                assert HITS == found.external_tokens
            reload_weights(llm, other)
            mixed = generate(llm, [prompt(2, 700)], 1)
            assert 0 == mixed.external_tokens
            reset_prefix_cache(llm)
            for hits in (0, HITS):
                found = ask(llm)
                assert others_tokens == found.token_ids[0]
                assert hits == found.external_tokens
                assert 10 == await_counter(llm, SAVED, 10)
                reset_prefix_cache(llm)


class TestLastSteps:
    def test_engine_in_this_process_resets_and_sleeps_right_behind_its_answers(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """R-08: nobody steps it any more, and yet what ended is saved, its blocks are free,
        and the next prompts find all of it."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt(seed, 252)} for seed in range(6)]
        config = ucm_config(tmp_path / "slab")
        with in_process_engine(llama, kv_transfer_config=config) as llm:
            told = []
            for _ in range(2):
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                told.append([output.outputs[0].token_ids for output in outputs])
                assert llm.reset_prefix_cache()
                sleep(llm)
            assert told[0] == told[1]
            assert 6 * 128 == counter(llm, EXTERNAL_HITS)
            assert 12 == await_counter(llm, SAVED, 12)
