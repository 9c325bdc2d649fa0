# SPDX-License-Identifier: Apache-2.0
"""
Blocks in the memory of one process: the model of a backend, and what tests fetch from.

The *shelf* stands for the other side. Backends that are opened on one shelf see the same
blocks, as two machines do; one that is opened again finds what was put.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

import attrs

from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import LEAST_CAPACITY, Envelope
from ucm.blocks import PackedKey
from ucm.settings import field, read_section, read_size

__all__ = ["MemoryBackend", "MemorySettings", "Shelf"]


@attrs.frozen(kw_only=True)
class MemorySettings:
    """Settings of a tier in memory."""

    capacity: int = field(
        1 << 30, "Room for blocks.", read=read_size, least=LEAST_CAPACITY
    )


@attrs.define
class Shelf:
    """
    Where values lie, the one whose use is oldest first.

    Args:
        capacity_bytes: Of all values, headers included.
        values: Header and bytes by key.
    """

    capacity_bytes: int
    values: OrderedDict[PackedKey, bytes] = attrs.field(factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return sum(map(len, self.values.values()))

    def make_room(self, nbytes: int) -> int:
        """Let go of the oldest until so many bytes fit; return of how many blocks."""
        num_evicted, free = 0, self.capacity_bytes - self.nbytes
        while free < nbytes:
            free += len(self.values.popitem(last=False)[1])
            num_evicted += 1
        return num_evicted


class MemoryBackend(Backend):
    """
    Keeps values on a shelf.

    Args:
        shelf: Where; may be shared.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._num_evicted = 0
        self._is_open = True

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """Open one on a shelf of its own, as ``open_backend`` asks for it."""
        return cls(Shelf(read_section(MemorySettings, settings, f"{key}.").capacity))

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of memory."""
        return BackendCapabilities(
            medium="memory",
            shared=False,
            durable="none",
            max_block_bytes=self.shelf.capacity_bytes,
            batch_blocks=64,
            in_flight=1,
        )

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look on the shelf."""
        if not self._is_open:
            return [Presence.UNKNOWN] * len(keys)
        values = self.shelf.values
        return [Presence.PRESENT if key in values else Presence.ABSENT for key in keys]

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Copy from the shelf."""
        if not self._is_open:
            return [Fetched(Verdict.UNAVAILABLE)] * len(keys)
        return [self._get(*each) for each in zip(keys, targets, strict=True)]

    def _get(self, key: PackedKey, target: memoryview) -> Fetched:
        value = self.shelf.values.get(key)
        if value is None:
            return Fetched(Verdict.ABSENT)
        self.shelf.values.move_to_end(key)
        return Envelope.open(value, key, target)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Lay copies on the shelf."""
        if not self._is_open:
            return [Verdict.UNAVAILABLE] * len(blocks)
        return [self._put(block) for block in blocks]

    def _put(self, block: Sealed) -> Verdict:
        if block.key in self.shelf.values:
            self.shelf.values.move_to_end(block.key)
            return Verdict.PRESENT
        header = Envelope(block.key, len(block.data), block.checksum).encode()
        value = header + block.data
        if len(value) > self.shelf.capacity_bytes:
            return Verdict.FULL
        self._num_evicted += self.shelf.make_room(len(value))
        self.shelf.values[block.key] = value
        return Verdict.DONE

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Take from the shelf."""
        if not self._is_open:
            return [Verdict.UNAVAILABLE] * len(keys)
        values = self.shelf.values
        return [
            Verdict.ABSENT if values.pop(key, None) is None else Verdict.DONE
            for key in keys
        ]

    async def stats(self) -> BackendStats:
        """Count."""
        return BackendStats(
            blocks=len(self.shelf.values),
            nbytes=self.shelf.nbytes,
            capacity_bytes=self.shelf.capacity_bytes,
            evicted_blocks_total=self._num_evicted,
        )

    async def aclose(self) -> None:
        """Answer nothing any more."""
        self._is_open = False
