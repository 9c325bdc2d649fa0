# SPDX-License-Identifier: Apache-2.0
"""Blocks of a disk of which it is not known yet whether they stay: in one slot at most."""

import asyncio
import contextlib
import threading

from tests.backends.disk_kit import Refused, keys_on, open_disk
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(100)


def sealed(key, num_pages=1):
    """Return a block of so many pages; one fills an extent, unless there is room for more."""
    return Sealed(key, memoryview(bytes(4096 * num_pages)), 0)


def open_small(path, num_each=1):
    """Open a disk of sixteen extents, each with room for so many blocks of a page; one thread."""
    return open_disk(path, capacity=16 * (1 + 2 * num_each) * 4096, threads=1)


class Full:
    """A disk without free slots, whose one thread stands at a gate."""

    def __init__(self, disk):
        self.disk = disk
        self.gate = threading.Event()
        self.oldest = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, path, num_each=1):
        """Fill a disk, and close the gate."""
        disk = await open_small(path, num_each)
        full = cls(disk)
        for key in KEYS[: 16 * num_each + 1]:
            assert [Verdict.DONE] == await disk.put([sealed(key)])
        assert 16 * num_each == len(disk._slots)
        full.oldest = disk._slots.keys()[0]
        standing = full.begin(disk._crew.run([None], full._stand, [None]))
        await full.turn()
        try:
            yield full
        finally:
            await full.over(standing)
            await disk.aclose()

    def _stand(self, _):
        assert self.gate.wait(60)

    @staticmethod
    def begin(call):
        """Have a call made beside the test."""
        return asyncio.ensure_future(call)

    @staticmethod
    async def turn():
        """Let all that can go on go on."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def give_up(self, call):
        """Cancel a call, and return when it is over."""
        call.cancel()
        await asyncio.wait([call], timeout=60)
        assert call.cancelled()

    async def over(self, call):
        """Open the gate, and return what a call says."""
        self.gate.set()
        return await asyncio.wait_for(call, 60)


class TestChanging:
    def test_block_is_not_written_anew_while_it_may_come_back(self, tmp_path) -> None:
        """R-61: who puts a block that a write is to make room with hears how that ends; it
        would be in two slots, of which one is found by nobody and never freed."""

        async def run():
            async with Full.open(tmp_path) as full:
                slots = full.disk._slots
                before = len(slots)
                taking = full.begin(full.disk.put([sealed(KEYS[-1])]))
                await full.turn()
                assert slots.find(full.oldest) is None
                again = full.begin(full.disk.put([sealed(full.oldest)]))
                await full.turn()
                await full.give_up(taking)
                told = await full.over(again)
                return told, before, len(slots)

        assert ([Verdict.PRESENT], 16, 16) == asyncio.run(run())

    def test_block_that_may_come_back_is_deleted_all_the_same(self, tmp_path) -> None:
        """R-61: who deletes a block that a write is to make room with does not see it again,
        nor does the next start."""

        async def run():
            async with Full.open(tmp_path) as full:
                taking = full.begin(full.disk.put([sealed(KEYS[-1])]))
                await full.turn()
                gone = full.begin(full.disk.delete([full.oldest, full.oldest]))
                await full.turn()
                await full.give_up(taking)
                told = await full.over(gone)
                there = await full.disk.exists([full.oldest])
                return told, there, full.oldest in keys_on(tmp_path)

        assert (
            [Verdict.DONE, Verdict.DONE],
            [Presence.ABSENT],
            False,
        ) == asyncio.run(run())

    def test_block_is_not_written_anew_while_it_is_deleted(self, tmp_path) -> None:
        """R-61: who puts a block that is being deleted hears how that ends."""

        async def run():
            async with Full.open(tmp_path) as full:
                slots = full.disk._slots
                gone = full.begin(full.disk.delete([full.oldest]))
                await full.turn()
                again = full.begin(full.disk.put([sealed(full.oldest)]))
                await full.turn()
                await full.give_up(gone)
                return await full.over(again), len(slots)

        assert ([Verdict.PRESENT], 16) == asyncio.run(run())

    def test_block_twice_in_one_call_is_written_once(self, tmp_path) -> None:
        """R-61: both are told of one write."""

        async def run():
            disk = await open_disk(tmp_path)
            told = await disk.put([sealed(KEYS[0])] * 2)
            free = [one for each in disk._slots._classes.values() for one in each.free]
            num_slots = len(disk._slots.extents[0].slots)
            await disk.aclose()
            return told, num_slots - len(free)

        assert ([Verdict.DONE, Verdict.DONE], 1) == asyncio.run(run())


class TestTaken:
    def test_blocks_that_went_for_nothing_are_deleted(self, tmp_path) -> None:
        """R-61: a write of another size takes all of an extent. Where no thread comes to it the
        drive has the blocks yet, and who deletes them does not see them behind a start, also
        those that were put elsewhere meanwhile."""

        async def run():
            async with Full.open(tmp_path, 5) as full:
                gone = await take_in_vain(full)
                full.gate.set()
                assert [Verdict.DONE] == await full.disk.put([sealed(gone[0])])
                told = await full.disk.delete(gone)
            disk = await open_small(tmp_path, 5)
            there = await disk.exists(gone)
            await disk.aclose()
            return told, there

        assert (
            [Verdict.DONE] + [Verdict.ABSENT] * 4,
            [Presence.ABSENT] * 5,
        ) == asyncio.run(run())

    def test_blocks_that_a_drive_may_have_yet_are_not_absent(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-51: where the drive refuses to part with what an extent had nobody is told that it
        has gone."""

        async def run():
            async with Full.open(tmp_path, 5) as full:
                gone = await take_in_vain(full)
                full.gate.set()
                with monkeypatch.context() as patch:
                    Refused(patch, "pwritev")
                    refused = await full.disk.delete(gone)
                return refused, await full.disk.delete(gone)

        assert (
            [Verdict.UNAVAILABLE] * 5,
            [Verdict.ABSENT] * 5,
        ) == asyncio.run(run())


async def take_in_vain(full):
    """Cancel a put of a larger block before a thread comes to it; return what went for it."""
    before = full.disk._slots.keys()
    taking = full.begin(full.disk.put([sealed(KEYS[-1], 5)]))
    await full.turn()
    gone = [key for key in before if full.disk._slots.find(key) is None]
    await full.give_up(taking)
    assert 5 == len(gone)
    return gone
