# SPDX-License-Identifier: Apache-2.0
"""What seals a block: the checksum that travels with it, computed once. Pure."""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from ucm.blocks import PackedKey

__all__ = ["block_checksum", "checksum_seeds"]


def block_checksum(key: PackedKey, data: memoryview | bytes) -> int:
    """
    Return the checksum that seals a block, wherever it is: xxh3-64 of its bytes.

    Seeded with its key's: the right bytes under the wrong key do not verify. In a slab, below
    it, and in an export it is the same one, so that who moves a block need not compute it anew.
    """
    (seed,) = checksum_seeds([key])
    return xxh3_64_intdigest(data, seed)


def checksum_seeds(keys: Iterable[PackedKey]) -> list[int]:
    """Return what seeds the checksum of each block."""
    return list(map(xxh3_64_intdigest, keys))
