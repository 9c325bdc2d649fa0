# SPDX-License-Identifier: Apache-2.0
"""
Keys and key spaces for people: what each part says, and in what two of them differ. Pure.

Two engines that find nothing of each other have different key spaces; which field differs
says which setting to look at.
"""

import json
from collections.abc import Iterable, Mapping

import attrs
import msgspec

from ucm.blocks import BlockKey, KeySpace
from ucm.decoding import DECODE_ERRORS
from ucm.errors import KeyFormatError

__all__ = [
    "MEANINGS",
    "Difference",
    "differences",
    "parse_key",
    "parse_keyspace",
    "pick",
]

MEANINGS: dict[str, str] = {
    "model": "name of the model's directory or repository",
    "weights": "content of the weights, or weights_revision; of a draft model as well",
    "kv_dtype": "KV cache type, model type and quantization: --kv-cache-dtype, --dtype",
    "layout": "layers, block size and heads of each rank, as a fingerprint",
    "block_tokens": "tokens of one block hash: --block-size",
    "parallel": "how a block is cut over ranks: --tensor-parallel-size and its like",
    "hash_algorithm": "--prefix-caching-hash-algo, and behind / PYTHONHASHSEED",
    "engine": "engine, device and attention back end",
    "settings": "all else that decides bytes: rope, adapters, multimodal, loader",
}
"""What each field of a key space comes from."""
_MOST_HEX = 400
_ABSENT = "(not set)"


@attrs.frozen
class Difference:
    """One thing in which two key spaces differ."""

    field: str
    first: str
    second: str
    meaning: str


def parse_key(text: str) -> BlockKey:
    """
    Return a key that was written in hexadecimal digits.

    Raises:
        KeyFormatError: It is none.
    """
    digits = text.strip().removeprefix("0x")
    try:
        data = bytes.fromhex(digits if len(digits) <= _MOST_HEX else "")
    except ValueError as exc:
        raise KeyFormatError("a key is written in hexadecimal digits") from exc
    return BlockKey.unpack(data)


def parse_keyspace(text: str) -> KeySpace:
    """
    Return a key space that was written as JSON, as a slab describes it.

    Raises:
        KeyFormatError: It is none.
    """
    try:
        return msgspec.json.decode(text, type=KeySpace)
    except (*DECODE_ERRORS, KeyFormatError) as exc:
        raise KeyFormatError(f"no key space: {exc}") from exc


def pick(name: str, known: Mapping[bytes, KeySpace]) -> KeySpace | None:
    """
    Return the key space that a name means, None if none or several do.

    Args:
        name: The beginning of its digest, at least 4 digits, or a key of it.
        known: By digest.
    """
    wanted = name.strip().lower()
    try:
        wanted = parse_key(name).keyspace_digest.hex()
    except KeyFormatError:
        if len(wanted) < 4:
            return None
    found = [known[digest] for digest in known if digest.hex().startswith(wanted)]
    return found[0] if len(found) == 1 else None


def differences(first: KeySpace, second: KeySpace) -> list[Difference]:
    """Return in what two key spaces differ, down to the one setting."""
    return [
        Difference(f"{field}{name}", one, other, MEANINGS[field])
        for field, values in first.diff(second).items()
        for name, one, other in _parts(*map(str, values))
    ]


def _parts(first: str, second: str) -> Iterable[tuple[str, str, str]]:
    """Yield the parts of a value that differ, by name; the whole if it has none."""
    one, other = _named(first), _named(second)
    if not one or not other:
        yield "", first, second
        return
    for name in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(name, _ABSENT), other.get(name, _ABSENT)
        if mine != theirs:
            yield f".{name}", mine, theirs


def _named(text: str) -> dict[str, str]:
    """Return the parts of ``{"a": 1}`` or ``a=1,b=2``; nothing of anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        pairs = [part.partition("=") for part in text.split(",")]
        return {name: value for name, sign, value in pairs if sign}
    if not isinstance(found, dict):
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in found.items()
    }
