# SPDX-License-Identifier: Apache-2.0
"""What the tests of ``ucm store`` share: asking it, and slabs to ask about."""

from pathlib import Path
from typing import Any

import attrs

from tests.cli.call import call
from ucm.blocks import BlockHash, BlockKey, GroupId, KeySpace, PackedKey, ShardId
from ucm.prefixes import PrefixHasher, keyspace_of, paged_layout

__all__ = ["CHAT", "CODE", "TOKENS", "ask", "keys_of", "snapshot", "tell"]

_LAYOUT = paged_layout({"layer": 64}, block_tokens=4)
CHAT = keyspace_of(_LAYOUT, model="chat", weights="1", kv_dtype="u8", engine="tests")
CODE = keyspace_of(_LAYOUT, model="code", weights="1", kv_dtype="u8", engine="tests")
TOKENS = list(range(12))
"""Of which the slab of these tests has all for ``CHAT``, and two blocks for ``CODE``."""


def tell(*arguments: object) -> tuple[int, str, str]:
    """Run the command; return exit code, what it said and its complaint."""
    return attrs.astuple(call(*arguments))


def ask(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run the command, make sure of its exit code, and return its JSON."""
    told = call(*arguments, "--json")
    assert code == told.code, told.err
    answer: dict[str, Any] = told.json()
    return answer


def keys_of(
    keyspace: KeySpace, tokens: list[int], salt: bytes = b"", shard: int = 0
) -> list[PackedKey]:
    """Return the keys of a prompt's blocks, as a host has them."""
    hashes = PrefixHasher(keyspace, keyspace.block_tokens).keys(tokens, salt=salt)
    return [
        BlockKey(keyspace.digest, GroupId(0), ShardId(shard), BlockHash(each)).pack()
        for each in hashes
    ]


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return all that is below a directory: bytes, mode and time of each file."""
    found = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(root))] = (data, info.st_mode, info.st_mtime_ns)
    return found
