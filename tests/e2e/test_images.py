# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, on the real engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.connector import LOADED, SAVED, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    EXTERNAL_HITS,
    await_counter,
    counter,
    drain,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.images import NUM_IMAGE_TOKENS, make_seeing, noise

WORDS = [f"t{token}" for token in prompt(3400, 400, 490)]
BEFORE = 150
"""Words ahead of the image: it begins within the second of three whole blocks."""
SIGHTED: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 1},
    "max_num_batched_tokens": BEFORE + NUM_IMAGE_TOKENS // 2,  # ends amid the image
    "mm_hasher_algorithm": "sha256",
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees."""
    return make_seeing(tmp_path_factory.mktemp("model") / "seeing")


def look(llm: Any, seed: int) -> tuple[list[int], int]:
    """Ask about one image; return the tokens, and how many were found outside."""
    from vllm import SamplingParams

    text = " ".join([*WORDS[:BEFORE], "<image>", *WORDS[BEFORE:]])
    sampling = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    before = counter(llm, EXTERNAL_HITS)
    (output,) = llm.generate(
        [{"prompt": text, "multi_modal_data": {"image": noise(seed)}}],
        sampling,
        use_tqdm=False,
    )
    drain(llm)
    return list(output.outputs[0].token_ids), counter(llm, EXTERNAL_HITS) - before


def test_images_are_part_of_the_key(seeing: Path, tmp_path: Path) -> None:
    """Equal words around other images share the block before these and none behind, and
    an engine that starts over the slab goes on behind an image that it never saw."""
    with in_process_engine(seeing, **SIGHTED) as llm:
        alone = {seed: look(llm, seed)[0] for seed in (1, 2, 3)}
    assert 3 == len({*map(tuple, alone.values())})
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(seeing, kv_transfer_config=config, **SIGHTED) as llm:
        assert (alone[1], 0) == look(llm, 1)
        assert (alone[2], 0) == look(llm, 2)  # the first is in the engine's own cache
        await_counter(llm, SAVED, 5)
        reset_prefix_cache(llm)
        assert (alone[2], 3 * 128) == look(llm, 2)
        assert {} == quiesced(llm)
    with in_process_engine(seeing, kv_transfer_config=config, **SIGHTED) as llm:
        assert (alone[3], 128) == look(llm, 3)
        assert (alone[1], 2 * 128) == look(llm, 1)
        assert 3 == counter(llm, LOADED)
        assert {} == quiesced(llm)
