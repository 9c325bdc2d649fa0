# SPDX-License-Identifier: Apache-2.0
"""
Checksums of blocks: xxh3 over a block's bytes, with a seed of its own.

Many of them by one call, on several threads, where ``ucm.native`` was built and xxhash's
library exports the function; one by one otherwise. The digests are the same.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm import native
from ucm.native import MOST_THREADS, address_of
from ucm.plan import HostSlots
from ucm.xxh3 import find_whole

__all__ = ["ManyDigests", "digests_of", "find_many"]


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
        self._digest = find_whole()
        self._many = library.digests
        self._check()

    def __call__(
        self,
        slots: HostSlots,
        positions: Sequence[int],
        seeds: Sequence[int],
        most_threads: int,
    ) -> list[int]:
        """Return the digest of each block."""
        pool, count = slots.pool, len(positions)
        places = slots.slots[list(positions)].astype(np.int64)
        named = places.tolist()
        if count and not 0 <= min(named) <= max(named) < len(pool):
            raise IndexError(f"a slot is not in 0..{len(pool) - 1}")
        seeds_of, found = np.array(seeds, np.uint64), np.empty(count, np.uint64)
        self._many(
            self._digest,
            *(address_of(pool), pool.strides[0], slots.block_bytes, count),
            *map(address_of, (places, seeds_of, found)),
            min(most_threads, MOST_THREADS),
        )
        digests: list[int] = found.tolist()
        return digests

    def _check(self) -> None:
        """Hash blocks of several sizes, as xxhash takes each of them in another way."""
        pool = np.arange(4096, dtype=np.uint32).view(np.uint8).reshape(8, 2048)
        places, positions, seeds = np.array([5, 0]), (0, 1), (2**63 + 1, 7)
        for nbytes in (1, 8, 100, 200, 241, 2048):
            slots = HostSlots(pool, places, nbytes)
            found = self(slots, positions, seeds, 1)
            if found != list(_by_one(slots, positions, seeds)):
                raise ValueError(f"digests of {nbytes} bytes are not xxhash's")


def _by_one(
    slots: HostSlots, positions: Iterable[int], seeds: Iterable[int]
) -> Iterable[int]:
    for at, seed in zip(positions, seeds, strict=True):
        yield xxh3_64_intdigest(slots.block(at).data, seed)


def find_many(library: native.Native | None) -> ManyDigests | None:
    """Return what hashes many blocks by one call, if it can be trusted."""
    if library is None:
        return None
    try:
        return ManyDigests(library)
    except (ImportError, OSError, ValueError):
        return None  # another build of xxhash


_many = find_many(native.LIBRARY)


def digests_of(
    slots: HostSlots,
    positions: Sequence[int],
    seeds: Sequence[int],
    most_threads: int = 1,
) -> Iterable[int]:
    """
    Return the digests of some blocks of a span.

    Args:
        slots: Of the span.
        positions: Which blocks.
        seeds: Of each of them.
        most_threads: Of this process that may compute digests at once. The thread that asks
            always does.

    Raises:
        IndexError: A slot is not in the pool.
    """
    if _many is None or len(positions) == 1:  # one is quicker without arrays
        return _by_one(slots, positions, seeds)
    return _many(slots, positions, seeds, most_threads)
