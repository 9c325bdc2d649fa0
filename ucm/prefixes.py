# SPDX-License-Identifier: Apache-2.0
"""
From a host's tokens, model and memory to keys, key space and layout. Pure.

A key names a whole block of tokens together with all tokens before it: it is a SHA-256
over the key before it, or over the key space and the salt for the first block, and over
the block's tokens. So equal keys mean equal prefixes in equal conditions, and nothing of
another tenant's salt can be guessed or found.

What is hashed, integers little endian::

    root     "ucm.prefix.v1", 0, digest of the key space (16 bytes), salt
    block    key before it, or root (32 bytes), tokens (8 bytes each)
"""

import hashlib
import json
import numbers
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from ucm.blocks import GroupId, KeySpace, RowId
from ucm.errors import KeyFormatError, LayoutError
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout

__all__ = [
    "ALGORITHM",
    "Place",
    "PrefixHasher",
    "keyspace_of",
    "paged_layout",
    "tenant_of",
]

ALGORITHM: Final = "ucm.prefix.v1"
"""``KeySpace.hash_algorithm`` of keys that ``PrefixHasher`` makes."""
_KEY_BYTES: Final = 32
_MOST_BLOCKS: Final = 1 << 32
_LATEST_NS: Final = 1 << 62
"""Less than what 64 bits hold by more than any prefix is deep."""


def _up_to(most: int) -> Callable[[object, "attrs.Attribute[int]", object], None]:
    """Return what refuses all but whole numbers from 0 on."""

    def check(_: object, field: "attrs.Attribute[int]", value: object) -> None:
        told = f"{field.name}={value!r} is no whole number from 0 to {most}"
        if not isinstance(value, numbers.Integral):
            raise TypeError(told)
        if not 0 <= int(value) <= most:
            raise ValueError(told)

    return check


@attrs.frozen(kw_only=True)
class Place:
    """
    Where in a prefix some blocks are, and whose: what a store makes room by.

    Args:
        first: Index within its prefix of the first of the blocks.
        began_ns: When the prefix counts as used, on ``time.monotonic_ns``; 0: now. Give
            all parts of a prefix the same: then room is made from its end.
        tenant: Whose share of the store the blocks take, from 1 to 2**32 - 1; 0:
            nobody's. ``tenant_of`` makes it of a salt.
    """

    first: int = attrs.field(default=0, validator=_up_to(_MOST_BLOCKS))
    began_ns: int = attrs.field(default=0, validator=_up_to(_LATEST_NS))
    tenant: int = attrs.field(default=0, validator=_up_to(0xFFFFFFFF))


def tenant_of(salt: bytes) -> int:
    """
    Return whose the blocks of a salt are: a number for ``Place``, 0 without a salt.

    Raises:
        KeyFormatError: It is no bytes.
    """
    _check_bytes("salt", salt)
    if not salt:
        return 0
    return int.from_bytes(hashlib.sha256(salt).digest()[:4], "big") or 1


class PrefixHasher:
    """
    Makes the keys of prompts, one for each whole block.

    Keys depend on nothing but what is given: not on the process, the platform or the
    version of Python. Safe for any thread.

    Args:
        keyspace: In which the blocks may be reused; ``keyspace_of`` makes it.
        block_tokens: Tokens of a block; the key space's.

    Raises:
        KeyFormatError: The key space is for keys of another making, or for blocks of
            another size.
    """

    __slots__ = ("_block_tokens", "_root")

    def __init__(self, keyspace: KeySpace, block_tokens: int) -> None:
        if problem := _unlike("keyspace", keyspace, KeySpace):
            raise KeyFormatError(f"{problem}: build it with ucm.keyspace_of")
        if keyspace.hash_algorithm != ALGORITHM:
            raise KeyFormatError(
                f"the key space is for keys by {keyspace.hash_algorithm!r}, not by "
                f"{ALGORITHM!r}: build it with ucm.keyspace_of"
            )
        if keyspace.block_tokens != block_tokens:
            raise KeyFormatError(
                f"block_tokens={block_tokens!r}, and {keyspace.block_tokens} in the key "
                "space"
            )
        self._block_tokens = keyspace.block_tokens  # numpy's numbers may be small
        self._root = hashlib.sha256(ALGORITHM.encode() + b"\0" + keyspace.digest)

    def keys(
        self,
        tokens: Iterable[int],
        *,
        salt: bytes = b"",
        after: bytes = b"",
    ) -> list[bytes]:
        """
        Return a key of 32 bytes for each whole block; tokens behind the last have none.

        Args:
            tokens: ids from 0 to 2**63 - 1, from the first of the prompt on, or those
                that follow the block of key *after*.
            salt: What else must be equal for blocks to be reused, the same for all
                blocks of a prompt: tenant, adapter, digests of its images. Whoever does
                not know it finds nothing.
            after: The last key that is known of the prompt, which carries its salt.

        Raises:
            KeyFormatError: A token is no such number, the salt is no bytes, *after* no
                key, or there is a salt beside it.
        """
        _check_bytes("salt", salt)
        _check_bytes("after", after)
        if after and (salt or len(after) != _KEY_BYTES):
            raise KeyFormatError("after is a key of 32 bytes, and carries its salt")
        data = _packed(tokens)
        key = after
        if not key:
            root = self._root.copy()
            root.update(salt)
            key = root.digest()
        keys = []
        step = self._block_tokens * 8
        for stop in range(step, len(data) + 1, step):
            digest = hashlib.sha256(key)
            digest.update(data[stop - step : stop])
            key = digest.digest()
            keys.append(key)
        return keys


def _unlike(name: str, given: object, kind: type) -> str:
    """Return what an argument is, if it is of another kind; else nothing."""
    return "" if isinstance(given, kind) else f"{name} is {type(given).__name__}"


def _check_bytes(name: str, given: object) -> None:
    """Refuse a text, without its value, which may be a secret."""
    if not isinstance(given, bytes):
        told = type(given).__name__
        raise KeyFormatError(f"{name} is {told}, not bytes: a text needs .encode()")


def _packed(tokens: Iterable[int]) -> memoryview:
    """Return tokens as 8 bytes each."""
    try:
        # An array takes bytes for numbers of eight of them each.
        each = tuple(tokens) if isinstance(tokens, bytes | bytearray) else tokens
        packed = array("q", each)
    except (TypeError, OverflowError) as exc:
        raise KeyFormatError(f"a token is no 64-bit integer: {exc}") from exc
    if packed and min(packed) < 0:
        raise KeyFormatError(f"token {min(packed)} is negative")
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def keyspace_of(
    layout: KVLayout,
    *,
    model: str,
    weights: str,
    kv_dtype: str,
    engine: str,
    parallel: str = "shards=1",
    settings: Mapping[str, object] | None = None,
) -> KeySpace:
    """
    Return the key space of a host: all that must be equal for bytes to be reused.

    When in doubt, say it: what is equal costs nothing, and what is left out may give a
    request the blocks of another model.

    Args:
        layout: Of the host's blocks; shape and names of layers count.
        model: Its name or path.
        weights: Revision or digest of the weights and of the model's configuration.
        kv_dtype: Element type of the blocks, quantisation included, such as
            ``bfloat16``.
        engine: The host and what of its build decides the bytes: kernels, page format,
            version if that may change them.
        parallel: How a block is cut over processes, as ``tp=2``; each gives its number
            as ``shard`` to ``ucm.open``.
        settings: All else that decides the bytes, such as rotary scaling; plain JSON.

    Raises:
        KeyFormatError: A field is empty, or *settings* is no plain JSON.
    """
    try:
        told = json.dumps(dict(settings or {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise KeyFormatError(f"settings are no plain JSON: {exc}") from exc
    return KeySpace(
        model=model,
        weights=weights,
        kv_dtype=kv_dtype,
        layout=layout.fingerprint(),
        block_tokens=layout.hash_block_tokens,
        parallel=parallel,
        hash_algorithm=ALGORITHM,
        engine=engine,
        settings=told,
    )


def paged_layout(
    page_bytes: Mapping[str, int],
    *,
    block_tokens: int,
    engine: str = "host",
) -> KVLayout:
    """
    Return the layout of a host with one block table, whose layers attend to all tokens.

    Args:
        page_bytes: Name of each layer to the bytes of one block of it, in the order of
            execution.
        block_tokens: Tokens of a block.
        engine: What else decides the meaning of the bytes, such as the order of
            dimensions in a page.

    Raises:
        LayoutError: There is no layer, or one without a number of bytes above 0.
        ValueError: *block_tokens* is not positive.
    """
    if problem := _unlike("page_bytes", page_bytes, Mapping):
        raise LayoutError(f"{problem}: give the bytes of each layer's block")
    rows = tuple(
        _row(RowId(row), name, nbytes)
        for row, (name, nbytes) in enumerate(page_bytes.items())
    )
    group = GroupLayout(
        group_id=GroupId(0),
        kind=GroupKind.FULL,
        block_tokens=block_tokens,
        rows=rows,
    )
    return KVLayout(groups=(group,), hash_block_tokens=block_tokens, engine_tag=engine)


def _row(row_id: RowId, name: str, nbytes: int) -> RowLayout:
    try:
        return RowLayout(row_id=row_id, page_bytes=nbytes, layer_names=(name,))
    except (TypeError, ValueError) as exc:
        is_short = isinstance(nbytes, str | numbers.Number)
        told = repr(nbytes) if is_short else type(nbytes).__name__
        raise LayoutError(
            f"layer {name!r} has {told:.40} for the bytes of a block: give a whole number "
            "above 0, such as those of array[0]"
        ) from exc
