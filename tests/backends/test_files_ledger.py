# SPDX-License-Identifier: Apache-2.0
"""Several machines on one share: what each knows of all, and who walks through it."""

import errno
import math
import os
import shutil

import anyio
import pytest

from tests.backends.test_files import BLOCK, open_files, put
from tests.native_kit import by_python  # noqa: F401  a fixture
from ucm.backends.abc import Verdict
from ucm.backends.files import _ledger, _share, _writing
from ucm.backends.files._ledger import Ledger, Seen, Tally, _Count
from ucm.backends.files._share import Share
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

WHOLE = BLOCK + 128
KEYS = make_keys(96)


@pytest.fixture
def root(tmp_path):
    """Return where the share is."""
    return tmp_path / "share"


@pytest.fixture
def walks(monkeypatch):
    """Return a list that has an item for each walk."""
    found, walk = [], _share.Walk

    def watched(*args):
        found.append(args)
        return walk(*args)

    monkeypatch.setattr(_share, "Walk", watched)
    return found


def files_of(root):
    """Return how many blocks lie there."""
    return sum(1 for _ in root.glob("blocks/*/*/*"))


def open_ledger(root):
    """Return a writer's ledger of a share."""
    share = Share(root, touch_s=0.0, orphan_s=3600.0, lasting=False)
    share.claim("tiers.0.path")
    return Ledger(share, 600.0)


def count(ledger, known=0, patience_s=0.0):
    """Have all counted, where nobody needs room."""
    return ledger.collect(known, 1 << 40, 1 << 40, 0, patience_s)


def no_new_files(monkeypatch, error):
    """Have no file made any more; those that are there are found."""
    real = os.open

    def refuse(path, flags, *more, **how):
        if flags & os.O_CREAT and not os.path.lexists(path):
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *more, **how)

    monkeypatch.setattr(os, "open", refuse)


def make_block(root, nbytes):
    """Put a file among blocks, as a writer would."""
    place = root / "blocks" / "00" / "00"
    place.mkdir(parents=True, exist_ok=True)
    (place / KEYS[len(os.listdir(place))].hex()).write_bytes(b"x" * nbytes)


@pytest.mark.usefixtures("by_python")
@pytest.mark.asyncio
class TestManyMachines:
    async def test_share_never_has_more_than_its_capacity(self, root, monkeypatch):
        """R-63: eight machines that fill a share of sixteen blocks at once have no more there, at
        any time, and each knows how many."""
        most, give_name = [], _writing.give_name

        def watched(*args):
            is_new = give_name(*args)
            most.append(files_of(root))
            return is_new

        monkeypatch.setattr(_writing, "give_name", watched)
        backends = [await open_files(root, capacity=16 * WHOLE) for _ in range(8)]
        told = []

        async def fill(at):
            for key in KEYS[12 * at : 12 * (at + 1)]:
                told.extend(await put(backends[at], key))

        async with anyio.create_task_group() as group:
            for at in range(8):
                group.start_soon(fill, at)
        assert [Verdict.DONE] * 96 == told
        assert 8 <= max(most) <= 16
        for backend in backends:  # else a count may be one that was made amid puts
            if backend._room._collection is not None:
                await backend._room._collection.wait()
        await backends[0]._room.tell()
        await backends[0]._room.start().wait()
        left = files_of(root)
        for backend in backends:
            await backend._room.tell()
            stats = await backend.stats()
            assert (left, left * WHOLE) == (stats.blocks, stats.nbytes)
            await backend.aclose()

    async def test_one_walk_serves_all(self, root, walks):
        """Who comes to a share that was counted lately walks through none of it."""
        backends = [await open_files(root) for _ in range(5)]
        for backend, key in zip(backends, KEYS, strict=False):
            if backend._room._collection is not None:
                await backend._room._collection.wait()
            assert [Verdict.DONE] == await put(backend, key)
        assert 1 == len(walks)
        stats = await backends[-1].stats()
        assert (5, 5 * WHOLE) == (stats.blocks, stats.nbytes)
        for backend in backends:
            await backend.aclose()

    async def test_share_is_not_emptied_in_vain(self, root):
        """Where all put more at once than it takes it is full for them, and no longer than that."""
        backend, other = await open_files(root, capacity=8 * WHOLE), open_ledger(root)
        assert [Verdict.DONE] * 8 == await put(backend, *KEYS[:8])
        other.mine = Tally(moving=4 * WHOLE)
        other.look()
        backend._room._patience_s = 5.0
        assert [Verdict.FULL] == await put(backend, KEYS[8], nbytes=5 * BLOCK)
        assert 8 == files_of(root)
        other.mine = Tally()
        other.look()
        assert [Verdict.DONE] == await put(backend, KEYS[8], nbytes=5 * BLOCK)
        assert 3 == files_of(root)
        await backend.aclose()

    async def test_block_of_all_there_is_leaves_a_share_that_removes(self, root):
        """Where walks are long one begins before there is no room; it need not leave less than
        nothing."""
        backend = await open_files(root, capacity=8 * WHOLE)
        await put(backend, *KEYS[:4])
        backend._room._patience_s = 0.0
        await put(backend, KEYS[4], nbytes=8 * WHOLE - 128)
        await backend._room.start().wait()
        backend._room._take()
        assert -math.inf == backend._room._full_until
        await backend.aclose()

    @pytest.mark.parametrize("place", ["write_whole", "entries_of"])
    async def test_what_is_given_up_is_not_about_to_be_put(
        self, root, monkeypatch, place
    ):
        """Others have its room at once, though whoever gave it up puts nothing more."""
        backend, other = await open_files(root), open_ledger(root)
        await backend._room.start().wait()
        gate, module = Gate(), _writing if place == "write_whole" else _ledger
        real = getattr(module, place)
        monkeypatch.setattr(module, place, lambda *args: gate() or real(*args))
        async with anyio.create_task_group() as group:
            group.start_soon(put, backend, KEYS[0])
            await anyio.to_thread.run_sync(gate.wait_reached)
            group.cancel_scope.cancel()
        gate.open()
        await backend._room._telling.wait()
        assert (1, 0) == (other.look().number, other.look().moving)
        await backend.aclose()

    async def test_counts_that_begin_anew_are_known(self, root):
        """Whoever knew more of them, as somebody has removed these, takes the next one's word."""
        one = await open_files(root)
        await one._room.start().wait()
        for known in range(8):
            count(one._room._ledger, known)
        await one._room.tell()
        shutil.rmtree(root / "room")
        other = await open_files(root)
        await other._room.start().wait()
        assert [Verdict.DONE] == await put(other, KEYS[0])
        await one._room.tell()
        assert 1 == (await one.stats()).blocks
        await one.aclose()
        await other.aclose()


class TestTallies:
    def test_all_know_what_one_has_put_and_is_about_to(self, root):
        """Behind a count that another one has made, without a walk of their own."""
        one, other = open_ledger(root), open_ledger(root)
        make_block(root, 700)
        count(one)
        one.mine = Tally(3, 300, 50)
        one.look()
        other.mine = Tally(0, 0, 8)
        seen = other.look()
        assert (1, 4, 1000, 50) == (seen.number, seen.blocks, seen.nbytes, seen.moving)
        assert 1000 == seen.put(other.mine) == one.look().put(one.mine)

    def test_count_has_what_was_put_before_it(self, root):
        """Which counts once: what its tally tells behind that is what was put since."""
        one, other = open_ledger(root), open_ledger(root)
        one.mine = Tally(1, 700, 0)
        one.look()
        make_block(root, 700)
        assert 700 == count(other).put(other.mine)
        one.mine = Tally(3, 900, 0)
        assert 900 == one.look().put(one.mine)
        assert 900 == other.look().put(other.mine)

    def test_tally_that_was_removed_begins_anew(self, root):
        """It was idle for long: what it had told was counted, and is not told again."""
        one, other = open_ledger(root), open_ledger(root)
        one.mine = Tally(1, 700, 0)
        one.look()
        make_block(root, 700)
        os.unlink(one._file)
        count(other)
        one.mine = Tally(3, 900, 0)
        assert 900 == one.look().put(one.mine)
        seen = other.look()
        assert (3, 900) == (seen.blocks, seen.put(other.mine))

    def test_tally_that_was_told_without_an_answer_is_one(self, root, monkeypatch):
        """R-51: what was about to be put as the server went away is not so for ever."""
        one, other = open_ledger(root), open_ledger(root)
        count(other)
        one.look()
        rename, errors = os.rename, [errno.ETIMEDOUT]

        def answer_lost(*args):
            rename(*args)
            if errors:
                raise OSError(errors[0], os.strerror(errors.pop()))

        monkeypatch.setattr(os, "rename", answer_lost)
        one.mine = Tally(moving=500)
        assert one.look() is None
        assert 500 == other.look().moving
        one.mine = Tally(1, 500, 0)
        assert 500 == one.look().put(one.mine)
        seen = other.look()
        assert (1, 500, 0) == (seen.blocks, seen.nbytes, seen.moving)

    @pytest.mark.parametrize("name", ["count-7", "count-x", f"{'0' * 32}.1.1.7_1_2_x"])
    @pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
    def test_what_is_not_ours_is_no_word_on_anything(self, root, name, kind):
        """Whatever lies there by such a name: all is counted, and others find that."""
        one, other = open_ledger(root), open_ledger(root)
        one.look()
        make_block(root, 700)
        path = root / "room" / name
        match kind:
            case "file":
                path.write_bytes(b'{"blocks": -1}')
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to("/proc/self/status")
            case "pipe":
                os.mkfifo(path)
        assert Seen() == other.look()
        assert 700 == count(one).put(one.mine)
        assert 700 == other.look().put(other.mine)

    @pytest.mark.parametrize("kind", ["file", "text", "folder"])
    def test_what_is_not_ours_takes_the_place_of_no_count(self, root, kind):
        """The last one is good until the next: a power cut may have left a later one empty."""
        one, other = open_ledger(root), open_ledger(root)
        make_block(root, 700)
        count(one)
        assert 700 == other.look().nbytes
        path = root / "room" / "count-2"
        text = b'{"tallies": {"\xff": [0, 0]}}' if kind == "text" else b""
        path.mkdir() if kind == "folder" else path.write_bytes(text)
        one.mine = Tally(1, 300, 0)
        files = os.listdir("/proc/self/fd")
        one.look()
        assert 1000 == other.look().nbytes
        assert len(files) == len(os.listdir("/proc/self/fd"))
        for known in range(1, 5):
            count(one, known)
        assert {"count-2", "count-6"} >= {
            path.name for path in root.glob("room/count-*")
        }

    def test_count_of_a_time_to_come_is_as_old_as_it_is_known(self, root):
        """Or, where the share's clock was set back, nobody would count again for as long."""
        one, other = open_ledger(root), open_ledger(root)
        count(one)
        os.utime(root / "room" / "count-1", (1e11, 1e11))
        assert 0.0 <= other.look().age_s < 600.0


class TestCollecting:
    def test_who_finds_another_at_it_does_not_walk(self, root, walks):
        """It has to wait for that one's count, if it has the patience."""
        one, other = open_ledger(root), open_ledger(root)
        assert one._begin()
        assert Seen() == count(other)
        assert [] == walks

    def test_long_walk_of_another_is_waited_for_once(self, root, monkeypatch):
        """Each look costs the server calls: nobody has it look fifty times a second for an hour."""
        one, other = open_ledger(root), open_ledger(root)
        assert one._begin()
        count(other)
        looks, look = [], other.look
        with monkeypatch.context() as watched:
            watched.setattr(other, "look", lambda: looks.append(0) or look())
            assert math.inf == count(other, patience_s=2.0).seconds
        assert 1 == len(looks)
        one._keep(_Count(0, 0, 0.25, None, {}))
        assert 0.25 == other.look().seconds

    def test_turn_of_one_that_has_died_is_taken(self, root, walks):
        """Its file was not touched for a minute of the share's own clock."""
        one, other = open_ledger(root), open_ledger(root)
        assert one._begin()
        os.utime(root / "room" / "collecting", (1.0, 1.0))
        assert 1 == count(other, patience_s=20.0).number
        assert 1 == len(walks)
        assert not (root / "room" / "collecting").exists()

    @pytest.mark.parametrize("clock", ["unknown", "set back"])
    def test_turn_of_one_that_has_died_is_taken_without_the_clock_of_the_share(
        self, root, monkeypatch, clock
    ):
        """On a share that takes no file, or whose clock was set back, all were full for ever."""
        one, other = open_ledger(root), open_ledger(root)
        assert one._begin()
        if clock == "set back":
            os.utime(root / "room" / "collecting", (1e11, 1e11))
        else:
            no_new_files(monkeypatch, errno.ENOSPC)
        assert Seen() == count(other)
        monkeypatch.setattr("ucm.backends.files._ledger._SILENT_S", 0.0)
        assert 0 == count(other, patience_s=20.0).number
        assert 1 == count(other, patience_s=20.0).number

    def test_one_that_walks_for_long_says_so(self, root, monkeypatch):
        """Its file is touched for each directory, at most every few seconds."""
        one = open_ledger(root)
        make_block(root, 700)
        ages, real = [], os.utime

        def touched(path, *args):
            if str(path).endswith("collecting"):
                ages.append(path)
            real(path, *args)

        monkeypatch.setattr(os, "utime", touched)
        count(one)
        assert [] == ages
        monkeypatch.setattr("ucm.backends.files._ledger._TOUCHED_S", -1.0)
        count(one, known=1)
        assert 1 == len(ages)

    def test_later_count_with_room_is_taken_as_it_is(self, root, walks):
        """And one that leaves none is not."""
        one, other = open_ledger(root), open_ledger(root)
        make_block(root, 700)
        count(one)
        assert 1 == other.collect(0, 700, 600, 0, 0.0).number
        assert (1, 0) == (len(walks), other.num_evicted)
        seen = other.collect(0, 699, 600, 0, 0.0)
        assert (2, 0) == (seen.number, seen.nbytes)
        assert (2, 1) == (len(walks), other.num_evicted)

    def test_who_waits_for_a_count_again_and_again_sweeps_once(self, root, monkeypatch):
        """Each sweep asks for the age of each tally, and of all that is being written."""
        one, other = open_ledger(root), open_ledger(root)
        swept, sweep = [], other._share.sweep
        monkeypatch.setattr(other._share, "sweep", lambda: swept.append(0) or sweep())
        for known in range(4):
            count(one, known)
            assert known + 1 == count(other, known).number
        assert 1 == len(swept)

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
    def test_share_that_takes_no_file_is_counted_for_oneself(
        self, root, monkeypatch, error
    ):
        """Nobody else hears of it, and what is put behind that is known to whoever puts it."""
        one = open_ledger(root)
        make_block(root, 700)
        no_new_files(monkeypatch, error)
        one.mine = Tally(2, 200, 0)
        assert 700 == count(one).put(one.mine)
        one.mine = Tally(3, 300, 5)
        assert 800 == one.look().put(one.mine)
        assert 2 == count(one, known=1).number
