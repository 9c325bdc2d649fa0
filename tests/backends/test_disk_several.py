# SPDX-License-Identifier: Apache-2.0
"""Of several drives one that is in trouble costs its own blocks, and is named."""

import anyio
import pytest

from tests.backends.disk_kit import Refused, open_disk
from ucm.backends.abc import Verdict
from ucm.backends.disk import _backend
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
PAGE = 4096
ONE_EACH = 16 * 3 * PAGE
"""Of each drive: sixteen extents of one slot each."""


async def put(backend, keys):
    """Put blocks; return what is told."""
    return await backend.put([seal(key) for key in keys])


async def test_drive_of_which_nothing_is_read_is_its_own_affair(tmp_path, monkeypatch):
    """R-51: of two drives one that was gone had the other one asked for nothing most of the time, and
    nobody was told which it was; where none answers the tier does not."""
    paths = [tmp_path / "a", tmp_path / "b"]
    backend = await open_disk(*paths, capacity=2 * ONE_EACH)
    tier, keys = BreakerBackend(backend, clock=lambda: 0.0), make_keys(32)
    assert [Verdict.DONE] * 32 == await put(tier, keys)
    bad = {backend._drives[0]._fd}
    with monkeypatch.context() as patch:
        Refused(patch, "preadv", lambda fd, *_: fd in bad)
        for _ in range(8):
            told = [got.verdict for got, _ in await fetch(tier, keys)]
            assert 16 == told.count(Verdict.DONE)
            assert 16 == told.count(Verdict.UNAVAILABLE)
        assert [str(paths[0])] == tier.away
        assert not tier.is_open
        bad.add(backend._drives[1]._fd)
        for _ in range(3):
            await fetch(tier, keys)
        assert tier.is_open
    assert 32 == sum(await fetch_sound(backend, keys))
    assert [] == tier.away
    await tier.aclose()


async def test_drive_that_takes_single_pages_only_is_its_own_affair(
    tmp_path, monkeypatch
):
    """R-51: it passed for well before each put, and had the other one be given nothing most of the time; where
    neither takes a block the tier does not."""
    paths, first = [tmp_path / "a", tmp_path / "b"], 200
    backend = await open_disk(*paths, capacity=2 * ONE_EACH)
    tier = BreakerBackend(backend, clock=lambda: 0.0)
    assert [Verdict.DONE] * 32 == await put(tier, make_keys(32, first=first))
    bad = {backend._drives[0]._fd}
    with monkeypatch.context() as patch:
        Refused(patch, "pwritev", lambda fd, _, nbytes: fd in bad and nbytes > PAGE)
        for _ in range(8):
            first += 32
            told = await put(tier, make_keys(4, first=first))
            assert 2 == told.count(Verdict.DONE) == told.count(Verdict.UNAVAILABLE)
        assert [str(paths[0])] == tier.refusing
        assert not tier.refuses
        bad.add(backend._drives[1]._fd)
        for at in range(3):
            await put(tier, make_keys(1, first=at))
        assert tier.refuses
    await tier.aclose()


async def test_drive_that_is_away_is_looked_for(tmp_path, monkeypatch):
    """R-51: it was named until somebody had a block of it."""
    monkeypatch.setattr(_backend, "_LOOK_S", 0.0)
    paths = [tmp_path / "a", tmp_path / "b"]
    backend, keys = await open_disk(*paths, capacity=2 * ONE_EACH), make_keys(32)
    assert [Verdict.DONE] * 32 == await put(backend, keys)
    async with anyio.create_task_group() as tasks:
        with monkeypatch.context() as patch:
            bad = backend._drives[0]._fd
            refused = Refused(patch, "preadv", lambda fd, *_: fd == bad)
            await fetch(backend, keys)
            num_asked = len(refused.places)
            tasks.start_soon(backend.attend)
            with anyio.fail_after(60):
                while num_asked == len(refused.places):
                    await anyio.lowlevel.checkpoint()
            assert [str(paths[0])] == backend.away
        with anyio.fail_after(60):
            while backend.away:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    await backend.aclose()


async def test_blocks_are_deleted_from_drives_beside_one_that_refuses(
    tmp_path, monkeypatch
):
    """R-51: what such a drive did not part with had the others not be asked, which kept what was to be forgotten;
    where none parts with anything the tier takes nothing."""
    paths, keys = [tmp_path / "a", tmp_path / "b"], make_keys(32)
    backend = await open_disk(*paths, capacity=2 * ONE_EACH)
    tier = BreakerBackend(backend, clock=lambda: 0.0)
    assert [Verdict.DONE] * 32 == await put(tier, keys)
    bad = {backend._drives[0]._fd}
    with monkeypatch.context() as patch:
        Refused(patch, "pwritev", lambda fd, *_: fd in bad)
        for at in range(0, 28, 4):
            told = await tier.delete(keys[at : at + 4])
            assert 2 == told.count(Verdict.DONE) == told.count(Verdict.UNAVAILABLE)
        assert [str(paths[0])] == tier.refusing
        assert not tier.refuses
        bad.add(backend._drives[1]._fd)
        for _ in range(3):
            assert [Verdict.UNAVAILABLE] * 4 == await tier.delete(keys[28:])
        assert tier.refuses
    await tier.aclose()


async def test_drive_that_takes_single_pages_only_is_named_throughout(
    tmp_path, monkeypatch
):
    """R-51: it was well from each put's begin to its end, and the log told of both each time that it looked."""
    paths, keys = [tmp_path / "a", tmp_path / "b"], make_keys(64)
    backend = await open_disk(*paths, capacity=2 * ONE_EACH)
    assert [Verdict.DONE] * 32 == await put(backend, keys[:32])
    bad, named = backend._drives[0]._fd, []

    def is_refused(fd, place, nbytes):
        named.append(backend.refusing)
        return fd == bad and nbytes > PAGE

    with monkeypatch.context() as patch:
        Refused(patch, "pwritev", is_refused)
        await put(backend, keys[32:36])
        named.clear()
        for at in range(36, 48, 4):
            await put(backend, keys[at : at + 4])
        assert [[str(paths[0])]] * len(named) == named != []
    for at in range(48, 64, 4):
        await put(backend, keys[at : at + 4])
    assert [] == backend.refusing
    await backend.aclose()


async def test_extent_that_such_a_drive_has_not_marked_is_its_own_affair(
    tmp_path, monkeypatch
):
    """R-51: what was there before a start may find again, so that no deletion is told as done; the others are given
    blocks all the same."""
    paths, keys = [tmp_path / "a", tmp_path / "b"], make_keys(20)
    backend = await open_disk(*paths, capacity=2 * ONE_EACH)
    tier = BreakerBackend(backend, clock=lambda: 0.0)
    assert [Verdict.DONE] * 16 == await put(tier, keys[:16])
    bad = backend._drives[0]._fd
    with monkeypatch.context() as patch:
        Refused(patch, "pwritev", lambda fd, *_: fd == bad)
        assert {Verdict.DONE, Verdict.UNAVAILABLE} == {*await put(tier, keys[16:])}
        for at in range(0, 16, 4):
            assert [Verdict.UNAVAILABLE] * 4 == await tier.delete(keys[at : at + 4])
        assert not tier.refuses
    await tier.aclose()
