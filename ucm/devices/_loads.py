# SPDX-License-Identifier: Apache-2.0
"""
Copies from slots to pages of host memory that tell the checksums of what they copied.

One native call does both for all blocks of a copy, on several threads where that is worth
it: a block is digested a quarter of a megabyte at a time, which is copied while the CPU's
cache has it. Two passes read everything twice, and each of their calls waits for the
interpreter lock.
"""

from typing import Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm import native
from ucm.blocks import RowId
from ucm.devices._paged import PagedCopy, Part
from ucm.devices._pages import Pages
from ucm.devices.events import DoneFence
from ucm.native import MOST_THREADS, address_of
from ucm.plan import HostSlots
from ucm.xxh3 import DIGESTER, find_whole

__all__ = ["KEPT_BYTES", "DigestedLoads", "ToldFence", "find_loads"]

KEPT_BYTES: Final = 256 << 10
"""So many are copied with the interpreter lock: to get it back would take longer."""


class ToldFence(DoneFence):
    """
    A fence behind a copy that is over.

    Args:
        digests: Of the blocks that were copied.
    """

    __slots__ = ("_digests",)

    tells_digests = True

    def __init__(self, digests: list[int]) -> None:
        self._digests = digests

    def digests(self) -> list[int]:
        """Return the checksum of each block."""
        return self._digests


class DigestedLoads:
    """
    Copies and digests by one call.

    Args:
        library: Makes it.

    Raises:
        ImportError: xxhash is no package of a library.
        OSError: Its library is not where it should be.
        ValueError: It does not export the function, or that says something else.
    """

    def __init__(self, library: native.Native) -> None:
        self._digest = find_whole()
        self._brief, self._long = library.brief_loads, library.loads
        self._check()

    def __call__(
        self, copy: PagedCopy[Any], pages: Pages, most_threads: int
    ) -> ToldFence:
        """
        Copy all rows of some blocks.

        Args:
            copy: What was checked; with seeds.
            pages: Of its group.
            most_threads: Of this process that may compute digests at once.
        """
        slots, count = copy.slots, len(copy.blocks)
        spans = [
            np.ascontiguousarray(each, np.int64) for each in (slots.slots, copy.blocks)
        ]
        seeds, found = np.array(copy.seeds, np.uint64), np.empty(count, np.uint64)
        is_brief = count * slots.block_bytes <= KEPT_BYTES
        (self._brief if is_brief else self._long)(
            self._digest,
            *(address_of(slots.pool), slots.pool.strides[0]),
            *(slots.block_bytes, count, address_of(spans[0])),
            *(address_of(seeds), address_of(found), min(most_threads, MOST_THREADS)),
            None if DIGESTER is None else DIGESTER.addresses,
            *pages.lists,
            *(len(pages.starts), address_of(spans[1])),
        )
        return ToldFence(found.tolist())

    def _check(self) -> None:
        """Load blocks of several sizes, as xxhash takes each of them in another way."""
        pool = np.arange(1 << 19, dtype=np.uint32).view(np.uint8).reshape(4, -1)
        row = RowId(0)
        for nbytes in (8, 200, 2048, 400_000):
            target = np.zeros((2, nbytes), np.uint8)
            part = Part(row, address_of(target), nbytes, nbytes, 0)
            pages, slots = Pages.of([part]), HostSlots(pool, np.array([3, 1]), nbytes)
            blocks, seeds = np.array([1, 0]), (2**63 + 1, 7)
            copy = PagedCopy(pages, (row,), True, blocks, slots, seeds)
            told = self(copy, pages, 1).digests()
            wanted = [
                xxh3_64_intdigest(pool[slot, :nbytes].data, seed)
                for slot, seed in zip((3, 1), seeds, strict=True)
            ]
            if told != wanted or not np.array_equal(
                target[::-1], pool[[3, 1], :nbytes]
            ):
                raise ValueError(f"loads of {nbytes} bytes are not what they should be")


def find_loads(library: native.Native | None) -> DigestedLoads | None:
    """Return what copies and digests by one call, if it can be trusted."""
    if library is None:
        return None
    try:
        return DigestedLoads(library)
    except (ImportError, OSError, ValueError):
        return None  # another build of xxhash
