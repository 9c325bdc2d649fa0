# SPDX-License-Identifier: Apache-2.0
"""Deaths: of a process at any time, of a write within, of power between pages."""

import pytest

from tests.backends.disk_child import AMPLE, TIGHT, Killed
from tests.backends.disk_kit import find, open_disk, write
from ucm.backends.abc import Presence
from ucm.backends.disk._drive import BLOCKS
from ucm.testing.backend_contract import BLOCK, fetch_sound, seal
from ucm.testing.store_blocks import make_keys, payload

OLD, NEW = make_keys(1), make_keys(1, first=1)
ONE_EXTENT = 16 * 5 * BLOCK
"""Extents with one slot of three pages each, and no room to spare."""
NBYTES = 3 * BLOCK


@pytest.mark.slow
@pytest.mark.asyncio
class TestKilled:
    @pytest.mark.parametrize("capacity", [AMPLE, TIGHT])
    async def test_killed_process_leaves_whole_blocks(self, tmp_path, capacity):
        """R-52: killed at random, what is found is whole, what was deleted is gone, and
        where nothing was evicted all that was put is there."""
        killed, num_found = Killed(tmp_path, capacity, seed=7), 0
        for _ in range(4):
            killed.round()
            num_found += sum(await killed.check())
        assert num_found > 8


async def drive_with(path, key):
    """Make a drive with one block, and return where it lies: start, stop, stamp."""
    backend = await open_disk(path, capacity=ONE_EXTENT)
    await backend.put([seal(key, NBYTES)])
    await backend.aclose()
    return find(path, key)


async def found(path):
    """Return what a scan finds of the old and the new block, none of it unsound."""
    backend = await open_disk(path, capacity=ONE_EXTENT)
    there = [one is Presence.PRESENT for one in await backend.exists(OLD + NEW)]
    sound = await fetch_sound(backend, OLD + NEW, NBYTES)
    swept = (await backend.stats()).swept_total
    await backend.aclose()
    return there, sound, swept


@pytest.mark.asyncio
class TestTorn:
    @pytest.mark.parametrize("num_pages", range(4))
    async def test_write_that_was_cut_short_leaves_no_block(self, tmp_path, num_pages):
        """A death behind any page of a write: the old block as long as nothing was
        written, then neither, and no wrong bytes are ever served."""
        start, _, _ = await drive_with(tmp_path, OLD[0])
        write(tmp_path, start, payload(NEW[0], NBYTES)[: num_pages * BLOCK])
        is_old = num_pages == 0
        assert ([is_old, False], [is_old, False], not is_old) == await found(tmp_path)
        assert ([is_old, False], [is_old, False], 0) == await found(tmp_path)

    async def test_stamp_without_its_block_is_noticed(self, tmp_path):
        """Power that fails may leave a stamp and not all data: the checksum tells."""
        start, _, _ = await drive_with(tmp_path, OLD[0])
        write(tmp_path, start + BLOCK, bytes(BLOCK))
        there, sound, _ = await found(tmp_path)
        assert ([True, False], [False, False]) == (there, sound)

    @pytest.mark.parametrize("where", ["mark", "stamp"])
    async def test_damaged_page_loses_its_blocks_only(self, tmp_path, where):
        """A page of the index's that is gone is a miss, and its room is used again."""
        start, _, stamp = await drive_with(tmp_path, OLD[0])
        write(tmp_path, stamp if where == "stamp" else start - BLOCK, b"\x55" * 40)
        assert ([False] * 2, [False] * 2, 0) == await found(tmp_path)
        keys = make_keys(16, first=20)
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        await backend.put([seal(key, NBYTES) for key in keys])
        assert [True] * 16 == await fetch_sound(backend, keys, NBYTES)
        await backend.aclose()

    async def test_stamp_of_an_extent_that_was_taken_is_nobodys(self, tmp_path):
        """Blocks of one size, whose place others of another size have taken, are gone."""
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        small, large = make_keys(32, first=20), make_keys(16, first=90)
        await backend.put([seal(key) for key in small])
        await backend.put([seal(key, NBYTES) for key in large])
        before = (
            await fetch_sound(backend, small),
            await fetch_sound(backend, large, NBYTES),
        )
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        assert before == (
            await fetch_sound(backend, small),
            await fetch_sound(backend, large, NBYTES),
        )
        assert any(before[0]) != all(before[1])
        await backend.aclose()

    async def test_last_use_before_a_restart_is_by_time_of_writing(self, tmp_path):
        """Behind a restart the block that was put first goes first."""
        keys = make_keys(17)
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        for key in reversed(keys[:16]):
            await backend.put([seal(key, NBYTES)])
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        await backend.put([seal(keys[16], NBYTES)])
        there = await fetch_sound(backend, keys, NBYTES)
        assert [True] * 15 + [False, True] == there
        await backend.aclose()

    async def test_older_double_of_a_block_is_removed(self, tmp_path):
        """Of two slots with one key the later is served, and one deletion removes both."""
        _, _, stamp = await drive_with(tmp_path, OLD[0])
        data = bytearray((tmp_path / BLOCKS).read_bytes())
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        await backend.put([seal(NEW[0], NBYTES)])
        await backend.delete(OLD)
        await backend.put([seal(key, NBYTES) for key in make_keys(14, first=50)])
        await backend.put([seal(OLD[0], NBYTES)])
        await backend.aclose()
        later = find(tmp_path, OLD[0])
        assert later is not None
        extent = 5 * BLOCK * (stamp // (5 * BLOCK))
        write(tmp_path, extent, data[extent : extent + 5 * BLOCK])  # the first is back
        backend = await open_disk(tmp_path, capacity=ONE_EXTENT)
        assert [True] == await fetch_sound(backend, OLD, NBYTES)
        assert 1 == (await backend.stats()).swept_total
        await backend.delete(OLD)
        await backend.aclose()
        assert ([False, True], [False, True], 0) == await found(tmp_path)
