# SPDX-License-Identifier: Apache-2.0
"""
What every backend of blocks must pass.

Derive, say how one is opened and how to look at what it stores past it, and pytest does
the rest::

    class TestMine(BackendContract):
        async def open(self, place: Path) -> Backend: ...
        ...
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from ucm.backends.abc import (
    Backend,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.blocks import PackedKey
from ucm.testing.loan_contract import BLOCK, LoanContract, fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

__all__ = ["BLOCK", "DAMAGES", "BackendContract", "fetch", "fetch_sound", "seal"]

_LIMIT_S = 60.0

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[:-1],
    "short": lambda raw: raw[:50],
    "longer": lambda raw: raw + b"\0",
    "foreign": lambda raw: b"\x7fELF" * (len(raw) // 4),
    "first": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "middle": lambda raw: raw[:2000] + bytes([raw[2000] ^ 1]) + raw[2001:],
    "last": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
}


def _are_there(told: list[Presence]) -> list[bool]:
    return [one is Presence.PRESENT for one in told]


@pytest.mark.asyncio
class BackendContract(LoanContract):
    """The promises of a backend as tests; *place* is a directory of the test's own."""

    @pytest.mark.parametrize("nbytes", [1, 511, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
    async def test_blocks_come_back_as_they_were_put(
        self, tmp_path: Path, nbytes: int
    ) -> None:
        """Each block of a batch is seen, and comes with its bytes and its checksum."""
        keys = make_keys(5)
        blocks = [seal(key, nbytes) for key in keys]
        async with self.opened(tmp_path) as backend:
            assert await backend.exists(keys) == [Presence.ABSENT] * 5
            assert await backend.put(blocks) == [Verdict.DONE] * 5
            assert await backend.exists(keys) == [Presence.PRESENT] * 5
            for block, (got, data) in zip(
                blocks, await fetch(backend, keys, nbytes), strict=True
            ):
                assert got[:2] == (Verdict.DONE, block.checksum)
                assert data == bytes(block.data)
                raw = self.get_raw(tmp_path, block.key)
                assert raw is not None
                assert bytes(block.data) in raw

    async def test_each_block_of_a_batch_is_told_of(self, tmp_path: Path) -> None:
        """What is missing harms nobody beside it, in the order that was asked."""
        keys = make_keys(6)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys[::2]])
            assert await backend.exists(keys) == [Presence.PRESENT, Presence.ABSENT] * 3
            got = [one.verdict for one, _ in await fetch(backend, keys)]
            assert got == [Verdict.DONE, Verdict.ABSENT] * 3
            puts = await backend.put([seal(key) for key in keys])
            assert puts == [Verdict.PRESENT, Verdict.DONE] * 3
            assert await backend.delete([*keys[:1], *make_keys(1, first=9)]) == [
                Verdict.DONE,
                Verdict.ABSENT,
            ]
            assert await backend.exists(keys[:2]) == [Presence.ABSENT, Presence.PRESENT]
            assert [False, *[True] * 5] == await fetch_sound(backend, keys)

    async def test_nothing_asked_is_nothing_told(self, tmp_path: Path) -> None:
        """An empty batch is no error and no call."""
        async with self.opened(tmp_path) as backend:
            assert await backend.exists([]) == []
            assert await backend.get([], []) == []
            assert await backend.put([]) == []
            assert await backend.delete([]) == []

    async def test_block_that_is_there_stays(self, tmp_path: Path) -> None:
        """A second put of a key changes nothing of what is stored."""
        (key,) = make_keys(1)
        other = Sealed(key, memoryview(bytes(BLOCK)), 7)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key)])
            before = self.get_raw(tmp_path, key)
            assert await backend.put([other]) == [Verdict.PRESENT]
            assert self.get_raw(tmp_path, key) == before is not None

    async def test_damaged_bytes_are_stored_by_nobody_who_verifies(
        self, tmp_path: Path
    ) -> None:
        """Who says that a put compares stores no other bytes; nobody takes them for the block."""
        keys = make_keys(3)
        blocks = [seal(key) for key in keys]
        damaged = bytes(blocks[1].data[1:]) + b"x"
        blocks[1] = Sealed(keys[1], memoryview(damaged), blocks[1].checksum)
        async with self.opened(tmp_path) as backend:
            verifies = backend.capabilities.verifies
            told = Verdict.GARBAGE if verifies else Verdict.DONE
            assert await backend.put(blocks) == [Verdict.DONE, told, Verdict.DONE]
            assert await fetch_sound(backend, keys) == [True, False, True]
            assert verifies == (self.get_raw(tmp_path, keys[1]) is None)

    @pytest.mark.parametrize("nbytes", [BLOCK - 1, BLOCK + 1, 2 * BLOCK, 16])
    async def test_block_of_another_length_is_garbage(
        self, tmp_path: Path, nbytes: int
    ) -> None:
        """A target that is shorter or longer than what is stored is not filled."""
        (key,) = make_keys(1)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key)])
            ((got, data),) = await fetch(backend, [key], nbytes)
            assert (got.verdict, len(data)) == (Verdict.GARBAGE, nbytes)

    @pytest.mark.parametrize("how", DAMAGES)
    async def test_damage_is_noticed(self, tmp_path: Path, how: str) -> None:
        """Whatever is stored in a block's place, nobody takes it for the block (R-51)."""
        keys = make_keys(3)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys])
            raw = self.get_raw(tmp_path, keys[1])
            assert raw is not None
            self.put_raw(tmp_path, keys[1], DAMAGES[how](raw))
            assert await fetch_sound(backend, keys) == [True, False, True]

    async def test_bytes_of_another_key_are_noticed(self, tmp_path: Path) -> None:
        """A whole and sound block that lies under another key is garbage."""
        keys = make_keys(2)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys])
            raw = self.get_raw(tmp_path, keys[0])
            assert raw is not None
            self.put_raw(tmp_path, keys[1], raw)
            assert await fetch_sound(backend, keys) == [True, False]

    async def test_damaged_block_can_be_put_again(self, tmp_path: Path) -> None:
        """Behind its deletion a block is stored as if it had never been."""
        (key,) = make_keys(1)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key)])
            self.put_raw(tmp_path, key, b"\x01" * BLOCK)
            assert await fetch_sound(backend, [key]) == [False]
            await backend.delete([key])
            assert await backend.put([seal(key)]) == [Verdict.DONE]
            assert await fetch_sound(backend, [key]) == [True]

    async def test_too_large_block_is_refused(self, tmp_path: Path) -> None:
        """What can never fit is full, and what is beside it is stored."""
        keys = make_keys(2)
        backend = await self.open_small(tmp_path)
        if backend is None:
            return
        try:
            limit = backend.capabilities.max_block_bytes
            blocks = [seal(keys[0], limit + 1), seal(keys[1])]
            assert await backend.put(blocks) == [Verdict.FULL, Verdict.DONE]
            assert self.get_raw(tmp_path, keys[0]) is None
            assert await fetch_sound(backend, keys) == [False, True]
        finally:
            await backend.aclose()

    async def test_room_is_bounded(self, tmp_path: Path) -> None:
        """No more is kept than told; where room is made, the oldest use goes first."""
        keys = make_keys(40)
        backend = await self.open_small(tmp_path)
        if backend is None:
            return
        try:
            for key in keys:
                (verdict,) = await backend.put([seal(key)])
                assert verdict is Verdict.DONE or not self.evicts
                assert await fetch_sound(backend, keys[:1]) == [True]
            stats, there = await backend.stats(), await fetch_sound(backend, keys)
            assert there[0]
            assert there[-1] or not self.evicts
            assert 4 <= sum(there) <= 24
            if stats.blocks is not None:
                assert stats.blocks == sum(there)
            if stats.nbytes is not None and stats.capacity_bytes is not None:
                assert sum(there) * BLOCK <= stats.nbytes <= stats.capacity_bytes
            assert stats.evicted_blocks_total == (40 - sum(there)) * self.evicts
        finally:
            await backend.aclose()

    async def test_writers_of_one_key_agree(self, tmp_path: Path) -> None:
        """X-02: eight puts of one key at once leave one block, whole, and no remains."""
        keys = make_keys(3)
        verdicts: list[Verdict] = []

        async def write(backend: Backend) -> None:
            verdicts.extend(await backend.put([seal(key) for key in keys]))

        async with self.opened(tmp_path) as first, contextlib.AsyncExitStack() as stack:
            second = first
            if first.capabilities.shared:
                second = await stack.enter_async_context(self.opened(tmp_path))
            async with anyio.create_task_group() as group:
                for at in range(8):
                    group.start_soon(write, (first, second)[at % 2])
            allowed = {Verdict.DONE, Verdict.PRESENT}
            allowed |= {Verdict.UNAVAILABLE, Verdict.AWAY}
            assert allowed >= set(verdicts)
            assert Verdict.DONE in verdicts
            for backend in (first, second):
                assert await fetch_sound(backend, keys) == [True] * 3
        assert self.leftovers(tmp_path) == []

    async def test_each_of_many_calls_has_an_answer(self, tmp_path: Path) -> None:
        """However many prompts ask at once, none of them takes a tier that is well for silent."""
        keys = make_keys(24)
        told: list[object] = []

        async with self.opened(tmp_path) as backend:

            async def put(key: PackedKey) -> None:
                told.extend(await backend.put([seal(key)]))

            async def look(key: PackedKey) -> None:
                told.extend(await backend.exists([key]))

            async def get(key: PackedKey) -> None:
                told.extend(await fetch_sound(backend, [key]))

            async def delete(key: PackedKey) -> None:
                told.extend(await backend.delete([key]))

            for ask in (put, look, get, delete):
                async with anyio.create_task_group() as group:
                    for key in keys:
                        group.start_soon(ask, key)
        expected = Verdict.DONE, Presence.PRESENT, True, Verdict.DONE
        assert [each for each in expected for _ in keys] == told

    @pytest.mark.parametrize("verb", ["put", "get", "exists", "delete"])
    async def test_cancelled_call_leaves_nothing_half_done(
        self, tmp_path: Path, verb: str
    ) -> None:
        """R-42: each block is then as it was or as it was to be, and nothing is left."""
        keys = make_keys(4)
        async with self.opened(tmp_path) as backend:
            for num_turns in range(6):
                await backend.delete(keys)
                if verb != "put":
                    await backend.put([seal(key) for key in keys])
                calls = {
                    "put": lambda: backend.put([seal(key) for key in keys]),
                    "get": lambda: fetch(backend, keys),
                    "exists": lambda: backend.exists(keys),
                    "delete": lambda: backend.delete(keys),
                }
                async with anyio.create_task_group() as group:
                    group.start_soon(calls[verb])
                    for _ in range(num_turns):
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()
                with anyio.move_on_after(_LIMIT_S):  # the kernel may end a little later
                    while True:
                        there = await backend.exists(keys)
                        sound = await fetch_sound(backend, keys)
                        is_known = Presence.UNKNOWN not in there
                        if is_known and sound == _are_there(there):
                            break
                        await anyio.sleep(0.001)
                assert sound == _are_there(there)
                assert Presence.UNKNOWN not in there
                assert all(sound) or verb in {"put", "delete"}
        assert self.leftovers(tmp_path) == []

    async def test_blocks_are_found_again(self, tmp_path: Path) -> None:
        """One that is opened later has what was put, if it says so, and nothing else."""
        keys = make_keys(5)
        async with self.opened(tmp_path) as backend:
            await backend.put([seal(key) for key in keys])
            await backend.delete(keys[:1])
            told = backend.capabilities.durable
        assert told in {"none", "process", "power", "node"}
        async with self.opened(tmp_path) as backend:
            there = await fetch_sound(backend, keys)
        assert [False] + [self.is_kept] * 4 == there
        assert self.is_kept or told == "none"

    async def test_closed_backend_answers_that_it_does_not(
        self, tmp_path: Path
    ) -> None:
        """R-51: behind its end nothing is a hit, and nothing is a miss."""
        keys = make_keys(2)
        backend = await self.open(tmp_path)
        await backend.put([seal(key) for key in keys])
        await backend.aclose()
        await backend.aclose()
        assert await backend.exists(keys) == [Presence.UNKNOWN] * 2
        got = [one for one, _ in await fetch(backend, keys)]
        assert [Fetched(Verdict.UNAVAILABLE)] * 2 == got
        blocks = [seal(key) for key in keys]
        assert await backend.put(blocks) == [Verdict.UNAVAILABLE] * 2
        assert await backend.delete(keys) == [Verdict.UNAVAILABLE] * 2

    async def test_capabilities_make_sense(self, tmp_path: Path) -> None:
        """What it says of itself can be used as bounds."""
        async with self.opened(tmp_path) as backend:
            can = backend.capabilities
            assert can.medium.isidentifier()
            assert min(can.max_block_bytes, can.batch_blocks, can.in_flight) >= 1
            assert can.batch_bytes >= 1
            stats = await backend.stats()
            assert stats.blocks in (0, None)
