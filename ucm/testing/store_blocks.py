# SPDX-License-Identifier: Apache-2.0
"""Keys with bytes that follow from them, and the steps of a save and of a load."""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from ucm.blocks import BlockHash, BlockKey, GroupId, KeySpace, PackedKey, ShardId
from ucm.stores.abc import Store, WriteLease
from ucm.uses import Uses

__all__ = [
    "BLOCK_BYTES",
    "fill",
    "load",
    "make_keys",
    "make_keyspace",
    "payload",
    "save",
    "uses_at",
]

BLOCK_BYTES = 96


def make_keyspace(model: str = "contract") -> KeySpace:
    """Return a key space that differs from others in its model only."""
    return KeySpace(
        model=model,
        weights="w",
        kv_dtype="float16",
        layout="l",
        block_tokens=16,
        parallel="tp=1",
        hash_algorithm="sha256",
        engine="contract",
    )


def make_keys(
    count: int, *, first: int = 0, keyspace: KeySpace | None = None
) -> list[PackedKey]:
    """Return distinct keys, numbered from *first*; equal numbers give equal keys."""
    digest = (keyspace or make_keyspace()).digest
    return [
        BlockKey(
            digest,
            GroupId(0),
            ShardId(0),
            BlockHash(hashlib.sha256(str(number).encode()).digest()),
        ).pack()
        for number in range(first, first + count)
    ]


def payload(key: PackedKey, nbytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes that tests store under a key."""
    return hashlib.shake_128(key).digest(nbytes)


def fill(lease: WriteLease, without: Collection[int] = ()) -> None:
    """Write each granted block's payload and seal it; leave some out."""
    for position, key in enumerate(lease.keys):
        if position not in without:
            block = lease.slots.block(position)
            block[:] = np.frombuffer(payload(key, len(block)), dtype=np.uint8)
            lease.seal(position, position + 1)


def uses_at(moments: Sequence[int], tenant: int = 0) -> Uses:
    """Return uses at these moments, all of one tenant."""
    return Uses(
        np.array(moments, dtype=np.int64),
        np.full(len(moments), tenant, dtype=np.uint32),
    )


def save(
    store: Store,
    keys: Sequence[PackedKey],
    block_bytes: int = BLOCK_BYTES,
    uses: Uses | None = None,
) -> int:
    """Store each key's payload; return how many became visible."""
    with store.reserve(keys, block_bytes, uses) as lease:
        fill(lease)
        return lease.commit()


def load(store: Store, keys: Sequence[PackedKey]) -> list[bytes]:
    """Read blocks as a pipeline does: verify, copy, recheck."""
    with store.read(keys) as lease:
        lease.verify(0, len(keys))
        copies = [lease.slots.block(i).tobytes() for i in range(len(keys))]
        lease.recheck()
        return copies
