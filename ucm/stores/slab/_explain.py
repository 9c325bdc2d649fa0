# SPDX-License-Identifier: Apache-2.0
"""What a slab knows of one block, for who has no engine: reads, and changes nothing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from ucm.blocks import KeySpace, PackedKey, digest_of, under
from ucm.errors import StoreError
from ucm.fates import Fate, Told
from ucm.stores.slab._files import Directory, path_error
from ucm.stores.slab._keyspaces import read_all
from ucm.stores.slab._peers import open_peers

__all__ = ["Explanation", "explain"]

_RANKS = (Fate.STORED, Fate.WRITING, Fate.NEVER, Fate.UNKNOWN)
"""Of several classes the first that says so counts; what is gone stands between."""


@attrs.frozen
class Explanation:
    """
    What is known of a block.

    Args:
        told: What has become of it.
        keyspace: Whose key it is, if the slab has its description.
        others: Key spaces under which the same block is stored: by digest, what differs,
            each field with the key's own value and theirs. Nothing is said of a field
            if *keyspace* is not known.
    """

    told: Told
    keyspace: KeySpace | None
    others: dict[bytes, dict[str, tuple[object, object]]]


def explain(path: Path, key: PackedKey) -> Explanation:
    """
    Say what has become of a block in the slab at *path*, which may be in use.

    Raises:
        ConfigError: There is no slab that can be read.
        KeyFormatError: *key* is longer than any key.
    """
    with _opened(path) as directory:
        peers = open_peers(directory)
        told = [peer.fate_of(key) for peer in peers]
        try:
            described = read_all(directory)
        except StoreError:  # a damaged description takes nothing from the rest
            described = {}
        mine = described.get(digest_of(key))
        others = {
            digest: {} if mine is None else mine.diff(theirs)
            for digest, theirs in described.items()
            if digest != digest_of(key)
            and any(
                peer.fate_of(under(digest, key)).fate is Fate.STORED for peer in peers
            )
        }
    return Explanation(_foremost(told), mine, others)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Directory]:
    root = path.absolute()
    try:
        fd = os.open(root, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:  # ValueError: a NUL
        raise path_error(root, f"it cannot be opened: {exc}") from exc
    try:
        directory = Directory(root, fd)
        directory.check()
        yield directory
    finally:
        os.close(fd)


def _foremost(told: list[Told]) -> Told:
    """Return what counts of what several classes tell."""

    def rank(each: Told) -> tuple[float, float]:
        rank = _RANKS.index(each.fate) if each.fate in _RANKS else 1.5
        return rank, each.age_s or 0.0

    return min(told, key=rank, default=Told(Fate.NEVER))
