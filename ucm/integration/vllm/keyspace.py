# SPDX-License-Identifier: Apache-2.0
"""
The key space of a vLLM engine: what its block hashes do not say.

vLLM's hashes cover tokens, LoRA, images and cache salt, and neither model nor weights
nor layout. Each process derives its own view from its configuration; the scheduler
makes one key space of those of all ranks (``ucm.integration.vllm.topology``).
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ucm.blocks import KeySpace
from ucm.config import python_hash_seed
from ucm.errors import ConfigError
from ucm.integration.vllm.compat import engine_name, has
from ucm.layout import KVLayout

__all__ = ["check_hash_algorithm", "keyspace_of", "weights_digest"]

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_HEADER_DECODER = msgspec.json.Decoder(dict[str, dict[str, Any]])
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_PORTABLE_ALGORITHMS = ("sha256", "sha256_cbor")


def check_hash_algorithm(algorithm: str) -> None:
    """
    Refuse block hashes that differ from process to process.

    Raises:
        ConfigError: Names the setting to change.
    """
    if python_hash_seed():
        return
    if not has("fixed_hashes"):
        raise ConfigError(
            "PYTHONHASHSEED",
            None,
            "this release of vLLM begins its block hashes with a random number, so "
            "nothing would ever be found after a restart",
            "Set PYTHONHASHSEED to one value for all processes, or use vLLM 0.29.",
        )
    if algorithm not in _PORTABLE_ALGORITHMS:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "its block hashes are random per process, so nothing would ever be found "
            "after a restart",
            "Use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to one "
            "value for all processes.",
        )


def weights_digest(model_dir: Path) -> str:
    """
    Return a digest of a model directory that is the same in every copy of it.

    Takes the configuration whole. Of a safetensors file it takes name, size, header and
    beginning, middle and end of each tensor, so that a tensor that was trained further
    is seen without reading all of it; files of other formats are read whole.
    """
    digest = hashlib.sha256()
    for path in sorted(model_dir.iterdir()):
        if path.name != "config.json" and path.suffix not in _WEIGHT_SUFFIXES:
            continue
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            if path.suffix != ".safetensors" or not _sample_tensors(digest, file):
                file.seek(0)
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _sample_tensors(digest: "hashlib._Hash", file: BinaryIO) -> bool:
    """
    Take the header and some of each tensor; False if it is no safetensors file.

    Format: 8 bytes little endian length, JSON header, data.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        return False
    header = file.read(length)
    try:
        tensors = _HEADER_DECODER.decode(header)
    except msgspec.MsgspecError:
        return False
    digest.update(header)
    for name in sorted(tensors):
        start, stop = tensors[name].get("data_offsets", (0, 0))
        for at in (start, (start + stop) // 2, stop - _SAMPLE_BYTES):
            file.seek(8 + length + max(start, at))
            digest.update(file.read(_SAMPLE_BYTES))
    return True


def keyspace_of(
    vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    layout: KVLayout,
    parallel: str,
    weights_revision: str,
) -> KeySpace:
    """
    Return the key space that a process would store under if its layers were all.

    Args:
        vllm_config: As both halves of a connector are given it.
        layout: From the same engine.
        parallel: What of its ranks decides the bytes (``Topology.parallel``).
        weights_revision: The operator's name for the weights; empty to derive it.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return KeySpace(
        model=Path(model.model).name,
        weights=_weights(model, weights_revision),
        kv_dtype=f"{cache.cache_dtype}/{model.dtype}/{model.quantization}",
        layout=layout.fingerprint(),
        block_tokens=layout.hash_block_tokens,
        parallel=parallel,
        hash_algorithm=f"{cache.prefix_caching_hash_algo}/{python_hash_seed()}",
        engine=engine_name(vllm_config.device_config.device_type),
    )


def _weights(model: Any, revision: str) -> str:  # noqa: ANN401 - vLLM's ModelConfig
    """
    Name weights, and what the operator overrides in the model's configuration.

    The live configuration object is left out: models write into it while they load,
    in the workers and not in the scheduler.
    """
    overrides = model.hf_overrides
    if callable(overrides):
        text = f"{overrides.__module__}.{overrides.__qualname__}"
    else:
        text = json.dumps(overrides or {}, sort_keys=True, default=repr)
    overridden = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{revision or _weights_name(model)}/{overridden}"


def _weights_name(model: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig
    path = Path(model.model)
    if path.is_dir():
        return weights_digest(path)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if isinstance(cached, str):
        return weights_digest(Path(cached).parent)
    raise ConfigError(
        "weights_revision",
        "",
        f"the weights of {model.model} cannot be told apart from other revisions: no "
        "directory holds them",
        "Set kv_connector_extra_config.weights_revision to a name of this revision.",
    )
