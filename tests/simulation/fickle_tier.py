# SPDX-License-Identifier: Apache-2.0
"""A tier that fails, hangs, reorders and lies, from dice; and what it may never get away with."""

import random
from collections import Counter
from collections.abc import Sequence

import anyio
import attrs

from ucm.backends.abc import (
    BackendCapabilities,
    Fetched,
    Presence,
    Sealed,
    Verdict,
    block_checksum,
)
from ucm.backends.envelope import HEADER_BYTES, Envelope
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.blocks import PackedKey
from ucm.testing.store_blocks import payload

__all__ = ["FickleTier", "Mood"]


@attrs.frozen
class Mood:
    """How likely each trouble is, for a while."""

    fails: float = 0.0
    hangs: float = 0.0
    sticks: float = 0.0
    """Hangs where nobody can cancel it, and writes after all."""
    lies: float = 0.0
    spoils: float = 0.0
    loses: float = 0.0
    delays: tuple[float, ...] = (0.0,)

    @classmethod
    def drawn(cls, dice: random.Random) -> "Mood":
        """Return one; mostly a tier is well, and only late."""
        delays = dice.choice(
            [(0.0,), (0.0, 0.001), (0.0, 0.01, 0.1), (0.1, 0.5, 3.0), (1.0,)]
        )
        if dice.random() < 0.4:
            return cls(delays=delays)
        rare, often = 0.02, dice.choice([0.1, 0.5])
        return cls(
            fails=dice.choice([0.0, 0.0, 0.0, rare, often, 1.0]),
            hangs=dice.choice([0.0, 0.0, rare]),
            sticks=dice.choice([0.0, 0.3]),
            lies=dice.choice([0.0, rare, often]),
            spoils=dice.choice([0.0, rare, often]),
            loses=dice.choice([0.0, rare, often]),
            delays=delays,
        )


class FickleTier(MemoryBackend):
    """
    The model of a backend under a mood.

    Args:
        dice: Decides.
        seen: Counts what it did.
    """

    def __init__(self, dice: random.Random, seen: Counter[str]) -> None:
        super().__init__(Shelf(dice.choice([4000, 1 << 20])))
        self.mood = Mood()
        self._dice = dice
        self._seen = seen
        self._can = {
            "durable": dice.choice(["none", "power"]),
            "shared": dice.random() < 0.5,
            "batch_blocks": dice.choice([1, 4, 64]),
            "in_flight": dice.choice([1, 2, 8]),
            "creates": dice.random() < 0.5,
        }

    @property
    def capabilities(self) -> BackendCapabilities:
        """As drawn."""
        return attrs.evolve(super().capabilities, **self._can)

    def _does(self, trouble: str) -> bool:
        does: bool = self._dice.random() < getattr(self.mood, trouble)
        self._seen[trouble] += does
        return does

    async def _come(self) -> bool:
        """Take the time that it takes; return whether to answer at all."""
        if self._does("hangs"):
            await anyio.sleep_forever()
        await anyio.sleep(self._dice.choice(self.mood.delays))
        return not self._does("fails")

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look, or lie of some."""
        if not await self._come():
            return [Presence.UNKNOWN] * len(keys)
        told = await super().exists(keys)
        return [
            self._dice.choice(list(Presence)) if self._does("lies") else each
            for each in told
        ]

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Get, or spoil, or bring another block with a checksum of its own."""
        if not await self._come():
            return [Fetched(Verdict.UNAVAILABLE)] * len(keys)
        if self._does("sticks"):
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self._dice.choice([1.0, 5.0, 20.0]))
        answers = await super().get(keys, targets)
        for at, target in enumerate(targets):
            if self._does("spoils"):
                target[self._dice.randrange(len(target))] ^= 1
            elif self._does("lies"):
                other = keys[at - 1]
                target[:] = payload(other, len(target))
                checksum = block_checksum(other, target)
                answers[at] = Fetched(
                    Verdict.DONE, checksum if other != keys[at] else 1
                )
        return answers

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Put, or say so only; or put and not say so."""
        if not await self._come():
            if self._dice.random() < 0.5:
                await super().put(blocks)
            return [Verdict.UNAVAILABLE] * len(blocks)
        kept = [block for block in blocks if not self._does("loses")]
        told = dict(
            zip([block.key for block in kept], await super().put(kept), strict=True)
        )
        return [told.get(block.key, Verdict.DONE) for block in blocks]

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Delete, or not."""
        if not await self._come():
            return [Verdict.UNAVAILABLE] * len(keys)
        return await super().delete(keys)

    def rot(self) -> None:
        """Have the bytes of some block change where they lie."""
        values = self.shelf.values
        if values:
            key = self._dice.choice(list(values))
            value = bytearray(values[key])
            value[self._dice.randrange(len(value))] ^= 1
            values[key] = bytes(value)
            self._seen["rots"] += 1

    def check(self) -> None:
        """No block is here with another's bytes under a checksum that holds."""
        for key, value in self.shelf.values.items():
            head, data = Envelope.decode(value[:HEADER_BYTES]), value[HEADER_BYTES:]
            if head is not None and block_checksum(key, data) == head.checksum:
                assert payload(key) == data
