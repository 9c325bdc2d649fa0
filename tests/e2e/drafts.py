# SPDX-License-Identifier: Apache-2.0
"""
Small parts of models that guess tokens, with random weights: guesses are as good as chance.

Heads of EAGLE and EAGLE 3 for the model of ``models.LLAMA``, and a model that has one within.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import attrs

from tests.e2e import models

__all__ = ["make_draft", "make_foreseeing"]

_LAYER: Final = {"eagle": "layers.0", "eagle3": "midlayer"}
_ARCHITECTURE: Final = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
_QWEN2: Final = attrs.evolve(models.LLAMA, name="qwen2", config_class="Qwen2Config")


def make_draft(method: str, model: Path, target: Path) -> Path:
    """
    Write a head of one layer and return *target*.

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
    return _drawn(shapes) | {f"{name}.weight": torch.ones(width) for name in norms}


def make_foreseeing(target: Path) -> Path:
    """
    Write a MiMo, which is a Qwen2 with a layer that predicts one more token.

    Args:
        target: A directory that is not there; returned.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(models.make_model(_QWEN2), target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    width, keys = (
        config["hidden_size"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    layer = "model.mtp_layers.0"
    shapes = {
        f"{layer}.input_proj": (width, 2 * width),
        f"{layer}.self_attn.q_proj": (width, width),
        f"{layer}.self_attn.k_proj": (keys, width),
        f"{layer}.self_attn.v_proj": (keys, width),
        f"{layer}.self_attn.o_proj": (width, width),
        f"{layer}.mlp.gate_proj": (config["intermediate_size"], width),
        f"{layer}.mlp.up_proj": (config["intermediate_size"], width),
        f"{layer}.mlp.down_proj": (width, config["intermediate_size"]),
    }
    norms = ("token_", "hidden_", "input_", "post_attention_", "final_")
    weights = _drawn(shapes)
    weights |= {f"{layer}.{name}layernorm.weight": torch.ones(width) for name in norms}
    for name, size in {"q": width, "k": keys, "v": keys}.items():
        weights[f"{layer}.self_attn.{name}_proj.bias"] = torch.zeros(size)
    path = target / "model.safetensors"
    save_file(load_file(path) | weights, path)
    return target


def _drawn(shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Draw each matrix with a gain above one, so that a wrong block changes the guesses."""
    import torch

    generator = torch.Generator().manual_seed(21)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator)
        * 1.6
        / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
