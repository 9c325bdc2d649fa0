# SPDX-License-Identifier: Apache-2.0
"""
Write keys of prompts, as JSON.

Run ``python tests/golden/make_prefixes.py > tests/golden/prefixes.json`` only together
with a new ``ALGORITHM``: other keys make every stored block unreachable. It does by hand
what ``ucm.prefixes`` says, and imports the key spaces only.
"""

import hashlib
import json
import struct
import sys

import attrs

from tests.golden.make_keys import PLAIN

NAME = "ucm.prefix.v1"
KEYSPACE = attrs.evolve(PLAIN, hash_algorithm=NAME)
PROMPTS = [
    ("", range(40)),
    ("tenant é", range(40)),
    ("", [0] * 16 + [1] * 16),
    ("", [2**63 - 1] * 16),
    ("", range(15)),
    ("x" * 200, [7] * 33),
]


def keys_of(tokens: list[int], salt: bytes) -> list[bytes]:
    """Return the keys of a prompt, as the text says."""
    key = hashlib.sha256(NAME.encode() + b"\0" + KEYSPACE.digest + salt).digest()
    keys = []
    for start in range(0, len(tokens) - 15, 16):
        part = struct.pack("<16q", *tokens[start : start + 16])
        key = hashlib.sha256(key + part).digest()
        keys.append(key)
    return keys


def make_vectors() -> dict[str, object]:
    """Return every prompt with its keys in hexadecimal."""
    return {
        "keyspace": attrs.asdict(KEYSPACE),
        "prompts": [
            {
                "salt": salt,
                "tokens": list(tokens),
                "keys": [key.hex() for key in keys_of(list(tokens), salt.encode())],
            }
            for salt, tokens in PROMPTS
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(make_vectors(), indent=1) + "\n")
