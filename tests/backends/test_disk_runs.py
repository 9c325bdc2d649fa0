# SPDX-License-Identifier: Apache-2.0
"""Slots side by side travel together, and nothing else does."""

import asyncio
import errno
import mmap
import os

import anyio
import pytest

from tests.backends.disk_kit import open_disk
from ucm.agent.calls import CALL_BYTES, blocks_per_call
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.backends.disk import _backend, _drive
from ucm.backends.disk._drive import Drive
from ucm.backends.disk._extent import Extent, Slot
from ucm.backends.disk._runs import cut_runs, tell_each
from ucm.backends.disk._stamp import PAGE, Mark
from ucm.testing.backend_contract import BLOCK, fetch, fetch_sound, seal
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

ONE, OTHER = Extent(0, 0, Mark(1, 1)), Extent(0, 1, Mark(2, 1))


def runs_of(places, num_runs=1, extent=ONE):
    """Return how slots of two pages at these places are cut."""
    pairs = [(Slot(extent, place * PAGE), None) for place in places]
    runs = cut_runs(pairs, num_runs)
    return [[slot.place // PAGE for slot, _ in run] for run in runs]


class TestCutting:
    @pytest.mark.parametrize(
        ("places", "num_runs", "wanted"),
        [
            ([], 1, []),
            ([1], 1, [[1]]),
            ([1, 3, 5], 1, [[1, 3, 5]]),
            ([1, 3, 7, 9], 1, [[1, 3], [7, 9]]),
            ([5, 3, 1], 1, [[5], [3], [1]]),
            ([1, 3, 5, 7], 2, [[1, 3], [5, 7]]),
            ([1, 3, 5, 7], 4, [[1], [3], [5], [7]]),
            ([1, 3, 5, 7], 99, [[1], [3], [5], [7]]),
        ],
    )
    def test_neighbours_travel_together(self, places, num_runs, wanted):
        """In order, without a gap, and as many runs as there may be requests."""
        assert wanted == runs_of(places, num_runs)

    def test_run_is_bounded(self):
        """A request is of four megabytes, or of as many small blocks as a system's call takes."""
        assert [512, 512, 76] == [len(run) for run in runs_of(range(1, 2201, 2))]
        large = Extent(0, 0, Mark(1, 256))
        places = range(1, 1 + 10 * 257, 257)
        assert [4, 4, 2] == [len(run) for run in runs_of(places, extent=large)]

    def test_long_runs_are_a_megabyte_at_least(self):
        """Two requests keep a drive as busy as two of less, and cost less Python; short ones are of like size."""
        assert [256, 44] == [len(run) for run in runs_of(range(1, 601, 2), 2)]
        assert [75] * 4 == [len(run) for run in runs_of(range(1, 601, 2), 4)]

    def test_extents_are_kept_apart(self):
        """Two that lie side by side in the file may be cut in different ways."""
        pairs = [(Slot(ONE, PAGE), 1), (Slot(OTHER, 3 * PAGE), 2)]
        assert [pairs[:1], pairs[1:]] == cut_runs(pairs, 1)

    def test_each_is_told_of(self):
        """What a run has told belongs to its slots; what was not begun has the default."""
        assert [1, 2, 0, 0, 3] == tell_each(
            [[9, 9], [9, 9], [9]], [[1, 2], None, [3]], 0
        )


@pytest.mark.asyncio
class TestTogether:
    @pytest.mark.parametrize(
        ("threads", "nbytes", "count"),
        [
            (1, 1 << 20, 8),
            (1, 1 << 16, 32),
            (8, 1 << 16, 256),
            (4, 1 << 20, 32),
            (32, 1 << 16, 256),
        ],
    )
    async def test_call_has_much_of_small_blocks(
        self, tmp_path, threads, nbytes, count
    ):
        """But no more than few threads and a slow drive find in time; of large ones so little that one call is
        looked at while another moves."""
        backend = await open_disk(tmp_path, capacity=64 << 20, threads=threads)
        assert count == blocks_per_call(backend.capabilities, nbytes)
        await backend.aclose()

    async def test_batch_goes_in_few_requests(self, tmp_path, monkeypatch):
        """Thirty-two small blocks take four writes and four reads of four threads."""
        keys, calls = make_keys(32), []
        backend = await open_disk(tmp_path, capacity=64 << 20)
        for name in ("pwritev", "preadv"):
            real = getattr(os, name)
            monkeypatch.setattr(
                _drive.os,
                name,
                lambda *args, name=name, real=real: calls.append(name) or real(*args),
            )
        await backend.put([seal(keys[0])])
        await backend.delete(keys[:1])
        calls.clear()
        assert [Verdict.DONE] * 32 == await backend.put([seal(key) for key in keys])
        assert 6 >= calls.count("pwritev") >= 4
        assert [True] * 32 == await fetch_sound(backend, keys)
        assert 6 >= calls.count("preadv") >= 4
        await backend.aclose()

    async def test_call_of_many_blocks_of_a_page_is_carried_out(
        self, tmp_path, monkeypatch
    ):
        """R-51: a system takes so many pieces of memory in one call, and refuses more: each block
        would be a request of its own then."""
        keys, memory = make_keys(600), memoryview(mmap.mmap(-1, 600 * PAGE))
        places = [memory[at * PAGE :][:PAGE] for at in range(600)]
        blocks = []
        for key, place in zip(keys, places, strict=True):
            given = seal(key, PAGE)
            place[:] = given.data
            blocks.append(Sealed(key, place, given.checksum))
        backend = await open_disk(tmp_path, capacity=256 << 20, threads=1)
        real, sizes = os.pwritev, list[int]()

        def write(fd, parts, place):
            sizes.append(len(parts))
            return real(fd, parts, place)

        monkeypatch.setattr(_drive.os, "pwritev", write)
        assert [Verdict.DONE] * 600 == await backend.put(blocks)
        assert [1024, 176] == [size for size in sizes if size > 1]
        assert [True] * 600 == await fetch_sound(backend, keys, PAGE)
        await backend.aclose()

    @pytest.mark.parametrize("verb", ["preadv", "pwritev"])
    async def test_bad_spot_harms_its_own_block_only(self, tmp_path, monkeypatch, verb):
        """R-51: a run that fails is tried slot by slot. What a drive cannot read that answers elsewhere is
        garbage, which its reader deletes, and no word that nobody should ask the drive."""
        keys = make_keys(8)
        backend = await open_disk(tmp_path, capacity=64 << 20, threads=1)
        await backend.put([seal(key) for key in keys])
        bad = backend._slots.find(keys[5]).place
        if verb == "pwritev":
            keys = make_keys(8, first=50)
            bad += 8 * 2 * PAGE  # they come to lie behind the others
        real = getattr(os, verb)

        def call(fd, parts, place):
            if place <= bad < place + sum(map(len, parts)):
                raise OSError(errno.EIO, "a bad spot")
            return real(fd, parts, place)

        monkeypatch.setattr(_drive.os, verb, call)
        if verb == "preadv":
            told = [got.verdict for got, _ in await fetch(backend, keys)]
        else:
            told = await backend.put([seal(key) for key in keys])
        bad_end = Verdict.GARBAGE if verb == "preadv" else Verdict.UNAVAILABLE
        assert 1 == told.count(bad_end)
        assert 7 == told.count(Verdict.DONE)
        monkeypatch.undo()
        there = await backend.exists(keys)
        assert (verb == "preadv") + 7 == there.count(Presence.PRESENT)
        assert (verb == "preadv") + 7 == sum(await fetch_sound(backend, keys, BLOCK))
        await backend.aclose()

    async def test_short_call_does_not_wait_for_the_end_of_long_ones(
        self, tmp_path, monkeypatch
    ):
        """Long ones come one after the other; what one request waits for takes turns with them."""
        keys, gate, begun = make_keys(257), Gate(), list[str]()
        calls = {"first": keys[:128], "second": keys[128:256], "short": keys[256:]}
        of = {key: name for name, some in calls.items() for key in some}
        backend = await open_disk(tmp_path, capacity=64 << 20, threads=1)
        real = Drive.write

        def write(drive, run):
            begun.append(of[run[0][1].key])
            gate()
            return real(drive, run)

        monkeypatch.setattr(Drive, "write", write)
        async with anyio.create_task_group() as group:
            for some in calls.values():
                group.start_soon(backend.put, [seal(key, 1 << 16) for key in some])
                await asyncio.to_thread(gate.wait_reached)
                await anyio.wait_all_tasks_blocked()
            gate.open()
        assert ["first", "short", "second"] == list(dict.fromkeys(begun))
        assert all(await fetch_sound(backend, keys, 1 << 16))
        await backend.aclose()

    @pytest.mark.parametrize("verb", ["read", "write"])
    async def test_drive_has_so_many_bytes_to_move_at_a_time(
        self, tmp_path, monkeypatch, verb
    ):
        """It serves all alike. Calls that began together would end together, and it
        would have nothing to do until what came was looked at."""
        assert CALL_BYTES == _backend._AT_ONCE_BYTES
        monkeypatch.setattr(_backend, "_AT_ONCE_BYTES", 2 * BLOCK)
        keys, gate, begun = make_keys(8), Gate(), []
        backend = await open_disk(tmp_path, capacity=64 << 20, threads=9)
        if verb == "read":
            await backend.put([seal(key) for key in keys])
        real = getattr(Drive, verb)

        def call(drive, run):
            begun.append(run)
            gate()
            return real(drive, run)

        monkeypatch.setattr(Drive, verb, call)

        async def move(some):
            if verb == "read":
                assert all(await fetch_sound(backend, some))
            else:
                await backend.put([seal(key) for key in some])

        async with anyio.create_task_group() as group:
            for some in (keys[:2], keys[2:]):
                group.start_soon(move, some)
            await asyncio.to_thread(gate.wait_reached)
            await backend._crew.run([None] * 99, lambda _: None, [None] * 99)
            num_early = len(begun)
            gate.open()
        assert 2 >= num_early
        assert 8 == sum(map(len, begun))
        assert all(await fetch_sound(backend, keys))
        await backend.aclose()
