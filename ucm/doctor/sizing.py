# SPDX-License-Identifier: Apache-2.0
"""
How large a model's blocks are, and what of them fits: arithmetic over its ``config.json``.

Pure but for reading that file. What is not said there is not guessed: a model whose layers
are of kinds that this does not know is named as such.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from ucm.configuration.files import read_text
from ucm.doctor.findings import Finding, fine, note, warning, wrong
from ucm.errors import ConfigError, ConfigFileError
from ucm.settings import size_text

__all__ = [
    "Deployment",
    "ModelFacts",
    "Sizes",
    "UnsizedError",
    "check_sizes",
    "model_of",
    "sizes_of",
]

_MOST_BYTES: Final = 4 << 20
_PAGE: Final = 4096
_DTYPES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_PAGED: Final = (
    "full_attention",
    "attention",
    "sliding_attention",
    "chunked_attention",
)
_STATE: Final = ("linear_attention", "mamba", "recurrent", "conv")
_MOST: Final = 1 << 20


class UnsizedError(ConfigError):
    """A type of the cache, which engines may well know, has elements of unknown size."""


@attrs.frozen(kw_only=True)
class ModelFacts:
    """
    What a model's ``config.json`` says of its KV cache.

    Args:
        layers: That keep keys and values of every token.
        heads: Of keys and values; 1 where all share one latent vector.
        head_bytes: Per layer, head and token, keys and values together.
        state_layers: That keep a state instead, whose size is not here.
        window_layers: Of the layers, those that look at a window only.
        is_latent: All ranks hold the same.
    """

    layers: int
    heads: int
    head_bytes: int
    state_layers: int = 0
    window_layers: int = 0
    is_latent: bool = False


@attrs.frozen(kw_only=True)
class Deployment:
    """How the engine is started, as far as it decides sizes."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_tokens: int = 16
    kv_dtype: str = "auto"


@attrs.frozen(kw_only=True)
class Sizes:
    """
    What blocks need.

    Args:
        token_bytes: Of one token over all ranks, each part once.
        block_bytes: Of the largest part of a block that a rank stores.
        shards: Parts of a block.
        block_tokens: Tokens of a block.
    """

    token_bytes: int
    block_bytes: int
    shards: int
    block_tokens: int

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens fit into so many slots."""
        return num_slots // self.shards * self.block_tokens


def model_of(path: Path, kv_dtype: str = "auto") -> ModelFacts:
    """
    Read what a model's directory, or its ``config.json``, says.

    Raises:
        ConfigFileError: It cannot be read, or does not say what is needed.
        UnsizedError: Nobody here knows how large an element of that type of the cache is.
    """
    file = path / "config.json" if path.is_dir() else path
    told = _read(file)
    if kv_dtype != "auto" and kv_dtype not in _DTYPES:
        problem = "nobody here knows the size of its elements, so not what fits"
        remedy = f"Known are auto and {[*_DTYPES]}; of others the engine's log says it."
        raise UnsizedError("kv-cache-dtype", kv_dtype, problem, remedy)
    inner = told.get("text_config")
    text = {**told, **inner} if isinstance(inner, dict) else told
    try:
        return _facts(text, _DTYPES[_dtype(text, kv_dtype)])
    except (KeyError, TypeError, ValueError) as exc:
        why = f"says no usable {exc}" if isinstance(exc, KeyError) else str(exc)
        raise _error(file, why, "Name a model of a decoder with attention.") from exc


def _read(file: Path) -> dict[str, Any]:
    try:
        text = read_text(file, key="MODEL", most_bytes=_MOST_BYTES)
    except ConfigFileError as exc:
        remedy = "Give a local directory with a config.json; nothing is downloaded."
        raise ConfigFileError("MODEL", str(file), exc.problem, remedy) from exc
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as exc:  # msgspec's are ValueErrors
        remedy = "Give a local directory with the model's config.json."
        raise _error(file, f"is no JSON object: {exc}", remedy) from exc


def _error(file: Path, problem: str, remedy: str) -> ConfigFileError:
    return ConfigFileError("MODEL", str(file), problem, remedy)


def _dtype(text: Mapping[str, Any], kv_dtype: str) -> str:
    if kv_dtype != "auto":
        return kv_dtype
    found = text.get("torch_dtype") or text.get("dtype") or "float16"
    return str(found).removeprefix("torch.")


def _facts(text: Mapping[str, Any], element: int) -> ModelFacts:
    layers = _count(text, "num_hidden_layers")
    kinds = text.get("layer_types") or text.get("layers_block_type")
    states, windows = _kinds(kinds, layers, text.get("full_attention_interval"))
    if text.get("kv_lora_rank") is not None:
        latent = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
        return ModelFacts(
            layers=layers - states,
            heads=1,
            head_bytes=latent * element,
            state_layers=states,
            window_layers=windows,
            is_latent=True,
        )
    query_heads = _count(text, "num_attention_heads")
    heads = query_heads
    if text.get("num_key_value_heads") is not None:
        heads = _count(text, "num_key_value_heads")
    if text.get("head_dim") is not None:
        width = _count(text, "head_dim")
    else:
        width = _count(text, "hidden_size") // query_heads
    return ModelFacts(
        layers=layers - states,
        heads=heads,
        head_bytes=2 * width * element,
        state_layers=states,
        window_layers=windows,
    )


def _kinds(kinds: object, layers: int, interval: object) -> tuple[int, int]:
    """Return how many layers keep a state, and how many look at a window."""
    if isinstance(kinds, list):
        unknown = {str(kind) for kind in kinds} - {*_PAGED, *_STATE}
        if unknown or len(kinds) != layers:
            raise ValueError(f"has layers of unknown kinds: {sorted(unknown)[:4]}")
        states = sum(kind in _STATE for kind in kinds)
        return states, sum(kind in _PAGED[2:] for kind in kinds)
    if isinstance(interval, int) and interval > 0:
        return layers - layers // interval, 0
    return 0, 0


def _count(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise KeyError(key)
    return value


def sizes_of(model: ModelFacts, how: Deployment) -> Sizes:
    """
    Return what blocks need.

    Raises:
        ConfigError: The ranks cannot have equal parts.
    """
    tensor, stages = how.tensor_parallel, how.pipeline_parallel
    if not model.is_latent and max(model.heads, tensor) % min(model.heads, tensor):
        raise ConfigError(
            "tensor-parallel-size",
            tensor,
            f"{model.heads} heads of keys and values are not cut evenly",
            "Use a divisor or a multiple of that number.",
        )
    # Ranks beyond the number of heads hold the same as others, which is stored once.
    shards = 1 if model.is_latent else min(model.heads, tensor)
    stage_layers = -(-model.layers // stages)
    part = stage_layers * (model.heads // shards) * model.head_bytes
    return Sizes(
        token_bytes=model.layers * model.heads * model.head_bytes,
        block_bytes=part * how.block_tokens,
        shards=shards * stages,
        block_tokens=how.block_tokens,
    )


def check_sizes(
    model: ModelFacts,
    sizes: Sizes,
    *,
    capacity: int,
    num_slots: int,
    tokens_per_second: float = 0.0,
) -> Iterator[Finding]:
    """
    Say what fits, with the arithmetic.

    Args:
        model: The model.
        sizes: Of its blocks.
        capacity: ``store.capacity``: of the node, for all ranks and engines.
        num_slots: That it has for such blocks.
        tokens_per_second: New tokens of prompts, over all engines of the node; 0: unknown.
    """
    tokens = sizes.tokens_in(num_slots)
    slot = _PAGE * -(-sizes.block_bytes // _PAGE)
    text = (
        f"a token has {size_text(sizes.token_bytes)} over all ranks, a block of "
        f"{sizes.block_tokens} tokens {sizes.shards} parts of {size_text(sizes.block_bytes)}; "
        f"{size_text(capacity)} of the node are {num_slots} slots of {size_text(slot)}, that is "
        f"{tokens} tokens"
    )
    if not tokens:
        yield wrong("capacity", text, "Raise store.capacity.")
    else:
        yield fine("capacity", text)
    if slot > 1.25 * sizes.block_bytes:
        yield warning(
            "capacity",
            f"a slot has {size_text(slot)} for {size_text(sizes.block_bytes)}: the rest is lost",
            "Use larger blocks (--block-size), so that parts fill whole pages.",
        )
    if model.state_layers:
        yield note(
            "capacity",
            f"{model.state_layers} layers keep a state, which is not in these numbers",
            "The engine's log says the size of its blocks.",
        )
    if model.window_layers:
        yield note(
            "capacity",
            f"{model.window_layers} layers look at a window only and are counted whole",
        )
    if tokens and tokens_per_second > 0:
        minutes = tokens / tokens_per_second / 60
        text = f"{tokens_per_second:g} new tokens a second fill it in {minutes:.1f} minutes"
        remedy = "What is used again later than that is gone: raise store.capacity."
        short = minutes < 5
        yield warning("traffic", text, remedy) if short else fine("traffic", text)
