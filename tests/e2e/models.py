# SPDX-License-Identifier: Apache-2.0
"""
Small models with random weights, made on demand and kept by recipe.

Nothing is downloaded. The weights have a gain above one, so that attention is sharp
and greedy output depends on the whole KV cache: a wrong block changes the tokens.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "BERT",
    "DEEPSEEK",
    "GEMMA2",
    "GEMMA3",
    "GPT_OSS",
    "LAGUNA",
    "LLAMA",
    "LLAMA4",
    "LLAMA_DEMO",
    "LLAMA_LONGROPE",
    "MAMBA2",
    "MISTRAL",
    "QWEN3_NEXT",
    "Recipe",
    "make_model",
    "write_tokenizer",
]

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"
SCHEMA = 2
"""Grows when the way of drawing weights changes; models are then made anew."""


@attrs.frozen(kw_only=True)
class Recipe:
    """All that decides the bytes of a model."""

    name: str
    config_class: str
    config: dict[str, Any]
    dtype: str = "float32"
    gain: float = 1.6
    seed: int = 7
    constants: dict[str, float] = attrs.Factory(dict)
    """Of vectors, by how their names end: what each element is."""

    def digest(self) -> str:
        """Return the short hash that names the model's directory."""
        decided = attrs.asdict(self, filter=lambda field, value: value != {})
        text = json.dumps([SCHEMA, decided], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


LLAMA = Recipe(
    name="llama",
    config_class="LlamaConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
    },
)
"""Full attention with grouped queries: one KV cache group."""

GEMMA3 = Recipe(
    name="gemma3",
    config_class="Gemma3TextConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 8192,
    },
)
"""Sliding window and full attention: several groups that share storage."""

MISTRAL = Recipe(
    name="mistral",
    config_class="MistralConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 64,
        "max_position_embeddings": 8192,
    },
)
"""Sliding windows in all layers: one group, of which old blocks are not needed."""

GEMMA2 = Recipe(
    name="gemma2",
    config_class="Gemma2Config",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,  # the engine has no other for Gemma 2
        "max_position_embeddings": 8192,
    },
)
"""As many windows as full attention, with soft caps: two groups, each of two layers."""

GPT_OSS = Recipe(
    name="gpt-oss",
    config_class="GptOssConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
    },
)
"""Windows and full attention in turn, with sinks that are weights, and experts."""

LAGUNA = Recipe(
    name="laguna",
    config_class="LagunaConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
    },
)
"""Windows and full attention in turn, and no experts."""

LLAMA4 = Recipe(
    name="llama4",
    config_class="Llama4TextConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_chunk_size": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 8192,
    },
)
"""Attention within chunks in three layers of four, and experts."""

DEEPSEEK = Recipe(
    name="deepseek",
    config_class="DeepseekV2Config",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 8192,
        # Plain rope is computed wrongly by the engine's CPU kernels for this
        # architecture, with or without a connector.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
"""Multi-head latent attention with a mixture of experts: one latent per token."""

QWEN3_NEXT = Recipe(
    name="qwen3next",
    config_class="Qwen3NextConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 8192,
    },
    dtype="bfloat16",
)
"""Three layers of gated delta net, whose state is recurrent, and one of attention."""

LLAMA_LONGROPE = attrs.evolve(
    LLAMA,
    name="llama-longrope",
    config=LLAMA.config
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.5 * at for at in range(16)],
        },
    },
)
"""One of two sets of rotary factors, by the length of the longest request."""

BERT = Recipe(
    name="bert",
    config_class="BertConfig",
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "is_decoder": True,
    },
)
"""What becomes an encoder with ``hf_overrides``; it is written as a decoder."""

MAMBA2 = Recipe(
    name="mamba2",
    config_class="Mamba2Config",
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "expand": 2,
    },
)
"""Recurrent layers alone, of whose states the engine keeps the last."""

LLAMA_DEMO = Recipe(
    name="llama-demo",
    config_class="LlamaConfig",
    config={
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 16384,
    },
    dtype="bfloat16",
)
"""Large enough that the prefill of a few thousand tokens takes seconds."""


def make_model(recipe: Recipe, cache: Path = CACHE) -> Path:
    """Return the directory of a model; it is made if it is not there, and appears whole."""
    target = cache / f"{recipe.name}-{recipe.digest()}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{recipe.name}-", dir=cache))
    try:
        _write_weights(recipe, draft)
        write_tokenizer(recipe.config["vocab_size"], draft)
        draft.chmod(0o755)
        try:
            os.rename(draft, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write_weights(recipe: Recipe, target: Path) -> None:
    """Draw each matrix with ``gain / sqrt(fan_in)`` and save config and weights."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    config = getattr(transformers, recipe.config_class)(
        **{
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        }
        | recipe.config,
    )
    dtype = getattr(torch, recipe.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(recipe.seed)
    # Where the head is the embedding, a large one would only repeat the last token.
    embed_std = 0.02 if config.tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                if (end := name.rpartition(".")[-1]) in recipe.constants:
                    weight.fill_(recipe.constants[end])
                continue
            embeds = "embed_tokens" in name
            std = embed_std if embeds else recipe.gain / weight.shape[-1] ** 0.5
            drawn = torch.randn(weight.shape, generator=generator) * std
            weight.copy_(drawn.to(dtype))
    model.save_pretrained(target, safe_serialization=True)


def write_tokenizer(vocab_size: int, target: Path) -> None:
    """Save a tokenizer that splits at white space; the words are t3, t4 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    words = special + [f"t{index}" for index in range(len(special), vocab_size)]
    vocab = {word: index for index, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<pad>",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(target)
