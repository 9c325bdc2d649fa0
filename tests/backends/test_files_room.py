# SPDX-License-Identifier: Apache-2.0
"""Room on a shared mount, where more is put than it takes."""

import errno
import math
import os

import attrs
import pytest

from tests.backends.test_files import BLOCK, collected, open_files, put
from ucm.backends.abc import Verdict
from ucm.testing.backend_contract import seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(6)


@pytest.mark.asyncio
class TestRoom:
    async def test_room_is_made_behind_a_count_that_made_none(self, tmp_path):
        """A share that is counted as a block comes is not full for that: the oldest go."""
        most = 4 * (BLOCK + 128)
        backend = await open_files(tmp_path / "share", capacity=most)
        await collected(backend)
        assert [Verdict.DONE] * 4 == await put(backend, *KEYS[:4])
        backend._start_collection(0)  # as it is every ten minutes
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        stats = await backend.stats()
        assert (3, 2) == (stats.blocks, stats.evicted_blocks_total)  # and a sixteenth
        await backend.aclose()

    async def test_block_that_cannot_be_removed_takes_its_room(
        self, tmp_path, monkeypatch
    ):
        """A mount that refuses to remove gives no room: what comes is told that it is full."""
        backend = await open_files(tmp_path / "share", capacity=4 * (BLOCK + 128))
        await collected(backend)
        assert [Verdict.DONE] * 4 == await put(backend, *KEYS[:4])
        unlink = os.unlink

        def refuse(path, **how):
            if "/blocks/" in os.fspath(path):
                raise PermissionError(1, "refused", path)
            unlink(path, **how)

        monkeypatch.setattr(os, "unlink", refuse)
        assert [Verdict.FULL] == await put(backend, KEYS[4])
        stats = await backend.stats()
        assert (4, 0) == (stats.blocks, stats.evicted_blocks_total)
        await backend.aclose()

    async def test_share_that_refuses_to_remove_is_not_walked_through_at_each_put(
        self, tmp_path, monkeypatch
    ):
        """A full share whose mount removes nothing costs a walk now and then, and is used again
        once it does."""
        backend = await open_files(tmp_path / "share", capacity=4 * (BLOCK + 128))
        await collected(backend)
        await put(backend, *KEYS[:4])
        walks, collect = [], backend._share.collect

        def counted(*bytes_):
            walks.append(bytes_)
            return collect(*bytes_)

        def refuse(path, **how):
            if "/blocks/" in os.fspath(path):
                raise PermissionError(1, "refused", path)
            unlink(path, **how)

        unlink = os.unlink
        monkeypatch.setattr(backend._share, "collect", counted)
        with monkeypatch.context() as mount:
            mount.setattr(os, "unlink", refuse)
            for _ in range(5):
                assert [Verdict.FULL] == await put(backend, KEYS[4])
        assert 1 == len(walks)
        backend._full_until = -math.inf  # as it is ten minutes later
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        assert 2 == len(walks)
        await backend.aclose()

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    async def test_share_that_takes_no_file_at_all_is_counted_and_gets_room(
        self, tmp_path, monkeypatch, error
    ):
        """X-03: only what dead writers have left waits until files can be made again."""
        one = await open_files(tmp_path / "share", capacity=4 * (BLOCK + 128))
        assert [Verdict.DONE] * 4 == await put(one, *KEYS[:4])
        await one.aclose()
        orphan = tmp_path / "share" / "writing" / f"{'0' * 32}.1.1.7"
        orphan.touch()
        os.utime(orphan, (1.0, 1.0))
        real = os.open

        def refuse(path, flags, *more, **how):
            if flags & os.O_CREAT:
                raise OSError(error, os.strerror(error), path)
            return real(path, flags, *more, **how)

        monkeypatch.setattr(os, "open", refuse)
        other = await open_files(tmp_path / "share", capacity=2 * (BLOCK + 128))
        stats = await collected(other)
        assert (1, 3, 0) == (
            *(stats.blocks, stats.evicted_blocks_total),
            stats.swept_total,
        )
        assert orphan.exists()
        await other.aclose()

    async def test_block_that_is_too_large_is_so_alone(self, tmp_path):
        """Whoever is put beside it has an answer of its own."""
        backend = await open_files(tmp_path / "share", capacity=1 << 40)
        await collected(backend)
        small = seal(KEYS[0])
        large = attrs.evolve(small, key=KEYS[1], data=_Long(b""))
        assert [Verdict.FULL, Verdict.DONE] == await backend.put([large, small])
        await backend.aclose()


class _Long(bytes):
    """More bytes than any block has, which take no memory."""

    def __len__(self) -> int:
        return (1 << 30) + 1
