# SPDX-License-Identifier: Apache-2.0
"""
A small model with random weights, for a server without a network.

It speaks nonsense, but all of its prompt decides which: a wrong block of cache would
change its words. Made once, in a second; tokens are bytes.
"""

import os
import shutil
import string
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["make_tiny"]

_NAME = "tiny-2"
_SPECIAL = ["<pad>", "<s>", "</s>"]
_SAYS = string.ascii_lowercase + " ,.!?"
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny(cache: Path) -> Path:
    """Return the model's directory below *cache*, made if it is not there."""
    target = cache / _NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=cache))
    try:
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(draft)
        said = tokenizer.convert_tokens_to_ids([_byte(each) for each in _SAYS])
        _model(len(tokenizer), said).save_pretrained(draft)
        os.replace(draft, target)
    except OSError:
        if not target.is_dir():  # somebody else was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate([*_SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _byte(character: str) -> str:
    """Return how a byte is written in the vocabulary."""
    ((written, _),) = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(character)
    return str(written)


def _model(vocab_size: int, said: list[int]) -> LlamaForCausalLM:
    """Draw weights with a gain above one, so that attention is sharp."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 2:
                std = 1.0 if "embed" in name else 1.6 / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        silent = torch.ones(vocab_size, dtype=torch.bool)
        silent[said] = False
        model.lm_head.weight[silent] = 0.0
    return model
