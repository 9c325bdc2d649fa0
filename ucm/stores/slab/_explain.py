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
from ucm.stores.slab._classes import ClassIndex
from ucm.stores.slab._files import INDEX_NAME, MANIFEST, Directory, Manifest, path_error
from ucm.stores.slab._keyspaces import read_all

__all__ = ["Explanation", "explain"]

_LOCK_S = 1.0
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
        StoreUnavailableError: Somebody kept an index locked, or its files went.
    """
    with _opened(path) as directory, contextlib.ExitStack() as stack:
        indexes = [stack.enter_context(each.closing()) for each in _indexes(directory)]
        told = [opened.index.fate_of(key) for opened in indexes]
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
                opened.index.fate_of(under(digest, key)).fate is Fate.STORED
                for opened in indexes
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


def _indexes(directory: Directory) -> Iterator[ClassIndex]:
    manifest = Manifest.read(directory)
    if manifest is None:
        raise path_error(directory.root, f"it has no {MANIFEST}")
    for name in sorted(directory.names()):
        match = INDEX_NAME.fullmatch(name)
        geometry = match and manifest.of_class(int(match[1]))
        if match and geometry and name == manifest.index_of(int(match[1])):
            yield ClassIndex.open(directory, name, geometry, _LOCK_S, at_once=False)


def _foremost(told: list[Told]) -> Told:
    """Return what counts of what several classes tell."""

    def rank(each: Told) -> tuple[float, float]:
        rank = _RANKS.index(each.fate) if each.fate in _RANKS else 1.5
        return rank, each.age_s or 0.0

    return min(told, key=rank, default=Told(Fate.NEVER))
