# SPDX-License-Identifier: Apache-2.0
"""A share that somebody empties, or whose directory goes, under a backend that lives."""

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.backends.test_files import open_files
from ucm.backends.abc import Presence, Verdict
from ucm.backends.files import FilesBackend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(4)
pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[tuple[FilesBackend, Path]]:
    """Open a backend with a block; yield it and its directory."""
    root = tmp_path / "share"
    backend = await open_files(root)
    assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
    try:
        yield backend, root
    finally:
        await backend.aclose()


async def ask_twice(backend: FilesBackend) -> list[Presence]:
    """Find out that it is gone, have it looked for, and ask again."""
    assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
    await backend.exists(KEYS[:1])
    await backend._again.wait()
    return await backend.exists(KEYS[:1])


@pytest.mark.parametrize("left", [(), ("blocks", "room", "writing")])
async def test_share_that_was_emptied_is_ours_again(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    """R-51: whoever clears the directory need not start the agent anew: what was there is
    absent, and what comes is kept; also where some of our own folders are left."""
    async with opened(tmp_path) as (backend, root):
        shutil.rmtree(root / "blocks")
        for each in root.iterdir():
            if each.name not in left:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        assert [Presence.ABSENT] == await ask_twice(backend)
        assert [Verdict.DONE] == await backend.put([seal(KEYS[1])])
        assert [True] == await fetch_sound(backend, KEYS[1:2])
        assert "" == backend.trouble


async def test_directory_that_is_gone_is_not_made(tmp_path: Path) -> None:
    """R-24: it may have been moved, or its mount is away; it is named, and used when it is back."""
    async with opened(tmp_path) as (backend, root):
        root.rename(root.with_name("moved"))
        assert [Presence.UNKNOWN] == await ask_twice(backend)
        assert not root.exists()
        assert f"No such file or directory: '{root}'" in backend.trouble
        root.with_name("moved").rename(root)
        assert [Presence.PRESENT] == await backend.exists(KEYS[:1])


async def test_mount_point_without_its_mount_is_left_alone(tmp_path: Path) -> None:
    """R-24: an empty directory in the place of the one that was ours may be what a mount had hidden."""
    async with opened(tmp_path) as (backend, root):
        root.rename(root.with_name("mounted"))
        root.mkdir(mode=0o700)
        assert [Presence.UNKNOWN] == await ask_twice(backend)
        assert [] == list(root.iterdir())
        assert "the directory is another one, and empty" in backend.trouble


async def test_trouble_is_told_while_a_directory_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-24: for that moment, again and again, nothing was told to be wrong."""
    async with opened(tmp_path) as (backend, root):
        root.rename(root.with_name("moved"))
        await ask_twice(backend)
        await backend._again.wait()
        gate = Gate()
        monkeypatch.setattr(backend._share, "claim", lambda _: gate())
        await backend.exists(KEYS[:1])
        assert not backend._again.is_over
        assert f"No such file or directory: '{root}'" in backend.trouble
        gate.open()


async def test_put_into_an_emptied_directory_leaves_nothing(tmp_path: Path) -> None:
    """R-24: an agent that started behind it took the folder of counts for somebody else's, and
    refused the tier."""
    async with opened(tmp_path) as (backend, root):
        for each in root.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[1])])
        assert [] == list(root.iterdir())
        async with opened(tmp_path) as (other, _):
            assert [True] == await fetch_sound(other, KEYS[:1])
