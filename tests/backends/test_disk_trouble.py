# SPDX-License-Identifier: Apache-2.0
"""Drives that refuse writes for a while, are gone, or have a bad spot: nothing goes that need not."""

import errno
import os

import pytest

from tests.backends.disk_kit import open_disk
from tests.backends.test_disk_drive import Failing
from ucm.backends.abc import Verdict
from ucm.backends.disk import _drive
from ucm.testing.backend_contract import BLOCK, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
KEYS = make_keys(6)


class TestTrouble:
    async def test_drive_that_refuses_writes_for_a_while_loses_nothing(
        self, tmp_path, monkeypatch
    ):
        """R-51: what was to make room stays where a write has changed nothing, however often it fails, and
        each slot is of use again once the drive takes blocks."""
        capacity = 16 * 3 * 4096
        backend = await open_disk(tmp_path, capacity=capacity)
        before = make_keys(16)
        await backend.put([seal(key) for key in before])
        there = (await backend.stats()).blocks
        known = [key for key in before if backend._slots.find(key)]
        failing = Failing(monkeypatch, "pwritev", "broken")
        for at in range(40):
            (told,) = await backend.put([seal(make_keys(1, first=100 + at)[0])])
            assert Verdict.UNAVAILABLE is told
        assert there == (await backend.stats()).blocks
        assert [True] * there == await fetch_sound(backend, known)
        failing.is_on = False
        after = make_keys(there, first=200)
        assert [Verdict.DONE] * there == await backend.put([seal(key) for key in after])
        assert there == (await backend.stats()).blocks
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=capacity)
        assert [True] * there == await fetch_sound(backend, after)
        await backend.aclose()

    async def test_bad_first_page_is_no_word_on_the_drive(self, tmp_path, monkeypatch):
        """R-51: a block that cannot be read is garbage also where one of the marks cannot be either."""
        backend = await open_disk(tmp_path, capacity=64 << 20)
        blocks = [
            seal(KEYS[0]),
            seal(KEYS[1], 40 << 10),
        ]  # each in an extent of its own
        assert [Verdict.DONE] * 2 == await backend.put(blocks)
        bad = {0, backend._slots.find(KEYS[0]).place}
        real = os.preadv

        def preadv(fd, parts, place):
            if place in bad:
                raise OSError(errno.EIO, "a bad spot")
            return real(fd, parts, place)

        monkeypatch.setattr(_drive.os, "preadv", preadv)
        (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(BLOCK))])
        assert Verdict.GARBAGE is got.verdict
        await backend.aclose()

    async def test_memory_of_the_system_is_no_answer_of_a_drive(
        self, tmp_path, monkeypatch
    ):
        """R-51: a drive that is gone is asked past what the system remembers of it, and none of its
        blocks is garbage."""
        backend = await open_disk(tmp_path)
        await backend.put([seal(KEYS[0])])
        remembered, real = {0}, os.preadv

        def preadv(fd, parts, place):
            if place not in remembered:
                raise OSError(errno.EIO, "it is gone")
            return real(fd, parts, place)

        def forget(fd, place, nbytes, advice):
            remembered.discard(place)

        monkeypatch.setattr(_drive.os, "preadv", preadv)
        monkeypatch.setattr(_drive.os, "posix_fadvise", forget)
        (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(BLOCK))])
        assert Verdict.UNAVAILABLE is got.verdict
        await backend.aclose()

    async def test_nothing_is_wiped_where_the_new_mark_is_not(
        self, tmp_path, monkeypatch
    ):
        """R-52: an extent that another size could not take is, for a restart, what it was: no page in
        the middle of a block of before is written to."""
        capacity, keys = 16 * 7 * 4096, make_keys(32, first=300)
        backend = await open_disk(tmp_path, capacity=capacity)
        large = [seal(key, 2 * BLOCK) for key in keys]
        assert [Verdict.DONE] * 32 == await backend.put(large)
        real, extent_bytes = os.pwritev, backend._slots.geometry.extent_bytes

        def pwritev(fd, parts, place):
            if not place % extent_bytes or sum(map(len, parts)) > 4096:
                raise OSError(errno.EIO, "no mark, and no block")
            return real(fd, parts, place)

        with monkeypatch.context() as patch:
            patch.setattr(_drive.os, "pwritev", pwritev)
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[0])])
            await backend.aclose()
        backend = await open_disk(tmp_path, capacity=capacity)
        assert [True] * 32 == await fetch_sound(backend, keys, 2 * BLOCK)
        await backend.aclose()

    async def test_slot_that_cannot_be_looked_at_behind_a_failed_write_is_used_by_nobody(
        self, tmp_path, monkeypatch
    ):
        """R-51: nobody knows then which block it has."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        await backend.put([seal(key) for key in make_keys(16)])
        there = (await backend.stats()).blocks
        with monkeypatch.context() as patch:
            Failing(patch, "pwritev", "broken")
            Failing(patch, "preadv", "broken")
            assert [Verdict.UNAVAILABLE] == await backend.put(
                [seal(make_keys(1, first=50)[0])]
            )
        assert there - 1 == (await backend.stats()).blocks
        await backend.aclose()
