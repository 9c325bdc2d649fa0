# SPDX-License-Identifier: Apache-2.0
"""
What every backend must pass about memory that is lent to it, and about what it tells by itself.

A part of ``BackendContract``, which authors derive from: what they give is here.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from ucm.backends.abc import Backend, Fetched, Sealed, Verdict, block_checksum
from ucm.blocks import PackedKey
from ucm.testing.store_blocks import make_keys, payload

__all__ = ["BLOCK", "LoanContract", "fetch", "fetch_sound", "seal"]

BLOCK = 4096
"""Bytes of most blocks of the contract."""


def seal(key: PackedKey, nbytes: int = BLOCK) -> Sealed:
    """Return the block that tests store under a key."""
    data = memoryview(payload(key, nbytes))
    return Sealed(key, data, block_checksum(key, data))


async def fetch(
    backend: Backend, keys: Sequence[PackedKey], nbytes: int = BLOCK
) -> list[tuple[Fetched, bytes]]:
    """
    Get blocks; return for each what became of it, and what the target holds.

    A digest that is told must be that of the target's bytes, whatever was stored.
    """
    targets = [bytearray(b"\xee" * nbytes) for _ in keys]
    got = await backend.get(keys, [memoryview(target) for target in targets])
    for key, one, target in zip(keys, got, targets, strict=True):
        is_done = one.verdict is Verdict.DONE
        told = {None, block_checksum(key, bytes(target))} if is_done else {None}
        assert one.digest in told
    return [(one, bytes(target)) for one, target in zip(got, targets, strict=True)]


async def fetch_sound(
    backend: Backend, keys: Sequence[PackedKey], nbytes: int = BLOCK
) -> list[bool]:
    """Return for each key whether its payload came; wrong bytes fail unless noticed."""
    sound = []
    for key, (got, data) in zip(keys, await fetch(backend, keys, nbytes), strict=True):
        is_noticed = got.verdict is not Verdict.DONE or (
            got.checksum != block_checksum(key, data)
        )
        assert is_noticed or data == payload(key, nbytes)
        sound.append(not is_noticed)
    return sound


@pytest.mark.asyncio
class LoanContract(ABC):
    """What a backend does with others' memory; see ``BackendContract``."""

    evicts = True
    """Whether it makes room by itself for the newest, from the oldest use on."""
    is_kept = True
    """Whether blocks are found again by one that is opened behind an orderly end."""

    @abstractmethod
    async def open(self, place: Path) -> Backend:
        """Return a backend over *place*; the second one over it, too, if it is shared."""

    @abstractmethod
    async def open_small(self, place: Path) -> Backend | None:
        """Return one with room for 4 to 24 blocks; None where it has no bound."""

    @abstractmethod
    def get_raw(self, place: Path, key: PackedKey) -> bytes | None:
        """Return what is stored of a block, its header included, past the backend."""

    @abstractmethod
    def put_raw(self, place: Path, key: PackedKey, raw: bytes) -> None:
        """Have *raw* stored instead of what ``get_raw`` returned."""

    def leftovers(self, place: Path) -> list[str]:
        """Return names of what no block needs: unfinished files and the like."""
        return []

    @contextlib.asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Backend]:
        """Open one for a while."""
        backend = await self.open(place)
        try:
            yield backend
        finally:
            await backend.aclose()

    async def test_memory_of_a_put_is_the_callers_again(self, tmp_path: Path) -> None:
        """What lies there behind the call is of another block, as in a slab's slot."""
        keys = make_keys(3)
        sealed = [seal(key) for key in keys]
        memory = [bytearray(each.data) for each in sealed]
        async with self.opened(tmp_path) as backend:
            await backend.put(
                [
                    Sealed(each.key, memoryview(slot), each.checksum)
                    for each, slot in zip(sealed, memory, strict=True)
                ]
            )
            for slot in memory:
                slot[:] = bytes(BLOCK)
            assert await fetch_sound(backend, keys) == [True] * 3

    async def test_memory_of_a_get_is_the_callers_again(self, tmp_path: Path) -> None:
        """Behind its end, also by cancellation, nothing writes to a target."""
        keys = make_keys(4)
        lent: list[bytearray] = []
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys])
            for num_turns in range(6):
                targets = [bytearray(BLOCK) for _ in keys]
                async with anyio.create_task_group() as group:
                    views = [memoryview(target) for target in targets]
                    group.start_soon(backend.get, keys, views)
                    for _ in range(num_turns):
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()
                for target in targets:
                    target[:] = b"\x55" * BLOCK
                lent += targets
            assert await fetch_sound(backend, keys) == [True] * 4
        assert [target for target in lent if target.strip(b"\x55")] == []

    async def test_what_it_watches_it_tells(self, tmp_path: Path) -> None:
        """Who tells of what comes and goes lists what is there, and leaves out nothing."""
        keys = make_keys(5)
        told: list[tuple[PackedKey, bool]] = []
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys[:2]])
            there = backend.watch(lambda key, is_there: told.append((key, is_there)))
            if there is None:
                return
            assert set(there) == set(keys[:2])
            await backend.put([seal(key) for key in keys[1:]])
            await backend.delete(keys[:1])
            await anyio.lowlevel.checkpoint()
            expected = [(keys[0], False), *((key, True) for key in keys[2:])]
            assert sorted(told) == sorted(expected)
