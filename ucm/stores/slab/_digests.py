# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks of a span; see ``ucm.digests``."""

from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm import digests
from ucm.plan import HostSlots

__all__ = ["digests_of"]


def digests_of(
    slots: HostSlots, positions: Sequence[int], seeds: Sequence[int]
) -> Iterable[int]:
    """
    Return the digests of some blocks of a span.

    Args:
        slots: Of the span.
        positions: Which blocks.
        seeds: Of each of them.

    Raises:
        IndexError: A slot is not in the pool.
    """
    if digests.MANY is None or len(positions) == 1:  # one is quicker without arrays
        return _by_one(slots, positions, seeds)
    pool, places = slots.pool, slots.slots[list(positions)].astype(np.int64)
    named = places.tolist()
    if named and not 0 <= min(named) <= max(named) < len(pool):
        raise IndexError(f"a slot is not in 0..{len(pool) - 1}")
    base, stride = digests.address_of(pool), pool.strides[0]
    return digests.MANY(base, stride, places, slots.block_bytes, seeds)


def _by_one(
    slots: HostSlots, positions: Iterable[int], seeds: Iterable[int]
) -> Iterable[int]:
    for at, seed in zip(positions, seeds, strict=True):
        yield xxh3_64_intdigest(slots.block(at).data, seed)
