# SPDX-License-Identifier: Apache-2.0
"""Engines that differ in what their blocks hold share nothing; restarted ones do."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import SAVED, prompt, quiesced, ucm_config
from tests.e2e.engine import (
    EXTERNAL_HITS,
    await_counter,
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)

PROMPT = prompt(4100, 300)
BLOCKS = 256
"""Tokens of the prompt's whole blocks."""
UNKEYED = "vllm:ucm_unkeyed_lookups"
PROVEN = "vllm:ucm_weights_proven"


def answer(
    model: Path, config: dict[str, Any] | None, **settings: Any
) -> tuple[list[int], int]:
    """Start an engine, ask it for the prompt and save; return tokens and hits."""
    with in_process_engine(model, kv_transfer_config=config, **settings) as llm:
        said = generate(llm, [PROMPT], 6)
        if config is not None and not said.external_tokens:
            await_counter(llm, SAVED, BLOCKS // 128)
        return said.token_ids[0], said.external_tokens


@pytest.mark.parametrize(
    ("recipe", "first", "second"),
    [
        (models.LLAMA_LONGROPE, {"max_model_len": 1024}, {"max_model_len": 2048}),
        (models.LLAMA, {}, {"load_format": "dummy"}),
    ],
    ids=["length that chooses rotary factors", "weights that are drawn"],
)
def test_engines_of_other_values_share_nothing(
    recipe: models.Recipe,
    first: dict[str, Any],
    second: dict[str, Any],
    tmp_path: Path,
) -> None:
    """R-05: two engines over one store say what they say without it, though the hashes
    of their tokens are equal; each finds its own blocks after a restart."""
    model, config = models.make_model(recipe), ucm_config(tmp_path / "slab")
    (one, _), (other, _) = (answer(model, None, **each) for each in (first, second))
    assert one != other
    assert (one, 0) == answer(model, config, **first)
    assert (other, 0) == answer(model, config, **second)
    assert (one, BLOCKS) == answer(model, config, **first)
    assert (other, BLOCKS) == answer(model, config, **second)


def write_adapter(path: Path, seed: int) -> Path:
    """Write an adapter of the small Llama, in place of what is there."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    modules = {"k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(models.LLAMA.config["num_hidden_layers"]):
        for name, rows in modules.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, 128)), ("B", (rows, 8))):
                drawn = torch.randn(shape, generator=generator) * 0.3
                tensors[f"{stem}.lora_{part}.weight"] = drawn
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": list(modules),
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def asked(llm: Any, path: Path | None, number: int = 1) -> tuple[list[int], int]:
    """Ask for the prompt with an adapter, from the store alone; return tokens, hits."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    reset_prefix_cache(llm)
    generate(llm, [[3]], max_tokens=1)  # with it the weights come into doubt
    await_counter(llm, PROVEN, 1)
    saved, before = counter(llm, SAVED), counter(llm, EXTERNAL_HITS)
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPT}],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False),
        use_tqdm=False,
        lora_request=None if path is None else LoRARequest("a", number, str(path)),
    )
    drain(llm)
    hits = counter(llm, EXTERNAL_HITS) - before
    if not hits and not counter(llm, UNKEYED):
        await_counter(llm, SAVED, saved + BLOCKS // 128)
    return list(output.outputs[0].token_ids), hits


LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_adapter_of_another_content_at_one_path_shares_nothing(
    llama: Path, tmp_path: Path
) -> None:
    """R-05: the engine's hashes name an adapter and its path. What was saved with one
    content is found after a restart with that content only; an adapter that changes
    while the engine runs is passed over, under whatever number it is loaded."""
    config = ucm_config(tmp_path / "slab")
    adapter = write_adapter(tmp_path / "adapter", 1)
    with in_process_engine(llama, kv_transfer_config=config, **LORA) as llm:
        one, hits = asked(llm, adapter)
        assert 0 == hits
        assert (one, BLOCKS) == asked(llm, adapter)
        plain, hits = asked(llm, None)
        assert (0, True) == (hits, plain != one)
        write_adapter(adapter, 2)
        two, hits = asked(llm, adapter, 2)
        assert (0, True) == (hits, two not in (one, plain))
        assert 1 == counter(llm, UNKEYED)
        assert {} == quiesced(llm)
    with in_process_engine(llama, kv_transfer_config=config, **LORA) as llm:
        assert (two, 0) == asked(llm, adapter)
        assert (two, BLOCKS) == asked(llm, adapter)
        assert (plain, BLOCKS) == asked(llm, None)
    write_adapter(adapter, 1)
    with in_process_engine(llama, kv_transfer_config=config, **LORA) as llm:
        assert (one, BLOCKS) == asked(llm, adapter)
