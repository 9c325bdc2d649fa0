# SPDX-License-Identifier: Apache-2.0
"""Tenants who share an engine and a store, kept apart by their cache salt."""

from pathlib import Path
from typing import Any

from tests.e2e.connector import SAVED, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    EXTERNAL_HITS,
    await_counter,
    counter,
    drain,
    in_process_engine,
    reset_prefix_cache,
)

SECRET = prompt(3000, 300)


def loaded(llm: Any, salt: str | None) -> tuple[list[int], int]:
    """Ask for the prompt as a tenant; return the answer and the tokens loaded."""
    from vllm import SamplingParams

    reset_prefix_cache(llm)
    before = counter(llm, EXTERNAL_HITS)
    sampling = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False
    )
    request: dict[str, Any] = {"prompt_token_ids": SECRET}
    if salt is not None:
        request["cache_salt"] = salt
    (output,) = llm.generate([request], sampling, use_tqdm=False)
    drain(llm)
    return list(output.outputs[0].token_ids), counter(llm, EXTERNAL_HITS) - before


def test_salt_keeps_tenants_apart(llama: Path, tmp_path: Path) -> None:
    """What one tenant stored is a hit for that tenant only, also after a restart;
    the answer is the same with and without."""
    config = ucm_config(tmp_path / "slab")
    with in_process_engine(llama, kv_transfer_config=config) as llm:
        cold = loaded(llm, "a")
        await_counter(llm, SAVED, 2)
        assert (cold[0], 0) == cold
        assert (cold[0], 256) == loaded(llm, "a")
        assert (cold[0], 0) == loaded(llm, "b")
        assert (cold[0], 0) == loaded(llm, None)
        assert {} == quiesced(llm)
    with in_process_engine(llama, kv_transfer_config=config) as llm:
        assert (cold[0], 0) == loaded(llm, "c")
        assert (cold[0], 256) == loaded(llm, "a")
        assert (cold[0], 256) == loaded(llm, None)
