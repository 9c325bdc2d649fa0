# SPDX-License-Identifier: Apache-2.0
"""
What happens to a slab behind the back of all who use it, and what is stored in one.

For tests of whoever stands above a slab, in this process or another: what is done here
goes past the store's own verbs, so a store that is wrong cannot agree with itself.
"""

import enum
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ucm.blocks import PackedKey
from ucm.stores.slab import Seen, SlabStore, SlabSurvey, verify

__all__ = ["Damage", "damage", "drop", "stored", "unsound"]

_FAST = 1e12
"""Bytes per second: as fast as it goes."""


class Damage(enum.StrEnum):
    """What may happen to a slab."""

    BITS = "bits"
    """A bit of every 512 bytes of each block is another."""
    EXCHANGED = "exchanged"
    """Each block has the bytes of another one."""
    REMOVED = "removed"
    """The directory is gone, with all that is in it."""


def stored(path: Path) -> set[PackedKey]:
    """Return the keys of all blocks that whoever opens the slab would find."""
    with SlabSurvey(path) as survey:
        return {
            blocks.key(at)
            for surveyed in survey.classes
            for blocks in surveyed.blocks()
            for at in range(len(blocks))
        }


def unsound(path: Path) -> list[str]:
    """Read every block; return what is wrong with those that are not as they were saved."""
    with SlabSurvey(path) as survey:
        return [str(wrong) for wrong in verify(survey, Seen(), _FAST)]


def drop(path: Path, keys: Collection[PackedKey]) -> int:
    """Take blocks away, as an eviction does; return how many there were."""
    with SlabSurvey(path) as survey:
        sizes = [surveyed.geometry.slot_bytes for surveyed in survey.classes]
    dropped = 0
    for size in sizes:
        with SlabStore.join(path, block_bytes=size, index_only=True) as store:
            dropped += store.forget(list(keys))
    return dropped


def damage(path: Path, how: Damage, keys: Collection[PackedKey] | None = None) -> int:
    """
    Have that happen to a slab.

    Args:
        path: The slab's directory.
        how: What happens.
        keys: To which blocks; to all of them if not given, or if the slab is removed.

    Returns:
        How many blocks it happened to.

    Raises:
        ValueError: There are too few blocks for it to make a difference.
    """
    with SlabSurvey(path) as survey:
        pieces = list(_pieces(survey, keys))
    if len(pieces) < 1 + (how is Damage.EXCHANGED):
        raise ValueError(f"{path} has {len(pieces)} blocks, too few for {how}")
    if how is Damage.REMOVED:
        shutil.rmtree(path)
        return len(pieces)
    fd = os.open(path / "data", os.O_RDWR | os.O_CLOEXEC)
    try:
        contents = [os.pread(fd, nbytes, offset) for offset, nbytes in pieces]
        if how is Damage.EXCHANGED:
            contents.insert(0, contents.pop())
        else:
            contents = [_flipped(content) for content in contents]
        for (offset, nbytes), content in zip(pieces, contents, strict=True):
            os.pwrite(fd, content[:nbytes], offset)
    finally:
        os.close(fd)
    return len(pieces)


def _pieces(
    survey: SlabSurvey, keys: Collection[PackedKey] | None
) -> Iterator[tuple[int, int]]:
    """Yield where in the data each block's bytes begin, and how many there are."""
    for surveyed in survey.classes:
        for blocks in surveyed.blocks():
            for at in range(len(blocks)):
                if keys is None or blocks.key(at) in keys:
                    offset = int(blocks.slots[at]) * surveyed.geometry.slot_bytes
                    yield offset, int(blocks.records["nbytes"][at])


def _flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    for at in range(0, len(changed), 512):
        changed[at] ^= 0x40
    return bytes(changed)
