# SPDX-License-Identifier: Apache-2.0
"""Drives that refuse for a while, are gone, or have a bad spot: nothing goes that need not."""

import asyncio
import errno
import os
import threading

import pytest

from tests.backends.disk_kit import Refused, find, keys_on, open_disk, write
from ucm.backends._crew import Scratch
from ucm.backends.abc import Presence, Verdict
from ucm.backends.disk import _drive
from ucm.backends.disk._drive import BLOCKS
from ucm.testing.backend_contract import BLOCK, fetch, fetch_sound, seal
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
PAGE = 4096
ONE_EACH = 16 * 3 * PAGE
"""Sixteen extents of one slot each."""
OLD, NEW, LATER = make_keys(16), make_keys(16, first=50), make_keys(16, first=90)


async def full(path, capacity=ONE_EACH, **settings):
    """Open a drive, and fill its slots."""
    backend = await open_disk(path, capacity=capacity, **settings)
    assert [Verdict.DONE] * 16 == await put(backend, OLD)
    return backend


async def put(backend, keys):
    """Put blocks; return what is told."""
    return await backend.put([seal(key) for key in keys])


async def there(backend, keys):
    """Return how many blocks are found, each of them whole."""
    found = [one is Presence.PRESENT for one in await backend.exists(keys)]
    assert found == await fetch_sound(backend, keys)
    return sum(found)


class TestTrouble:
    async def test_drive_that_refuses_writes_for_a_while_loses_nothing(
        self, tmp_path, monkeypatch
    ):
        """R-51: what was to make room stays where a write has changed nothing, however often it fails, and
        each slot is of use again once the drive takes blocks."""
        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            for key in make_keys(40, first=200):
                assert [Verdict.UNAVAILABLE] == await put(backend, [key])
            assert 16 == await there(backend, OLD)
        assert [Verdict.DONE] * 16 == await put(backend, NEW)
        assert 16 == await there(backend, NEW)
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EACH)
        assert 16 == await there(backend, NEW)
        await backend.aclose()

    async def test_drive_that_takes_single_pages_only_loses_nothing(
        self, tmp_path, monkeypatch
    ):
        """R-51: one that is full below its file system lets a page be written over, and no block: what was to make
        room was as it was, and its stamp was wiped all the same."""
        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", lambda _, place, nbytes: nbytes > PAGE)
            for _ in range(3):
                assert [Verdict.UNAVAILABLE] * 5 == await put(backend, NEW[:5])
            assert 16 == await there(backend, OLD)
        assert [Verdict.DONE] * 16 == await put(backend, NEW)
        assert 16 == await there(backend, NEW)
        await backend.aclose()

    async def test_want_of_memory_makes_no_room(self, tmp_path, monkeypatch):
        """R-51: a thread that had none to write with wiped the block that was to make room, for nothing."""

        def refuse(*args):
            raise OSError(errno.ENOMEM, "no memory")

        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Scratch, "get", refuse)
            assert [Verdict.UNAVAILABLE] * 5 == await put(backend, NEW[:5])
        assert 16 == await there(backend, OLD)
        assert [Verdict.DONE] * 16 == await put(backend, NEW)
        await backend.aclose()

    async def test_drive_that_is_known_to_refuse_is_left_alone(
        self, tmp_path, monkeypatch
    ):
        """R-51: it is asked once by each put, and no block goes, not even for a moment; the put
        that finds it well is done."""
        backend, told = await full(tmp_path), []
        with monkeypatch.context() as patch:
            refused = Refused(patch, "pwritev")
            assert [Verdict.UNAVAILABLE] == await put(backend, NEW[:1])
            backend.watch(lambda *args: told.append(args))
            refused.places.clear()
            assert [Verdict.UNAVAILABLE] * 3 == await put(backend, NEW[:3])
            assert 1 == len(refused.places)
            assert [Verdict.PRESENT] == await put(backend, OLD[:1])
            assert [Verdict.FULL] == await backend.put([seal(NEW[0], 2 * BLOCK)])
        assert [] == told
        assert 0 == (await backend.stats()).evicted_blocks_total
        assert [Verdict.DONE] * 3 == await put(backend, NEW[:3])
        assert (13, 3) == (await there(backend, OLD), await there(backend, NEW))
        await backend.aclose()

    async def test_slot_that_was_torn_comes_back_to_use(self, tmp_path, monkeypatch):
        """R-51: the block whose first page went is found no more, and only that one; its slot is
        wiped when the drive is well, and no start finds what was in it."""
        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", how="torn")
            for at in range(4):
                assert [Verdict.UNAVAILABLE] == await put(backend, NEW[at : at + 1])
            assert 15 == await there(backend, OLD)
        assert [Verdict.DONE] * 16 == await put(backend, LATER)
        assert 16 == await there(backend, LATER)
        assert set(LATER) == keys_on(tmp_path)
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EACH)
        assert 16 == await there(backend, LATER)
        await backend.aclose()

    async def test_drive_that_neither_reads_nor_writes_has_its_room_again(
        self, tmp_path, monkeypatch
    ):
        """R-51: slots of which nothing is known are nobody's meanwhile; their blocks may be put
        anew, and are in one slot."""
        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            Refused(patch, "preadv")
            assert [Verdict.UNAVAILABLE] * 5 == await put(backend, NEW[:5])
            assert [Verdict.UNAVAILABLE] == await backend.delete(OLD[15:])
            assert 10 == (await backend.stats()).blocks
        assert [Verdict.DONE] * 5 + [Verdict.PRESENT] == await put(backend, OLD[:6])
        assert [Verdict.DONE] == await put(backend, NEW[:1])
        assert (15, 1) == (await there(backend, OLD), await there(backend, NEW))
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EACH)
        assert (15, 1) == (await there(backend, OLD), await there(backend, NEW))
        assert 0 == (await backend.stats()).swept_total
        await backend.aclose()

    async def test_slot_that_is_read_in_part_is_unclear(self, tmp_path, monkeypatch):
        """R-51: what was in a thread's memory before is not taken for what is on the drive."""
        backend = await full(tmp_path)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            patch.setattr(_drive.os, "preadv", lambda *args: 0)
            assert [Verdict.UNAVAILABLE] == await put(backend, NEW[:1])
        assert 15 == await there(backend, OLD)
        assert [Verdict.DONE] == await put(backend, NEW[:1])
        assert (15, 1) == (await there(backend, OLD), await there(backend, NEW))
        await backend.aclose()

    async def test_nothing_is_wiped_where_the_new_mark_is_not(
        self, tmp_path, monkeypatch
    ):
        """R-52: an extent that another size could not take is, for a restart, what it was: no page in
        the middle of a block of before is written to."""
        extent, large = 7 * PAGE, make_keys(32, first=300)
        backend = await open_disk(tmp_path, capacity=16 * extent)
        blocks = [seal(key, 2 * BLOCK) for key in large]
        assert [Verdict.DONE] * 32 == await backend.put(blocks)
        with monkeypatch.context() as patch:
            Refused(
                patch,
                "pwritev",
                lambda _, place, nbytes: not place % extent or nbytes > PAGE,
            )
            assert [Verdict.UNAVAILABLE] == await put(backend, NEW[:1])
            await backend.aclose()
        backend = await open_disk(tmp_path, capacity=16 * extent)
        assert [True] * 32 == await fetch_sound(backend, large, 2 * BLOCK)
        await backend.aclose()

    async def test_other_drives_go_on(self, tmp_path, monkeypatch):
        """R-51: of two drives the one that writes takes all; blocks of the other are found."""
        paths = [tmp_path / "a", tmp_path / "b"]
        backend = await open_disk(*paths, capacity=2 * ONE_EACH)
        keys = make_keys(32, first=200)
        assert [Verdict.DONE] * 32 == await put(backend, keys)
        bad = backend._drives[0]._fd
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", lambda fd, *_: fd == bad)
            assert {Verdict.DONE, Verdict.AWAY} == {*await put(backend, NEW[:2])}
            for _ in range(2):
                assert [Verdict.DONE] * 16 == await put(backend, LATER)
                assert [Verdict.DONE] * 16 == await put(backend, OLD)
            assert [str(paths[0])] == backend.refusing
        assert (16, 16) == (await there(backend, keys), await there(backend, OLD))
        assert [Verdict.DONE] * 16 == await put(backend, NEW)
        assert (16, 16) == (await there(backend, NEW), await there(backend, OLD))
        assert [] == backend.refusing
        await backend.aclose()

    async def test_wiping_that_was_cancelled_goes_on(self, tmp_path, monkeypatch):
        """R-51: a put that runs out of time leaves the rest of it to the next one."""
        backend = await full(tmp_path, threads=1)
        loop = asyncio.get_running_loop()
        stamps = {find(tmp_path, key)[2] for key in OLD}
        gate, seen = threading.Event(), []
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            assert [Verdict.UNAVAILABLE] * 5 == await backend.delete(OLD[:5])

        def second(_, place, nbytes):
            if nbytes == PAGE and place in stamps:
                seen.append(place)
                if len(seen) == 2:
                    loop.call_soon_threadsafe(task.cancel)
                    loop.call_soon_threadsafe(loop.call_soon, gate.set)
                    assert gate.wait(60)
            return False

        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", second)
            task = asyncio.ensure_future(put(backend, NEW[:1]))
            await asyncio.wait([task], timeout=60)
            assert task.cancelled()
        assert 2 == len(seen)
        assert [Verdict.DONE] == await put(backend, NEW[:1])
        assert {*OLD[5:], NEW[0]} == keys_on(tmp_path)
        assert [Verdict.DONE] * 4 == await put(backend, NEW[1:5])
        assert (11, 5) == (await there(backend, OLD), await there(backend, NEW))
        await backend.aclose()

    async def test_older_copy_that_a_start_cannot_wipe_is_wiped_later(
        self, tmp_path, monkeypatch
    ):
        """R-52: of two slots with one block the older one is used when its stamp is gone."""
        backend = await full(tmp_path)
        start, _, stamp = find(tmp_path, OLD[0])
        before = (tmp_path / BLOCKS).read_bytes()[start : stamp + PAGE]
        assert [Verdict.DONE] * 2 == await backend.delete(OLD[:2])
        assert [Verdict.DONE] == await put(backend, OLD[1:2])  # takes the first's slot
        assert [Verdict.DONE] == await put(backend, OLD[:1])
        await backend.aclose()
        write(tmp_path, start, before)
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            backend = await open_disk(tmp_path, capacity=ONE_EACH)
            assert 15 == await there(backend, OLD)
        assert [Verdict.DONE] == await put(backend, OLD[1:2])
        assert 16 == await there(backend, OLD)
        assert start == find(tmp_path, OLD[1])[0]
        await backend.aclose()

    async def test_bad_spot_stops_nobody_and_is_used_by_nobody(
        self, tmp_path, monkeypatch
    ):
        """R-51: a drive that writes elsewhere is well; a slot that it never wipes is not reused,
        and what is there is looked at by the next start."""
        backend = await full(tmp_path)
        start, _, bad = find(tmp_path, OLD[3])
        with monkeypatch.context() as patch:
            refused = Refused(
                patch,
                "pwritev",
                lambda _, place, nbytes: place <= bad < place + nbytes,
                how="torn",
            )
            assert 1 == (await put(backend, NEW)).count(Verdict.UNAVAILABLE)
            assert 15 == await there(backend, NEW)
            refused.places.clear()
            for key in LATER:
                assert [Verdict.DONE] == await put(backend, [key])
            assert start not in refused.places
            assert 15 == await there(backend, LATER)
            await backend.aclose()
        assert OLD[3] in keys_on(tmp_path)
        backend = await open_disk(tmp_path, capacity=ONE_EACH)
        assert (0, 15) == (await there(backend, OLD), await there(backend, LATER))
        await backend.aclose()

    @pytest.mark.parametrize("which", [0, 2], ids=["data", "stamp"])
    async def test_bad_place_costs_one_put(self, tmp_path, monkeypatch, which):
        """R-51: its slot was free at once, and the first one of each put from then on: of a tier that was full
        no call was well any more, until it was asked to take a block at a time, and took none."""
        backend = await full(tmp_path)
        bad = find(tmp_path, OLD[3])[which]
        assert [Verdict.DONE] == await backend.delete(OLD[3:4])
        with monkeypatch.context() as patch:
            Refused(
                patch, "pwritev", lambda _, place, nbytes: place <= bad < place + nbytes
            )
            assert 1 == (await put(backend, NEW)).count(Verdict.UNAVAILABLE)
            for key in LATER[1:]:
                assert [Verdict.DONE] == await put(backend, [key])
        assert 15 == await there(backend, LATER)
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EACH)
        assert [Verdict.DONE] == await put(backend, LATER[:1])
        assert 16 == await there(backend, LATER)
        await backend.aclose()

    async def test_block_that_cannot_be_read_is_deleted_and_put_anew(
        self, tmp_path, monkeypatch
    ):
        """R-51: also where a mark cannot be read either that the drive could be asked for."""
        backend = await full(tmp_path)
        bad = {0, find(tmp_path, OLD[9])[0]}
        with monkeypatch.context() as patch:
            Refused(patch, "preadv", lambda _, place, nbytes: place in bad)
            told = [got.verdict for got, _ in await fetch(backend, OLD)]
            assert Verdict.GARBAGE is told[9]
            assert 15 == told.count(Verdict.DONE)
            assert [Verdict.DONE] == await backend.delete(OLD[9:10])
            assert [Verdict.DONE] == await put(backend, OLD[9:10])
        assert 16 == await there(backend, OLD)
        await backend.aclose()

    async def test_block_that_is_deleted_in_vain_amid_a_read_is_read(
        self, tmp_path, monkeypatch
    ):
        """R-51: on a drive that is read-only the read raised, which ended the agent as by a bug."""
        backend, gate, real = await full(tmp_path), Gate(), os.preadv

        def read_and_wait(*args):
            nbytes = real(*args)
            gate()
            return nbytes

        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            patch.setattr(_drive.os, "preadv", read_and_wait)
            reading = asyncio.ensure_future(fetch_sound(backend, OLD[:1]))
            await asyncio.to_thread(gate.wait_reached)
            assert [Verdict.UNAVAILABLE] == await backend.delete(OLD[:1])
            gate.open()
            assert [True] == await reading
        assert [Verdict.DONE] * 16 == await put(backend, OLD[:1] + NEW[:15])
        assert 16 == (await backend.stats()).blocks
        await backend.aclose()

    async def test_memory_of_the_system_is_no_answer_of_a_drive(
        self, tmp_path, monkeypatch
    ):
        """R-51: a drive that is gone is asked past what the system remembers of it, and none of its
        blocks is garbage."""
        backend, remembered = await full(tmp_path), set(range(0, ONE_EACH, 3 * PAGE))
        with monkeypatch.context() as patch:
            Refused(patch, "preadv", lambda _, place, nbytes: place not in remembered)
            patch.setattr(
                _drive.os,
                "posix_fadvise",
                lambda fd, place, nbytes, advice: remembered.discard(place),
            )
            (got, _), *_ = await fetch(backend, OLD[:1])
        assert Verdict.UNAVAILABLE is got.verdict
        await backend.aclose()
