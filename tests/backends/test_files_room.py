# SPDX-License-Identifier: Apache-2.0
"""Room on a shared mount, where more is put than it takes."""

import errno
import math
import os

import anyio
import pytest

from tests.backends.test_files import BLOCK, collected, find, open_files, put
from tests.backends.test_files_ledger import WHOLE, files_of, open_ledger
from tests.native_kit import by_python  # noqa: F401  a fixture
from ucm.backends.abc import Sealed, Verdict
from ucm.backends.files import _share, _writing
from ucm.backends.files._ledger import Ledger, Tally
from ucm.testing.backend_contract import seal
from ucm.testing.faults import Gate
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(6)
MANY = make_keys(24)


@pytest.mark.asyncio
class TestRoom:
    async def test_room_is_made_behind_a_count_that_made_none(self, tmp_path):
        """A share that is counted as a block comes is not full for that: the oldest go."""
        most = 4 * (BLOCK + 128)
        backend = await open_files(tmp_path / "share", capacity=most)
        await collected(backend)
        assert [Verdict.DONE] * 4 == await put(backend, *KEYS[:4])
        backend._room.start()  # as it is every ten minutes
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        stats = await backend.stats()
        assert (3, 2) == (stats.blocks, stats.evicted_blocks_total)  # and a sixteenth
        await backend.aclose()

    async def test_collection_that_is_over_hides_nobody(self, tmp_path):
        """R-63: what another machine has begun since a collection looked counts, though that
        collection is taken note of later."""
        root = tmp_path / "share"
        backend, other = await open_files(root, capacity=8 * WHOLE), open_ledger(root)
        assert [Verdict.DONE] * 7 == await put(backend, *MANY[:7])
        await backend._room.start().wait()
        other.mine = Tally(moving=WHOLE)
        other.look()
        assert Verdict.DONE is await backend._room.take(WHOLE)
        assert files_of(root) <= 6
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
        backend._room._full_until = -math.inf  # as it is ten minutes later
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

    @pytest.mark.usefixtures("by_python")
    async def test_share_that_cannot_be_read_has_no_answer(self, tmp_path, monkeypatch):
        """R-51: while its server is away nobody says that it is full."""
        backend = await open_files(tmp_path / "share")
        await backend._room._collection.wait()
        backend._room._collection, real = None, os.open

        def refuse(path, flags, *more, **how):
            if flags & os.O_CREAT:
                raise OSError(errno.ESTALE, "stale", path)
            return real(path, flags, *more, **how)

        with monkeypatch.context() as mount:
            mount.setattr(os, "open", refuse)
            assert [Verdict.UNAVAILABLE] == await put(backend, KEYS[0])
        assert [Verdict.DONE] == await put(backend, KEYS[0])
        await backend.aclose()

    async def test_room_is_counted_again_now_and_then(self, tmp_path):
        """What others have put is known, and what they have removed then; nobody waits for that."""
        one, other = [await open_files(tmp_path / "share") for _ in range(2)]
        await collected(one)
        await collected(other)
        await put(other, *KEYS[:3])
        await one._room.tell()
        assert 3 == (await one.stats()).blocks
        for key in KEYS[:2]:
            find(tmp_path / "share", key).unlink()
        one._room._counted_at = -math.inf  # as it is ten minutes later
        assert [Verdict.DONE] == await put(one, KEYS[3])
        await one._room.start().wait()
        assert (await one.stats()).blocks in (2, 3)  # its own perhaps twice
        await one.aclose()
        await other.aclose()

    async def test_block_that_is_too_large_is_so_alone(self, tmp_path):
        """Whoever is put beside it has an answer of its own."""
        backend = await open_files(tmp_path / "share", capacity=1 << 40)
        await collected(backend)
        small = seal(KEYS[0])
        large = Sealed(KEYS[1], _Long(b""), small.checksum)
        assert [Verdict.FULL, Verdict.DONE] == await backend.put([large, small])
        await backend.aclose()


@pytest.fixture
def long_walk(monkeypatch):
    """Return a gate at which each walk stands."""
    gate, real = Gate(), _share.Share.collect
    monkeypatch.setattr(_share.Share, "collect", lambda *args: gate() or real(*args))
    return gate


async def told_meanwhile(backend, gate, *keys):
    """Return what is told of blocks that are put while a walk stands at its gate."""
    with anyio.fail_after(60.0):
        told = await put(backend, *keys)
    walk = backend._room.start()  # the one that stands there
    gate.open()
    await walk.wait()
    return told


@pytest.mark.asyncio
class TestLongWalk:
    async def test_put_is_full_at_once_while_an_unknown_share_is_counted(
        self, tmp_path, long_walk
    ):
        """R-63: behind each start of an agent nobody waits for a walk through all blocks, and
        the tier is not silent for that."""
        backend = await open_files(tmp_path / "share")
        backend._room._patience_s = 0.0
        told = await told_meanwhile(backend, long_walk, KEYS[0])
        assert [Verdict.FULL] == told
        assert [Verdict.DONE] == await put(backend, KEYS[0])
        await backend.aclose()

    async def test_put_is_full_at_once_while_room_is_made(self, tmp_path, monkeypatch):
        """R-63: what is there is read meanwhile, and there is room behind the walk."""
        backend = await open_files(tmp_path / "share", capacity=4 * (BLOCK + 128))
        await collected(backend)
        await put(backend, *KEYS[:4])
        backend._room._patience_s = 0.0
        gate, collect = Gate(), backend._share.collect
        monkeypatch.setattr(
            backend._share, "collect", lambda *args: gate() or collect(*args)
        )
        assert [Verdict.FULL] == await told_meanwhile(backend, gate, KEYS[4])
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        await backend.aclose()

    async def test_room_is_made_before_it_is_used_up(self, tmp_path):
        """R-63: where walks are long, the next one is over before anything is refused."""
        backend = await open_files(tmp_path / "share", capacity=16 * (BLOCK + 128))
        await collected(backend)
        room = backend._room
        room._patience_s, told = 0.0, []
        room.start()
        for key in MANY:
            if room._collection is not None:
                await room._collection.wait()
            told += await put(backend, key)
        assert [Verdict.DONE] * 24 == told
        assert 8 <= (await backend.stats()).evicted_blocks_total <= 12
        await backend.aclose()


class _SmallMount:
    """Has room for some blocks, and none for what is written to find out whether it has."""

    def __init__(self, monkeypatch, root, num_blocks):
        self.root, self.num_blocks, self.num_refused = root, num_blocks, 0
        self.error, self._write = errno.ENOSPC, _writing.write_whole
        for module in (_share, _writing):
            monkeypatch.setattr(module, "write_whole", self.write)

    def write(self, fd, header, data):
        """Write, as long as there is room for a block, or for a sixteenth of all."""
        num_there = sum(1 for _ in self.root.glob("blocks/*/*/*"))
        most = self.num_blocks - (0 if header else self.num_blocks // 16)
        if num_there >= most:
            self.num_refused += bool(header)
            raise OSError(self.error, os.strerror(self.error))
        self._write(fd, header, data)


@pytest.mark.usefixtures("by_python")
@pytest.mark.asyncio
class TestSmallMount:
    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
    async def test_mount_with_less_room_than_was_set_goes_on_taking_blocks(
        self, tmp_path, monkeypatch, error
    ):
        """R-51: it is full until room is made below what it takes, and is not asked for
        more than that any more."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 16)
        mount.error = error
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        told = [(await put(backend, key))[0] for key in MANY]
        assert ([Verdict.FULL], 1) == ([told[16]], mount.num_refused)
        assert [Verdict.DONE] * 23 == told[:16] + told[17:]
        stats = await backend.stats()
        assert 8 < stats.blocks <= 15
        assert 15 * (BLOCK + 128) == stats.capacity_bytes
        assert 23 == stats.blocks + stats.evicted_blocks_total
        await backend.aclose()

    async def test_full_mount_is_not_tried_while_room_is_made(
        self, tmp_path, monkeypatch
    ):
        """R-51: what comes is refused without a word of the mount's, however long that takes."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 4)
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        gate, collect = Gate(), backend._share.collect
        monkeypatch.setattr(
            backend._share, "collect", lambda *args: gate() or collect(*args)
        )
        backend._room._patience_s = 0.0
        for key in KEYS[:5]:
            await put(backend, key)
        backend._room.refused(BLOCK)  # as of a put that was begun before
        assert [Verdict.FULL] == await told_meanwhile(backend, gate, KEYS[5])
        assert 1 == mount.num_refused
        backend._room._patience_s = 120.0
        assert [Verdict.FULL] == await put(backend, KEYS[5], nbytes=4 * BLOCK)
        assert 3 == (await backend.stats()).blocks  # not all of it for what never fits
        assert [Verdict.DONE] == await put(backend, KEYS[5])
        await backend.aclose()

    async def test_room_that_somebody_else_has_made_is_enough(
        self, tmp_path, monkeypatch
    ):
        """Of many machines that meet a mount that is full, one removes blocks."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 4)
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        await put(backend, *KEYS[:4])
        nbytes, collect = BLOCK + 128, backend._share.collect
        mount.num_blocks = 16
        assert (4, 4 * nbytes, 0, 0, None) == collect(1 << 24, 1 << 24, BLOCK)
        mount.num_blocks = 4
        assert (3, 3 * nbytes, 1, 0, 15 * nbytes // 4) == collect(
            1 << 24, 1 << 24, BLOCK
        )
        await backend.aclose()

    async def test_mount_that_is_filled_by_others_is_not_raced(
        self, tmp_path, monkeypatch
    ):
        """R-51: what one removes somebody else may take: there is a pause before the next
        walk, and none once the mount has room for longer."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 4)
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        await put(backend, *KEYS[:4])
        mount.num_blocks = 0
        for _ in range(6):
            assert [Verdict.FULL] == await put(backend, KEYS[4])
        assert 2 == mount.num_refused
        mount.num_blocks = 16
        backend._room._short_from = -math.inf  # as it is half a minute later
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        backend._room._less_until = -math.inf  # and an hour
        await collected(backend)
        assert 1 << 24 == (await backend.stats()).capacity_bytes
        await backend.aclose()

    async def test_mount_that_had_no_room_at_all_is_tried_again(
        self, tmp_path, monkeypatch
    ):
        """R-51: an empty share is full while others fill its mount, which costs that no calls, and
        takes blocks once they do not."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 0)
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        for _ in range(2):
            assert [Verdict.FULL] == await put(backend, KEYS[0])
        mount.num_blocks, looks, look = 16, [], backend._room._ledger.look
        with monkeypatch.context() as watched:
            watched.setattr(Ledger, "look", lambda ledger: looks.append(0) or look())
            assert [Verdict.FULL] * 6 == await put(backend, *KEYS)
        assert [] == looks
        backend._room._less_until = -math.inf  # as it is ten minutes later
        assert [Verdict.DONE] == await put(backend, KEYS[0])
        assert 1 << 24 == (await backend.stats()).capacity_bytes
        await backend.aclose()

    async def test_block_that_no_file_can_hold_costs_no_others(
        self, tmp_path, monkeypatch
    ):
        """A file that is too large for a mount is no lack of room."""
        mount = _SmallMount(monkeypatch, tmp_path / "share", 2)
        mount.error = errno.EFBIG
        backend = await open_files(tmp_path / "share")
        await collected(backend)
        await put(backend, *KEYS[:2])
        assert [Verdict.FULL] == await put(backend, KEYS[2])
        assert [Verdict.FULL] == await put(backend, KEYS[2])
        stats = await backend.stats()
        assert (2, 0) == (stats.blocks, stats.evicted_blocks_total)
        assert 1 << 24 == stats.capacity_bytes
        await backend.aclose()

    async def test_mount_without_files_left_has_no_room(self, tmp_path, monkeypatch):
        """However many bytes it takes: each block is a file."""
        backend = await open_files(tmp_path / "share")
        await put(backend, *KEYS[:4])
        about = list(os.statvfs(tmp_path))
        about[5:8] = 1000, 3, 3
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(about))
        assert 1 == backend._share.collect(1 << 24, 1 << 24, BLOCK).num_evicted
        await backend.aclose()


class _Long(bytes):
    """More bytes than any block has, which take no memory."""

    def __len__(self) -> int:
        return (1 << 30) + 1
