# SPDX-License-Identifier: Apache-2.0
"""
What a model's weights and files are called in keys.

Equal names promise equal weights, so they come from what the engine reads: the files of
the model's directory. Where these are not the weights, or not all of them, nothing can
be promised, and the operator has to name the revision.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec

from ucm.decoding import DECODE_ERRORS
from ucm.errors import ConfigError
from ucm.integration.changes import last_change_ns

__all__ = ["config_digest", "is_changed_since", "weights_digest", "weights_name"]

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CONFIG_SUFFIXES = (".json", ".py")
_PARTS = ("text_model_id", "audio_model_id")
"""Of a model's configuration: where the weights of its parts lie, if apart (Ultravox)."""
_BELOW = ("audio_tokenizer", "whisper-large-v3")
"""Directories within a model's that have weights of it (MiMo-Audio, Kimi-Audio)."""
_TEXT_ONLY = (
    "tokenizer",
    "vocab",
    "merges",
    "added_tokens",
    "special_tokens_map",
    "chat_template",
    "tekken",
    "generation_config",
)
"""Beginnings of files that decide which tokens there are, which hashes say themselves."""
_SAME_FILES = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
    }
)
"""Load formats that read the same tensors out of the same directory."""
_LOCAL_FORMATS = _SAME_FILES | {
    "pt",
    "npcache",
    "mistral",
    "bitsandbytes",
    "sharded_state",
    "runai_streamer_sharded",
}


class _Tensor(msgspec.Struct):
    """What a header says of one; or what it has beside them."""

    data_offsets: tuple[_Place, _Place] = (0, 0)


_HEADER_DECODER = msgspec.json.Decoder(dict[str, _Tensor])


def weights_digest(model_dir: Path) -> str:
    """
    Return a digest of a model directory that is the same in every copy of it.

    Takes configuration and code whole. Of a safetensors file it takes name, size, header
    and beginning, middle and end of each tensor, so that a tensor that was trained
    further is seen without reading all of it; weights in other formats are read whole.
    """
    return _digest(model_dir, _counts)


def config_digest(model_dir: Path) -> str:
    """
    Return a digest of a model directory's configuration and code alone.

    All JSON counts that does not only say how text becomes tokens: which file decides
    how an image is cut, or how weights were quantised, differs from model to model.
    """
    return _digest(model_dir, _is_config)


def is_changed_since(model_dir: Path, moment_ns: int) -> bool:
    """Return whether a file that counts was changed at a moment or later, as far as it shows."""
    return any(
        last_change_ns(place, filter(_counts, place.iterdir())) >= moment_ns
        for place in _places(model_dir)
    )


def weights_name(
    model: Any,  # noqa: ANN401 - vLLM's
    load: Any,  # noqa: ANN401 - vLLM's
    revision: str,
    began_ns: int | None = None,
) -> str:
    """
    Name the weights and the files that say what is done with them.

    The engine has loaded them by now, and what is in a directory now may be another thing: what
    was written there since the engine began is refused.

    Args:
        model: vLLM's ModelConfig.
        load: vLLM's LoadConfig.
        revision: The operator's name for them; empty to derive it.
        began_ns: Before which no weights were loaded, on the clock of files; None: nobody knows.

    Raises:
        ConfigError: They cannot be told apart from others; names ``weights_revision``.
    """
    is_dummy = load.load_format == "dummy"
    if revision:
        return f"dummy/{model.seed}/{revision}" if is_dummy else revision
    name = _read_name(model, load, model.model, model.revision, began_ns)
    if is_dummy:
        name = f"dummy/{model.seed}/{name}"
    elif load.load_format not in _SAME_FILES:
        name += f"/{load.load_format}"
    config = getattr(model, "hf_config", None)
    for part in filter(None, (getattr(config, each, None) for each in _PARTS)):
        name += f"/{_read_name(model, load, part, None, began_ns)}"
    if model.hf_config_path:
        apart = _directory(model.hf_config_path, None, None)
        if apart is None:
            raise _unnamed(model, f"no directory holds {model.hf_config_path}")
        name += f"/{config_digest(apart)}"
    return name


def _read_name(
    model: Any,  # noqa: ANN401 - vLLM's
    load: Any,  # noqa: ANN401 - vLLM's
    source: str,
    revision: str | None,
    began_ns: int | None,
) -> str:
    """Name what the engine reads of one directory or repository, or refuse it."""
    place = _directory(source, revision, load.download_dir)
    if place is None:
        them = "them" if source == model.model else source
        raise _unnamed(model, f"no directory holds {them}")
    if load.load_format == "dummy":
        return config_digest(place)
    if problem := _hidden(model, load, place):
        raise _unnamed(model, problem)
    name = weights_digest(place)
    is_given = place == Path(source)  # else the engine may have downloaded it
    if began_ns is not None and is_given and is_changed_since(place, began_ns):
        raise ConfigError(
            "weights_revision",
            "",
            f"files of {place} were changed while the engine was starting, which may "
            "have loaded what was there before",
            "Start it again. Give each version a directory of its own, or a name by "
            "kv_connector_extra_config.weights_revision.",
        )
    return name


def _hidden(model: Any, load: Any, place: Path) -> str:  # noqa: ANN401 - vLLM's
    """Return why a directory does not show the weights; empty if it does."""
    if model.model_weights:
        return f"they lie in {model.model_weights}"
    if load.load_format not in _LOCAL_FORMATS:
        return f"load_format={load.load_format} may read them from elsewhere"
    if not any(map(_is_weights, place.iterdir())):
        return f"{place} holds none"
    return ""


def _unnamed(model: Any, problem: str) -> ConfigError:  # noqa: ANN401 - vLLM's
    return ConfigError(
        "weights_revision",
        "",
        f"the weights of {model.model} cannot be told apart from other revisions: "
        f"{problem}",
        "Set kv_connector_extra_config.weights_revision to a name of this revision, and "
        "to another one whenever they change, or the configuration beside them does.",
    )


def _directory(name: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the directory of a model that is given by path, or by its name on the hub."""
    if (path := Path(name)).exists():
        return path if path.is_dir() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for cache_dir in (cache, None):
        for file in ("config.json", "params.json"):
            try:
                found = try_to_load_from_cache(name, file, cache_dir, revision)
            except HFValidationError:  # an address, or a path that is not there
                return None
            if isinstance(found, str):
                return Path(found).parent
    return None


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES


def _is_config(path: Path) -> bool:
    return path.suffix in _CONFIG_SUFFIXES and not path.name.startswith(_TEXT_ONLY)


def _counts(path: Path) -> bool:
    return _is_weights(path) or _is_config(path)


def _places(model_dir: Path) -> list[Path]:
    """Return a model's directory, and those in it of which the engine reads as well."""
    return [
        model_dir,
        *(each for each in map(model_dir.joinpath, _BELOW) if each.is_dir()),
    ]


def _digest(model_dir: Path, counts: Callable[[Path], bool]) -> str:
    digest = hashlib.sha256()
    for path in (
        each for place in _places(model_dir) for each in sorted(place.iterdir())
    ):
        if not counts(path) or not path.is_file():
            continue
        name = path.relative_to(model_dir)
        digest.update(f"{name} {path.stat().st_size}\n".encode())
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
    except DECODE_ERRORS:
        return False
    digest.update(header)
    for name in sorted(tensors):
        start, stop = tensors[name].data_offsets
        for at in (start, (start + stop) // 2, stop - _SAMPLE_BYTES):
            file.seek(8 + length + max(start, at))
            digest.update(file.read(_SAMPLE_BYTES))
    return True
