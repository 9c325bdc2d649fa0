# SPDX-License-Identifier: Apache-2.0
"""What a start need not look through, and what it must, by how the drive was left."""

import errno
import os
import random
import shutil

import pytest

from tests.backends.disk_kit import keys_on, open_disk, write
from ucm.backends.abc import Presence, Verdict
from ucm.backends.disk import _drive, _index, _keeping
from ucm.backends.disk._index import INDEX, Index
from ucm.backends.disk._stamp import PAGE, Geometry, Mark
from ucm.testing.backend_contract import BLOCK, fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

SMALL = 16 * 7 * BLOCK
"""Sixteen extents of three slots of a page each."""
KEYS = make_keys(48)
GEOMETRY = Geometry.fit(4 * 7 * PAGE, 7 * PAGE)


async def opened(path, **settings):
    """Open a small drive."""
    return await open_disk(path, **({"capacity": SMALL} | settings))


async def die(backend):
    """Leave a drive as a killed process does: nothing more is written."""
    assert await backend._crew.aclose()
    for drive in backend._drives:
        drive.close(is_used=False)


async def full(path):
    """Fill a drive, and close it."""
    backend = await opened(path)
    assert [Verdict.DONE] * 48 == await backend.put([seal(key) for key in KEYS])
    await backend.aclose()


class Reads:
    """Counts what a start reads from the blocks' file."""

    def __init__(self, monkeypatch):
        self.count, self._real = 0, os.preadv
        monkeypatch.setattr(_drive.os, "preadv", self)

    def __call__(self, *args):
        """Read."""
        self.count += sum(map(len, args[1])) == 2 * PAGE
        return self._real(*args)

    def taken(self):
        """Return how many there were, and begin anew."""
        count, self.count = self.count, 0
        return count


ALL, LOOKED = 16, 3
"""One for each extent; one more for each slot of one that is looked through."""


@pytest.mark.asyncio
class TestStart:
    async def test_drive_that_was_closed_is_not_looked_through(
        self, tmp_path, monkeypatch
    ):
        """R-61: a start reads each extent's mark and no stamp, and finds all blocks."""
        await full(tmp_path)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL == reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_behind_a_death_only_what_was_changed_is_looked_through(
        self, tmp_path, monkeypatch
    ):
        """R-52: killed behind one put and one deletion, a start looks through two extents."""
        await full(tmp_path)
        backend, new = await opened(tmp_path), make_keys(1, first=90)
        assert [Verdict.DONE] == await backend.put([seal(new[0])])
        assert [Verdict.DONE] == await backend.delete(KEYS[40:41])
        await die(backend)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL + 2 * LOOKED == reads.taken()
        there = [False, *[True] * 39, False, *[True] * 7]
        assert [*there, True] == await fetch_sound(backend, [*KEYS, *new])
        await die(backend)
        reads.taken()
        await (await opened(tmp_path)).aclose()  # the last start has written them down
        assert ALL == reads.taken()

    async def test_many_puts_are_written_down_on_the_way(self, tmp_path, monkeypatch):
        """Of a drive that is written to all the time, a death costs a few extents."""
        monkeypatch.setattr(_keeping, "_SPARE", 2)
        monkeypatch.setattr(_keeping, "_PUTS", 1)
        backend = await opened(tmp_path)
        for at in range(0, 48, 3):
            await backend.put([seal(key) for key in KEYS[at : at + 3]])
        await die(backend)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL + 3 * LOOKED == reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_last_use_outlasts_a_restart(self, tmp_path):
        """What was read last before it was closed goes last behind it."""
        await full(tmp_path)
        backend = await opened(tmp_path)
        assert [True] == await fetch_sound(backend, KEYS[:1])
        await backend.put([seal(make_keys(1, first=90)[0])])
        await backend.aclose()
        backend = await opened(tmp_path)
        await backend.put([seal(key) for key in make_keys(2, first=91)])
        there = await backend.exists(KEYS[:5])
        assert [True, False, False, False, True] == [
            one is Presence.PRESENT for one in there
        ]
        await backend.aclose()


def other_boot(path, monkeypatch):
    """Start the machine again, the drive having been in use."""
    monkeypatch.setattr(_index, "_boot", lambda: b"\7" * 16)


def changed_by_somebody(path, _):
    """Let somebody write to the blocks who knows of no index, such as a former release."""
    write(path, 0, (path / "blocks").read_bytes()[:PAGE])


def put_back(path, _):
    """Put the blocks' file back out of a copy."""
    shutil.copy2(path / "blocks", path / "copy")
    (path / "copy").rename(path / "blocks")


def torn(place, byte=b"\x55"):
    """Return what damages the index at a place."""

    def tear(path, _):
        with (path / INDEX).open("r+b") as file:
            file.seek(place)
            file.write(byte * 40)

    return tear


def cut(path, _):
    """Cut the index off."""
    os.truncate(path / INDEX, PAGE)


def exchanged(path, _):
    """Exchange the records of two extents."""
    index = Index.open(path / INDEX, Geometry(16, 7 * BLOCK), (path / "blocks").stat())
    first, second = index._place(0), index._place(1)
    index.settle(os.open(path / "blocks", os.O_RDWR))
    index.close()
    with (path / INDEX).open("r+b") as file:
        pages = []
        for place in (first, second):
            file.seek(place)
            pages.append(file.read(PAGE))
        for place, page in zip((second, first), pages, strict=True):
            file.seek(place)
            file.write(page)


HEAD, RECORD = 0, 2 * PAGE
HARMS = {
    "head": (torn(HEAD), True),
    "changes": (torn(PAGE), True),
    "record": (torn(RECORD + 8), True),
    "change": (torn(PAGE, b"\xff"), True),
    "entries": (torn(RECORD + 60), True),
    "cut": (cut, True),
    "somebody": (changed_by_somebody, True),
    "copy": (put_back, True),
    "exchanged": (exchanged, True),
    "boot": (other_boot, False),
}


@pytest.mark.asyncio
class TestHarm:
    @pytest.mark.parametrize(("harm", "is_closed"), HARMS.values(), ids=HARMS)
    async def test_index_that_may_be_wrong_counts_for_nothing(
        self, tmp_path, monkeypatch, harm, is_closed
    ):
        """R-52, R-53: what it does not say for certain is looked through; nothing is lost."""
        await full(tmp_path)
        if not is_closed:
            await die(await opened(tmp_path))
        harm(tmp_path, monkeypatch)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL < reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.delete(KEYS[:24])
        await die(backend)
        backend = await opened(tmp_path)
        assert [False] * 24 + [True] * 24 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_machine_that_starts_anew_finds_what_was_closed(
        self, tmp_path, monkeypatch
    ):
        """An index that was closed in order outlasts the machine's next start."""
        await full(tmp_path)
        other_boot(tmp_path, monkeypatch)
        reads = Reads(monkeypatch)
        await (await opened(tmp_path)).aclose()
        assert ALL == reads.taken()

    async def test_machine_that_does_not_say_when_it_started_is_not_believed(
        self, tmp_path, monkeypatch
    ):
        """Without the number of its start, whatever was in use is looked through."""
        monkeypatch.setattr(_index, "_BOOT", tmp_path / "nothing")
        await full(tmp_path / "disk")
        await die(await opened(tmp_path / "disk"))
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path / "disk")
        assert ALL + 16 * LOOKED == reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_change_amid_writing_down_is_none_of_the_record(
        self, tmp_path, monkeypatch
    ):
        """R-52: what is told of an extent is told of the change that it was taken behind: a
        start behind a death looks it through, and finds what was put meanwhile."""
        backend = await opened(tmp_path)
        await backend.put([seal(KEYS[0])])
        run, changed = backend._crew.run, []

        async def run_later(pieces, *args, **kwargs):
            for extent, _ in pieces:
                backend._slots.change(extent)
                changed.append(extent)
            await run(pieces, *args, **kwargs)

        monkeypatch.setattr(backend._crew, "run", run_later)
        await backend._keeper._write_down(16, spare=0)
        monkeypatch.undo()
        (extent,) = changed
        (drive,) = backend._drives
        assert extent.change - 1 == drive._index.load(extent.number).change
        drive._touch(extent)
        await die(backend)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL + LOOKED == reads.taken()
        assert [True] == await fetch_sound(backend, KEYS[:1])
        await backend.aclose()

    async def test_drive_without_an_index_serves(self, tmp_path, monkeypatch):
        """Where there can be none, a drive is looked through at each start."""
        await (await opened(tmp_path)).aclose()
        (tmp_path / INDEX).unlink()
        (tmp_path / INDEX).mkdir()
        await full(tmp_path)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL + 16 * LOOKED == reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_index_that_cannot_be_written_is_none(self, tmp_path, monkeypatch):
        """No room for records: blocks are served, and the next start looks for them."""
        real = os.pwrite

        def pwrite(fd, data, place):
            if place >= RECORD:
                raise OSError(errno.ENOSPC, "no room")
            return real(fd, data, place)

        with monkeypatch.context() as patch:
            patch.setattr(_index.os, "pwrite", pwrite)
            await full(tmp_path)
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert ALL + 16 * LOOKED == reads.taken()
        assert [True] * 48 == await fetch_sound(backend, KEYS)
        await backend.aclose()

    async def test_slot_that_holds_who_knows_what_is_looked_at_again(
        self, tmp_path, monkeypatch
    ):
        """Where a stamp may have stayed that nobody counts, the next start looks."""
        await full(tmp_path)
        backend, real = await opened(tmp_path), os.pwritev

        def pwritev(*args):
            real(*args)
            raise OSError(errno.EIO, "I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(_drive.os, "pwritev", pwritev)
            new = make_keys(1, first=90)
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(new[0])])
        await backend.aclose()
        reads = Reads(monkeypatch)
        await (await opened(tmp_path)).aclose()
        assert ALL + LOOKED == reads.taken()

    async def test_extent_that_somebody_took_since_is_looked_through(self, tmp_path):
        """An index that knows of another mark than the drive's is not believed."""
        await full(tmp_path)
        await die(await opened(tmp_path))
        write(tmp_path, 0, Mark(5, 1).encode())
        backend = await opened(tmp_path)
        there = [one is Presence.PRESENT for one in await backend.exists(KEYS)]
        assert there == await fetch_sound(backend, KEYS)
        assert 45 == sum(there)
        await backend.aclose()

    async def test_nothing_is_written_to_blocks_that_the_index_does_not_know(
        self, tmp_path, monkeypatch
    ):
        """A change that cannot be announced is not made: put and deletion are unavailable."""
        await full(tmp_path)
        backend, before = await opened(tmp_path), keys_on(tmp_path)

        def touch(*args):
            raise OSError(errno.EIO, "I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(Index, "touch", touch)
            new = seal(make_keys(1, first=90)[0])
            assert [Verdict.UNAVAILABLE] == await backend.put([new])
            assert [Verdict.UNAVAILABLE] == await backend.delete(KEYS[9:10])
        assert before == keys_on(tmp_path)
        await backend.aclose()


@pytest.mark.slow
@pytest.mark.asyncio
class TestAnything:
    @pytest.mark.parametrize("seed", range(3))
    async def test_index_says_what_a_look_at_all_would(
        self, tmp_path, monkeypatch, seed
    ):
        """R-52: whatever was put, read and deleted, and however it ended, a start by the index
        finds the blocks that one without finds, and what was deleted stays away."""
        monkeypatch.setattr(_keeping, "_SPARE", 3)
        monkeypatch.setattr(_keeping, "_PUTS", 2)
        dice, keys, gone = random.Random(seed), make_keys(70), set()
        path, other = tmp_path / "disk", tmp_path / "other"
        for _ in range(12):
            backend = await opened(path)
            for _ in range(dice.randrange(20)):
                some = dice.sample(range(70), 3)
                if dice.random() < 0.7:
                    sizes = [(1 + at % 2) * BLOCK for at in some]
                    told = await backend.put(
                        [
                            seal(keys[at], size)
                            for at, size in zip(some, sizes, strict=True)
                        ]
                    )
                    gone -= set(some)
                    assert {Verdict.DONE, Verdict.PRESENT} >= set(told)
                elif dice.random() < 0.5:
                    await fetch(backend, [keys[at] for at in some])
                else:
                    await backend.delete([keys[at] for at in some])
                    gone |= set(some)
            await (backend.aclose() if dice.random() < 0.5 else die(backend))
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(path, other)
            (other / INDEX).unlink()
            found = [await self._found(place, keys) for place in (path, other)]
            assert found[0] == found[1]
            assert not gone & set(found[0])

    async def _found(self, path, keys):
        """Return the numbers of the blocks that are there; each must be whole."""
        backend = await opened(path)
        there = [
            at
            for at, one in enumerate(await backend.exists(keys))
            if one is Presence.PRESENT
        ]
        for at in there:
            assert [True] == await fetch_sound(
                backend, [keys[at]], (1 + at % 2) * BLOCK
            )
        await die(backend)
        return there
