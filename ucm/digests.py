# SPDX-License-Identifier: Apache-2.0
"""
Checksums of many blocks: xxh3 over the bytes of each, with a seed of its own.

By one call where ``ucm.native`` was built and xxhash's library exports the function; one by
one otherwise. The digests are the same.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ucm import native
from ucm.blocks import PackedKey
from ucm.seals import checksum_seeds

__all__ = ["MANY", "ManyDigests", "address_of", "checksums_of", "find_many"]

_ENTRIES: Final = ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed")
"""Of the library that Python's xxhash is; the first one picks the CPU's widest way."""


class ManyDigests:
    """
    Hashes many blocks by one call.

    Args:
        library: Makes the calls.

    Raises:
        ImportError: xxhash is no package of a library.
        OSError: Its library is not where it should be.
        ValueError: It does not export the function, or that says something else.
    """

    def __init__(self, library: native.Native) -> None:
        found = importlib.util.find_spec("xxhash._xxhash")
        xxhash = ctypes.CDLL(found.origin if found else None)
        entries = [getattr(xxhash, name, None) for name in _ENTRIES]
        self._digest = next(filter(None, entries), None)
        if self._digest is None:
            raise ValueError("xxhash exports no digest")
        self._many = library.digests
        self._check()

    def __call__(
        self,
        base: int,
        stride: int,
        places: npt.NDArray[np.int64],
        nbytes: int,
        seeds: Sequence[int],
    ) -> list[int]:
        """
        Return the digest of each block.

        Args:
            base: Address of the place 0.
            stride: Bytes from one place to the next.
            places: Where the blocks are.
            nbytes: Of each block; the caller answers for what lies there.
            seeds: Of each block.
        """
        seeds_of, found = np.array(seeds, np.uint64), np.empty(len(places), np.uint64)
        self._many(
            self._digest,
            *(base, stride, nbytes, len(places)),
            *(address_of(places), address_of(seeds_of), address_of(found)),
        )
        digests: list[int] = found.tolist()
        return digests

    def _check(self) -> None:
        """Hash blocks of several sizes, as xxhash takes each of them in another way."""
        pool = np.arange(4096, dtype=np.uint32).view(np.uint8).reshape(8, 2048)
        places, seeds = np.array([5, 0]), (2**63 + 1, 7)
        for nbytes in (1, 8, 100, 200, 241, 2048):
            told = self(address_of(pool), 2048, places, nbytes, seeds)
            blocks = [pool[place, :nbytes].data for place in places]
            if told != list(map(xxh3_64_intdigest, blocks, seeds)):
                raise ValueError(f"digests of {nbytes} bytes are not xxhash's")


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array begins, at a third of what ``array.ctypes.data`` costs."""
    address: int = array.__array_interface__["data"][0]
    return address


def find_many(library: native.Native | None) -> ManyDigests | None:
    """Return what hashes many blocks by one call, if it can be trusted."""
    if library is None:
        return None
    try:
        return ManyDigests(library)
    except (ImportError, OSError, ValueError):
        return None  # another build of xxhash


MANY = find_many(native.LIBRARY)


def checksums_of(keys: Sequence[PackedKey], blocks: Sequence[memoryview]) -> list[int]:
    """Return ``block_checksum`` of each block, wherever they lie."""
    seeds, sizes = checksum_seeds(keys), set(map(len, blocks))
    if MANY is None or len(blocks) == 1 or len(sizes) != 1 or not all(sizes):
        return list(map(xxh3_64_intdigest, blocks, seeds))
    places = [address_of(np.frombuffer(block, np.uint8)) for block in blocks]
    behind = np.array(places) - places[0]
    return MANY(places[0], 1, behind, sizes.pop(), seeds)
