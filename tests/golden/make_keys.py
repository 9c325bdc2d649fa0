# SPDX-License-Identifier: Apache-2.0
"""
Write key spaces and packed keys with their bytes, as JSON.

Run ``python tests/golden/make_keys.py > tests/golden/keys.json`` only together with a
new ``KEY_SCHEMA_VERSION``: other bytes make every stored block unreachable. Needs
``attrs`` and nothing else.
"""

import hashlib
import itertools
import json
import sys

import attrs

from ucm.blocks import BlockHash, BlockKey, GroupId, KeySpace, ShardId

PLAIN = KeySpace(
    model="meta-llama/Llama-3.1-8B",
    weights="0e9e39f249a16976918f6564b8830bc894c89659",
    kv_dtype="bfloat16",
    layout="5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
    block_tokens=16,
    parallel="tp=2,pp=1",
    hash_algorithm="sha256",
    engine="vllm/cuda/flash",
)
KEYSPACES = [
    PLAIN,
    attrs.evolve(PLAIN, model="/models/模型 é", block_tokens=1 << 40),
    attrs.evolve(PLAIN, engine="x" * 300, parallel="tp=1\npp=1"),
]
HASHES = [
    bytes(8),
    hashlib.sha256(b"tokens").digest(),
    bytes(range(192, 256)),
]
PLACES = [(0, 0), (1, 2), (255, 256), (65535, 65535)]


def make_vectors() -> dict[str, object]:
    """Return every key space and every key with its bytes in hexadecimal."""
    return {
        "keyspaces": [
            {
                "fields": attrs.asdict(keyspace),
                "encoded": keyspace.encode().hex(),
                "digest": keyspace.digest.hex(),
            }
            for keyspace in KEYSPACES
        ],
        "keys": [
            {
                "keyspace_digest": keyspace.digest.hex(),
                "group_id": group_id,
                "shard_id": shard_id,
                "block_hash": block_hash.hex(),
                "packed": BlockKey(
                    keyspace.digest,
                    GroupId(group_id),
                    ShardId(shard_id),
                    BlockHash(block_hash),
                )
                .pack()
                .hex(),
            }
            for keyspace, block_hash, (group_id, shard_id) in itertools.product(
                KEYSPACES, HASHES, PLACES
            )
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(make_vectors(), indent=1) + "\n")
