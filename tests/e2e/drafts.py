# SPDX-License-Identifier: Apache-2.0
"""Small heads of EAGLE and EAGLE 3 with random weights, for the model of ``models.LLAMA``."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

__all__ = ["make_draft"]

_LAYER: Final = {"eagle": "layers.0", "eagle3": "midlayer"}
_ARCHITECTURE: Final = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


def make_draft(method: str, model: Path, target: Path) -> Path:
    """
    Write a head of one layer, whose guesses are as good as chance, and return *target*.

    Args:
        method: ``eagle`` or ``eagle3``, as the engine calls it.
        model: The directory of the model for which it drafts.
        target: A directory that is not there.
    """
    from safetensors.torch import save_file

    target.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {
        "num_hidden_layers": 1,
        "architectures": [_ARCHITECTURE[method]],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    (target / "config.json").write_text(json.dumps(config))
    for each in model.glob("tokenizer*"):
        shutil.copy(each, target)
    save_file(_weights(method, config), target / "model.safetensors")
    return target


def _weights(method: str, config: dict[str, Any]) -> dict[str, Any]:
    """Draw each matrix with a gain above one, so that a wrong block changes the guesses."""
    import torch

    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    is_third, layer = method == "eagle3", _LAYER[method]
    read = 2 * width if is_third else width
    shapes = {
        "fc": (width, 3 * width if is_third else 2 * width),
        f"{layer}.self_attn.q_proj": (width, read),
        f"{layer}.self_attn.k_proj": (keys, read),
        f"{layer}.self_attn.v_proj": (keys, read),
        f"{layer}.self_attn.o_proj": (width, width),
        f"{layer}.mlp.gate_proj": (inner, width),
        f"{layer}.mlp.up_proj": (inner, width),
        f"{layer}.mlp.down_proj": (width, inner),
    }
    norms = [f"{layer}.post_attention_layernorm"]
    if is_third:
        shapes["lm_head"] = (config["vocab_size"], width)
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
    generator = torch.Generator().manual_seed(21)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator)
        * 1.6
        / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    return weights | {f"{name}.weight": torch.ones(width) for name in norms}
