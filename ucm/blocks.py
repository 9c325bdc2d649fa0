# SPDX-License-Identifier: Apache-2.0
"""
Ids, keys and spans: the values that name KV blocks.

A block key is canonical bytes. The engine's block hash says *which tokens* a block
holds; the key space says under which conditions its bytes may be reused; group and
shard say which part of the block the bytes are. Nothing here depends on the process,
its hash seed or its Python version, so two processes that may share bytes build the
same key, and no others do.

Packed form, all integers big endian::

    byte 0       schema version
    bytes 1-16   key space digest (first 16 bytes of SHA-256)
    bytes 17-18  group id
    bytes 19-20  shard id
    bytes 21-    block hash of the engine, 8 to 64 bytes
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NewType, cast

import attrs

from ucm.errors import KeyFormatError

if TYPE_CHECKING:  # keys are made where there is no numpy, too
    from ucm.uses import Uses

__all__ = [
    "KEY_SCHEMA_VERSION",
    "BlockHash",
    "BlockId",
    "BlockKey",
    "BlockSpan",
    "GroupId",
    "KeyPacker",
    "KeySpace",
    "Owner",
    "PackedKey",
    "RequestId",
    "RowId",
    "ShardId",
    "TransferId",
    "block_of",
    "digest_of",
    "group_of",
    "hash_of",
    "id_in_log",
    "keyspace_prefix",
    "named",
    "shard_of",
    "under",
    "whose",
]

BlockId = NewType("BlockId", int)
"""Slot of a block in the engine's paged pool."""
GroupId = NewType("GroupId", int)
"""Index of a KV cache group: layers that share one block table."""
RowId = NewType("RowId", int)
"""Index of a storage row, dense from 0."""
ShardId = NewType("ShardId", int)
"""Which rank's part of a block."""
RequestId = NewType("RequestId", str)
"""The engine's name of a request; reused by some engines."""
TransferId = NewType("TransferId", int)
"""Number of one ticket; never reused within a scheduler process."""
BlockHash = NewType("BlockHash", bytes)
"""The engine's hash of a block's tokens and all tokens before it."""
PackedKey = NewType("PackedKey", bytes)
"""A ``BlockKey`` in its canonical bytes."""

KEY_SCHEMA_VERSION = 2
_HEADER = struct.Struct(">B16sHH")
_SHARD = _HEADER.size - 2
_DIGEST_BYTES = 16
_MIN_HASH_BYTES, _MAX_HASH_BYTES = 8, 64
_NAMED = 4
_MOST_TOLD = 512
"""How many of the requests of one ticket the log names."""


def _is_text(
    instance: object, attribute: "attrs.Attribute[str]", value: object
) -> None:
    if not isinstance(value, str) or not value:
        raise KeyFormatError(
            f"key space field {attribute.name} must be text, not empty"
        )
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise KeyFormatError(
            f"key space field {attribute.name} is no text that can be written: {exc}"
        ) from exc


@attrs.frozen(kw_only=True)
class KeySpace:
    """
    All that must be equal for stored bytes to be interchangeable.

    The engine's block hashes already carry tokens, adapters, images and cache salt;
    they carry none of these fields.
    """

    model: str = attrs.field(validator=_is_text)
    """The model's name or path as configured."""
    weights: str = attrs.field(validator=_is_text)
    """Revision or content digest of the weights and of the model configuration."""
    kv_dtype: str = attrs.field(validator=_is_text)
    """Element type of the KV cache, quantisation included."""
    layout: str = attrs.field(validator=_is_text)
    """Fingerprint of the KV layout (``KVLayout.fingerprint``)."""
    block_tokens: int = attrs.field(validator=attrs.validators.gt(0))
    """Tokens covered by one block hash."""
    parallel: str = attrs.field(validator=_is_text)
    """Shape of the ranks that a block is cut over, such as ``tp=2,pp=1``."""
    hash_algorithm: str = attrs.field(validator=_is_text)
    """Algorithm of the engine's block hashes."""
    engine: str = attrs.field(validator=_is_text)
    """The engine and what of its build decides the bytes, such as ``vllm/cpu/vec``."""
    settings: str = attrs.field(default="{}", validator=_is_text)
    """What is set of all else that decides the bytes, as JSON."""

    def encode(self) -> bytes:
        """Return the canonical bytes: each field as length-prefixed name and value."""
        parts = [struct.pack(">B", KEY_SCHEMA_VERSION)]
        for field in sorted(attrs.fields_dict(type(self))):
            for text in (field, str(getattr(self, field))):
                data = text.encode()
                parts.append(struct.pack(">I", len(data)) + data)
        return b"".join(parts)

    @property
    def digest(self) -> bytes:
        """The 16 bytes by which keys name this key space."""
        return hashlib.sha256(self.encode()).digest()[:_DIGEST_BYTES]

    def diff(self, other: "KeySpace") -> dict[str, tuple[object, object]]:
        """Return the fields that differ, each with both values."""
        mine, theirs = attrs.asdict(self), attrs.asdict(other)
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}


@attrs.frozen
class BlockKey:
    """
    One stored part of one block.

    Raises:
        KeyFormatError: A field is out of range; the caller built a wrong key.
    """

    keyspace_digest: bytes
    group_id: GroupId
    shard_id: ShardId
    block_hash: BlockHash
    version: int = KEY_SCHEMA_VERSION

    def __attrs_post_init__(self) -> None:
        if len(self.keyspace_digest) != _DIGEST_BYTES:
            raise KeyFormatError(
                f"key space digest has {len(self.keyspace_digest)} bytes, not "
                f"{_DIGEST_BYTES}"
            )
        if not 0 <= self.group_id <= 0xFFFF or not 0 <= self.shard_id <= 0xFFFF:
            raise KeyFormatError(
                f"group {self.group_id} or shard {self.shard_id} is not in 0..65535"
            )
        if not _MIN_HASH_BYTES <= len(self.block_hash) <= _MAX_HASH_BYTES:
            raise KeyFormatError(
                f"block hash has {len(self.block_hash)} bytes, not "
                f"{_MIN_HASH_BYTES} to {_MAX_HASH_BYTES}"
            )
        if self.version != KEY_SCHEMA_VERSION:
            raise KeyFormatError(
                f"key schema version {self.version} is not {KEY_SCHEMA_VERSION}"
            )

    def pack(self) -> PackedKey:
        """Return the canonical bytes."""
        header = _HEADER.pack(
            self.version, self.keyspace_digest, self.group_id, self.shard_id
        )
        return PackedKey(header + self.block_hash)

    @classmethod
    def unpack(cls, data: bytes) -> "BlockKey":
        """
        Read canonical bytes.

        Raises:
            KeyFormatError: *data* is no key of this schema version.
        """
        if len(data) < _HEADER.size:
            raise KeyFormatError(f"{len(data)} bytes are too few for a block key")
        version, digest, group_id, shard_id = _HEADER.unpack_from(data)
        return cls(
            digest,
            GroupId(group_id),
            ShardId(shard_id),
            BlockHash(bytes(data[_HEADER.size :])),
            version,
        )

    def explain(self, keyspace: KeySpace | None = None) -> dict[str, object]:
        """
        Return what each part of the key says, for people.

        Args:
            keyspace: The key space to compare with; its fields are listed when the
                digest is its own, otherwise ``keyspace_matches`` is False.
        """
        told: dict[str, object] = {
            "version": self.version,
            "keyspace_digest": self.keyspace_digest.hex(),
            "group_id": self.group_id,
            "shard_id": self.shard_id,
            "block_hash": self.block_hash.hex(),
        }
        if keyspace is not None:
            matches = keyspace.digest == self.keyspace_digest
            told["keyspace_matches"] = matches
            if matches:
                told["keyspace"] = attrs.asdict(keyspace)
        return told


class KeyPacker:
    """
    Packs the keys of one key space, group and shard; the fast path of lookups.

    Equal to ``BlockKey(...).pack()`` for each hash.
    """

    __slots__ = ("prefix",)

    def __init__(
        self, keyspace_digest: bytes, group_id: GroupId, shard_id: ShardId
    ) -> None:
        probe = BlockKey(
            keyspace_digest, group_id, shard_id, BlockHash(bytes(_MIN_HASH_BYTES))
        )
        self.prefix = probe.pack()[: _HEADER.size]

    def pack(self, hashes: Iterable[bytes]) -> list[PackedKey]:
        """Return one packed key per hash, in order."""
        prefix = self.prefix  # and no call per key
        return cast("list[PackedKey]", [prefix + each for each in hashes])


def keyspace_prefix(keyspace_digest: bytes) -> bytes:
    """Return the bytes that all packed keys of a key space start with."""
    return struct.pack(">B", KEY_SCHEMA_VERSION) + keyspace_digest


def digest_of(key: PackedKey) -> bytes:
    """Return the key space digest of a packed key."""
    return key[1 : 1 + _DIGEST_BYTES]


def shard_of(key: PackedKey) -> ShardId:
    """Return which part of its block a packed key names."""
    return ShardId(int.from_bytes(key[_SHARD : _HEADER.size]))


def group_of(key: PackedKey) -> GroupId:
    """Return the group of the block that a packed key names."""
    return GroupId(int.from_bytes(key[_SHARD - 2 : _SHARD]))


def hash_of(key: PackedKey) -> BlockHash:
    """Return the hash under which the block that a packed key names is stored."""
    return BlockHash(key[_HEADER.size :])


def block_of(key: PackedKey) -> bytes:
    """Return what the keys of all parts of a block have in common, and no others."""
    return key[:_SHARD] + key[_HEADER.size :]


def under(keyspace_digest: bytes, key: PackedKey) -> PackedKey:
    """Return the key of the same part of the same block in another key space."""
    return PackedKey(keyspace_prefix(keyspace_digest) + key[1 + _DIGEST_BYTES :])


@attrs.frozen
class BlockSpan:
    """
    Consecutive blocks of one request in one group, with their keys.

    What travels through a pipeline: megabytes, never one block of many. A save's blocks
    have their *uses* with them.
    """

    group_id: GroupId
    block_ids: tuple[BlockId, ...]
    keys: tuple[PackedKey, ...]
    uses: "Uses | None" = None

    def __attrs_post_init__(self) -> None:
        if not self.block_ids or len(self.block_ids) != len(self.keys):
            raise KeyFormatError(
                f"a span needs as many keys as blocks and at least one: "
                f"{len(self.block_ids)} blocks, {len(self.keys)} keys"
            )

    def __len__(self) -> int:
        return len(self.block_ids)


class Owner(NamedTuple):
    """
    A life of a request, and consecutive blocks of it in a ticket.

    Args:
        request_id: Whose blocks.
        generation: Which life of the request; ids are used again.
        num_blocks: How many; at least one.
        used_ns: When the last of them counts as used, as ``Uses`` says; 0: now. Each one
            before it counts as used later, by as many ns as a block has tokens.
        tenant: Whose share of the store they take; 0: nobody's.
    """

    request_id: str
    generation: int
    num_blocks: int
    used_ns: int = 0
    tenant: int = 0

    @property
    def life(self) -> tuple[str, int]:
        """Request id and generation, by which holds are found."""
        return self.request_id, self.generation


def whose(owners: Sequence[Owner]) -> dict[str, object]:
    """Return what the log says of a ticket's owners: the one, or some and how many."""
    if len(owners) > 1:
        return named(owners)
    owner = owners[0]
    told = id_in_log(owner.request_id)
    return {"request_id": told, "generation": owner.generation}


def id_in_log(request_id: str) -> str:
    """Return an id as lines have it: a client may choose one of many kilobytes."""
    if len(request_id) <= _MOST_TOLD:
        return request_id
    return request_id[: _MOST_TOLD - 1] + "\N{HORIZONTAL ELLIPSIS}"


def named(owners: Sequence[Owner]) -> dict[str, object]:
    """Return some owners of a ticket, and how many there are."""
    names = [id_in_log(owner.request_id) for owner in owners[:_NAMED]]
    return {"requests": names, "num_requests": len(owners)}
