# SPDX-License-Identifier: Apache-2.0
"""
What a model of transformers keeps of its tokens, and under which key space.

What a cache looks like is not guessed from a configuration: the model is run over two
prompts of two tokens, and what it leaves behind is looked at. What cannot be reused by
prefix is refused by name.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    DynamicLayer,
    PreTrainedModel,
)

import ucm
from ucm.errors import ConfigError
from ucm.integration.computing import autocast_of, code_of, hooks_of, types_of
from ucm.integration.digest import read_weights

__all__ = ["Identity", "Shape", "identify", "observe"]

_LENGTH_FREE: Final = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Kinds of rotary embedding that rotate a key the same however long its prompt becomes."""
_NOT_DECIDING: Final = frozenset({"_name_or_path", "id2label", "label2id"})
"""Fields of a configuration that change no byte."""
_KNOWN_HOOKS: Final = (
    "torch.",
    "transformers.",
    "accelerate.",
    "compressed_tensors.",
)
"""Whose hooks change no state, or say so by a module of another type."""
_FORM: Final = "block: layers, keys before values, [heads, tokens, dim]"
_SAME: Final = 1e-2
"""Part of the largest number by which equal states may differ, for all that kernels do."""
_PADDING: Final = 3
"""Columns, enough to see whether they count."""
_REMEDY: Final = "Generate with this model without ucm."


@attrs.frozen(kw_only=True)
class Shape:
    """
    What a model keeps of each token.

    Args:
        layers: For each layer heads, and elements of a head's key and of its value.
        dtype: Of all of it.
        device: Where all of it is.
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        """Elements that are kept of one token."""
        return sum(heads * (key + value) for heads, key, value in self.layers)


@attrs.frozen(kw_only=True)
class Identity:
    """
    Under what a model's blocks are stored.

    Args:
        shape: What it keeps.
        layout: Of blocks with all layers in one piece.
        keyspace: All that must be equal.
    """

    shape: Shape
    layout: ucm.KVLayout
    keyspace: ucm.KeySpace


def identify(
    model: PreTrainedModel, *, block_tokens: int, weights: str, form: str = _FORM
) -> Identity:
    """
    Look at a model; reads all its weights unless they have a name. Blocks.

    Args:
        model: Ready to generate.
        block_tokens: Tokens of a block.
        weights: A name that is another one whenever the weights are; empty: their digest.
        form: Of a block's bytes, and who computes them.

    Raises:
        ConfigError: Its cache cannot be reused by prefix; names what of it.
    """
    # Its ``generate`` computes without what was compiled, a call of it with that.
    given, model = model, getattr(model, "_orig_mod", model)
    _check_kind(model)
    shape = observe(model)
    _check_hooks(model)  # some are of the first call alone
    experts = getattr(model.config, "_experts_implementation", None)
    page = block_tokens * shape.token_elements * shape.dtype.itemsize
    layout = ucm.paged_layout({"kv": page}, block_tokens=block_tokens)
    code, parts = _code_of(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {key: value for key, value in config.items() if key not in _NOT_DECIDING}
    keyspace = ucm.keyspace_of(
        layout,
        model=type(model).__qualname__,
        weights=weights or _weights_of(model),
        kv_dtype=str(shape.dtype),
        engine=f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{shape.device.type}; {form}",
        settings={
            "config": kept,
            "layers": shape.layers,
            "attention": model.config._attn_implementation,  # noqa: SLF001 - no other name
            "precision": torch.get_float32_matmul_precision(),
            "code": code,
            "made": _made_by(model),
        }
        | ({"autocast": str(cast)} if (cast := autocast_of(shape.device.type)) else {})
        | ({"parts": parts} if parts else {})
        | ({"compiled": True} if given is not model else {})
        | ({"experts": experts} if experts not in (None, "eager") else {}),
    )
    return Identity(shape=shape, layout=layout, keyspace=keyspace)


def observe(model: PreTrainedModel) -> Shape:
    """
    Run two prompts that differ in their last token, and return what is kept of them.

    Raises:
        ConfigError: That is not keys and values of each token, of which those of the
            first are the same in both, and padded too.
    """
    tokens = torch.tensor([[0, 0], [0, 1]], device=model.device)
    cache = _run(model, tokens, 0)
    if type(cache) is not DynamicCache or not cache.layers:
        kind = type(cache).__name__
        raise _refused("past_key_values", kind, "it is no DynamicCache")
    for layer in cache.layers:
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            kind = type(layer).__name__
            raise _refused(
                "layers", kind, "only layers that keep all tokens are stored"
            )
    states = _states(cache)
    if len(places := {(each.dtype, each.device) for each in states}) != 1:
        told = sorted(map(str, places))
        raise _refused("layers", told, "they are not of one type on one device")
    if not all(_is_same(*each[:, :, 0]) for each in states):
        raise _refused("attention", "not causal", "tokens look at later ones")
    padded = _states(_run(model, tokens, _PADDING))
    for each, behind in zip(states, padded, strict=True):
        if not _is_same(each, behind[:, :, -tokens.shape[1] :]):
            raise _refused("positions", "of columns", "they count padding as tokens")
    layers = tuple(
        (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
    )
    return Shape(layers=layers, dtype=states[0].dtype, device=states[0].device)


def _run(model: PreTrainedModel, tokens: torch.Tensor, padding: int) -> Any:  # noqa: ANN401 - whatever it leaves behind
    """Return what is kept of prompts behind so much padding, run as ``generate`` does."""
    known = set(inspect.signature(model.forward).parameters)
    if "kwargs" in known:  # who takes all passes them on
        known.add("attention_mask")
    if "attention_mask" not in known:
        padding = 0
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (padding, 0))
    told = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    told = {name: each for name, each in told.items() if name in known}
    ids = torch.nn.functional.pad(tokens, (padding, 0))
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True, **told)
    return getattr(out, "past_key_values", None)


def _states(cache: DynamicCache) -> list[torch.Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether states are equal, for all that kernels do."""
    limit = _SAME * float(one.float().abs().max())
    return torch.allclose(one.float(), other.float(), rtol=0, atol=limit)


def _check_kind(model: PreTrainedModel) -> None:
    """Refuse what two tokens do not show."""
    config = model.config
    if config.is_encoder_decoder:
        raise _refused(
            "is_encoder_decoder", True, "its states depend on an input apart"
        )
    if config.get_text_config(decoder=True) is not config:
        raise _refused("model_type", config.model_type, "not all its input is tokens")
    if any(getattr(each, "peft_config", None) for each in model.modules()):
        remedy = "Merge its adapters into the weights."
        raise _refused("peft_config", "set", "adapters come and go unseen", remedy)
    if model.training:
        raise _refused(
            "training", True, "it drops states at random", "Call model.eval()."
        )
    if (ranks := getattr(model, "tp_size", None) or 1) > 1:
        raise _refused("tp_size", ranks, "a rank's states are a part of all heads")
    for kind in _rope_kinds(getattr(config, "rope_parameters", None) or {}):
        if kind not in _LENGTH_FREE:
            problem = "keys depend on how long a prompt becomes"
            raise _refused("rope_type", kind, problem)


def _check_hooks(model: PreTrainedModel) -> None:
    """Refuse what strangers have called as the model computes."""
    for where, maker in hooks_of(model):
        if not maker.startswith(_KNOWN_HOOKS):
            remedy = "Remove it before you open this."
            raise _refused("forward hook", where, "it may change states", remedy)


def _rope_kinds(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of all layers, which may have parameters of their own."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for each in parameters.values():
        if isinstance(each, Mapping):
            yield from _rope_kinds(each)


def _weights_of(model: PreTrainedModel) -> str:
    """Return a digest of the weights as they are in memory."""
    reading = read_weights([model], lambda: False)
    if reading is None or not reading.digest or reading.hidden:
        name = type(model).__name__
        remedy = "Give weights= a name that is another one whenever they are."
        raise _refused("weights", name, "they cannot be read", remedy)
    return reading.digest.hex()


def _made_by(model: PreTrainedModel) -> list[str]:
    """
    Say what no file of weights holds: of which types the model is, and what it computes with.

    Rotary frequencies are in no checkpoint, and ``model.to(torch.bfloat16)`` rounds them
    where ``from_pretrained(dtype=torch.bfloat16)`` does not. What is quantised once it is
    loaded has other types, also where its weights have a name; what was compiled, or replaced
    by a faster kernel, has a function in place of its class's ``forward``.
    """
    types, made = types_of(model)
    reading = read_weights([made], lambda: False)
    if reading is None or not reading.digest:
        raise _refused("buffers", type(model).__name__, "they cannot be read")
    return [types, reading.digest.hex()]


def _code_of(model: PreTrainedModel) -> tuple[str, list[str]]:
    """Return digests of the code of the model's class, and of others; see ``code_of``."""
    name = model.config._attn_implementation  # noqa: SLF001 - no other name
    seen = [each().get(name) for each in (AttentionInterface, AttentionMaskInterface)]
    try:
        return code_of(model, *seen)
    except OSError as error:
        raise _refused("model", type(model).__name__, str(error)) from None


def _refused(
    key: str, value: object, problem: str, remedy: str = _REMEDY
) -> ConfigError:
    return ConfigError(key, value, problem, remedy, source="the model")
