# SPDX-License-Identifier: Apache-2.0
"""Drives: whose they are, how they are cut, what is direct, and what a failing one does."""

import errno
import mmap
import os

import msgspec
import pytest

from tests.backends.disk_kit import Refused, find, keys_on, open_disk
from ucm.backends._crew import Scratch
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.backends.disk import DiskBackend, _drive
from ucm.backends.disk._drive import BLOCKS, MANIFEST, Manifest
from ucm.errors import ConfigError
from ucm.testing.backend_contract import BLOCK, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
KEYS = make_keys(6)


def listed(path):
    """Return what is below a directory, with its content."""
    return {each.name: each.read_bytes() for each in path.iterdir()}


class TestRefusals:
    async def test_directory_of_somebody_else_is_left_alone(self, tmp_path):
        """R-24: nothing is changed where there is something and no mark of ours."""
        (tmp_path / "thesis.txt").write_text("all of it")
        with pytest.raises(
            ConfigError, match=r"thesis\.txt.*nothing in it was changed"
        ):
            await open_disk(tmp_path)
        assert {"thesis.txt": b"all of it"} == listed(tmp_path)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                b'{"kind": "ucm-disk", "schema": 9, "extent_bytes": 4096}',
                "another release",
            ),
            (b'{"kind": "ucm-files", "schema": 1, "extent_bytes": 12288}', "ucm-files"),
            (b'{"kind": "ucm-disk", "schema": 1}', "not ours"),
            (b"[" * 9999, "not ours"),
            (b"\xff\0", "not ours"),
            (b"", "not ours"),
        ],
    )
    async def test_manifest_that_is_not_ours_is_refused(self, tmp_path, text, said):
        """Another kind's, another release's, cut or hostile: told, and nothing changed."""
        (tmp_path / MANIFEST).write_bytes(text)
        with pytest.raises(ConfigError, match=said):
            await open_disk(tmp_path)
        assert {MANIFEST: text} == listed(tmp_path)

    async def test_directory_serves_one_at_a_time(self, tmp_path):
        """A second user is refused while the first is there, and not behind it."""
        first = await open_disk(tmp_path)
        with pytest.raises(ConfigError, match="somebody else uses it"):
            await open_disk(tmp_path)
        assert [Verdict.DONE] == await first.put([seal(KEYS[0])])
        await first.aclose()
        second = await open_disk(tmp_path)
        assert [True] == await fetch_sound(second, KEYS[:1])
        await second.aclose()

    async def test_lock_that_somebody_removes_lets_nobody_in(self, tmp_path):
        """X-14: a second user was let in, and both wrote to the same slots; who removes the other file, which is
        held as well, makes the directory nobody's."""
        first = await open_disk(tmp_path)
        for name, said in (("lock", "somebody else uses it"), (MANIFEST, "but no")):
            (tmp_path / name).unlink()
            with pytest.raises(ConfigError, match=said):
                await open_disk(tmp_path)
        await first.aclose()

    async def test_directory_that_cannot_be_locked_is_named(self, tmp_path):
        """R-51: one on a drive that is read-only by now, or has no files left: the agent ended as
        by a bug, and its engine, which was not told why, started it again and again."""
        (tmp_path / MANIFEST).write_bytes(
            msgspec.json.encode(Manifest("ucm-disk", 1, 1 << 20))
        )
        (tmp_path / "lock").mkdir()
        with pytest.raises(
            ConfigError, match=r"tiers\.0\.path.*cannot be used: .*lock"
        ):
            await open_disk(tmp_path)

    async def test_directory_that_others_may_write_to_is_refused(self, tmp_path):
        """Nobody else may put blocks there; the remedy is a command."""
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigError, match="chmod go-w"):
            await open_disk(tmp_path)

    async def test_capacity_that_is_not_there_is_refused(self, tmp_path):
        """Both numbers are told, the drive is not filled, and can be used with less."""
        with pytest.raises(ConfigError, match=r"cannot be had, free are \d+"):
            await open_disk(tmp_path, capacity="4000TiB")
        assert not (tmp_path / BLOCKS).exists()
        await (await open_disk(tmp_path, capacity="1GiB")).aclose()

    @pytest.mark.parametrize("before", ["", "8MiB"])
    async def test_drive_that_is_full_meanwhile_gets_back_what_was_taken(
        self, tmp_path, monkeypatch, before
    ):
        """A quota, or somebody else's writing, shows itself amid it: nothing stays that nobody can use,
        and what was there before does."""
        if before:
            await (await open_disk(tmp_path, capacity=before)).aclose()

        def half(fd, start, nbytes):
            os.truncate(fd, nbytes // 2)
            raise OSError(errno.EDQUOT, "no more")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", half)
            with pytest.raises(ConfigError, match="cannot be had"):
                await open_disk(tmp_path, capacity="64MiB")
        sizes = [path.stat().st_size for path in tmp_path.glob(BLOCKS)]
        assert ([8 << 20] if before else []) == sizes

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"path": []}, "path"),
            ({"path": ""}, "path"),
            ({"path": 3}, "path"),
            ({"path": ["/a", "/a"]}, "path"),
            ({"capacity": 4096}, "capacity"),
            ({"durability": "node"}, "durability"),
            ({"threads": 0}, "threads"),
            ({"depth": 3}, "depth"),
        ],
    )
    async def test_wrong_setting_is_named(self, tmp_path, settings, key):
        """Refused at start, by its dotted key."""
        with pytest.raises(ConfigError) as caught:
            await open_disk(tmp_path, **settings)
        assert f"tiers.0.{key}" == caught.value.key

    async def test_path_is_needed(self):
        """There is no directory of its own."""
        with pytest.raises(ConfigError, match="missing"):
            await DiskBackend.open_configured({}, "tiers.0")


class TestSeveral:
    async def test_drives_share_the_blocks(self, tmp_path):
        """Each of two has some, all are found again, and their room is told as one."""
        paths, keys = [tmp_path / "a", tmp_path / "b"], make_keys(30)
        backend = await open_disk(*paths, capacity=32 * 3 * 4096)
        await backend.put([seal(key) for key in keys])
        assert 32 * 3 * 4096 == (await backend.stats()).capacity_bytes
        await backend.aclose()
        for path in paths:
            assert 15 == sum(find(path, key) is not None for key in keys)
        backend = await open_disk(*paths, capacity=32 * 3 * 4096)
        assert [True] * 30 == await fetch_sound(backend, keys)
        await backend.aclose()

    async def test_drives_that_were_cut_apart_are_refused(self, tmp_path):
        """Files with extents of two sizes are no tier together."""
        await (await open_disk(tmp_path / "a", capacity="1MiB")).aclose()
        await (await open_disk(tmp_path / "b", capacity="2MiB")).aclose()
        with pytest.raises(ConfigError, match="extents of"):
            await open_disk(tmp_path / "a", tmp_path / "b")

    async def test_capacity_can_change(self, tmp_path):
        """More is more room, less keeps the blocks that lie within it."""
        size = 16 * 3 * 4096
        backend = await open_disk(tmp_path, capacity=size)
        await backend.put([seal(key) for key in make_keys(16)])
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=2 * size)
        await backend.put([seal(key) for key in make_keys(16, first=16)])
        assert [True] * 32 == await fetch_sound(backend, make_keys(32))
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=size)
        assert [True] * 16 + [False] * 16 == await fetch_sound(backend, make_keys(32))
        assert size == (tmp_path / BLOCKS).stat().st_size
        await backend.aclose()


def page_aligned(data, offset):
    """Return *data* in memory that begins so many bytes behind a page."""
    memory = memoryview(mmap.mmap(-1, offset + len(data)))[offset:]
    memory[:] = data
    return memory


class TestDirect:
    @pytest.mark.parametrize("offset", [0, 1, 512])
    @pytest.mark.parametrize("nbytes", [BLOCK, 2 * BLOCK, 2 * BLOCK + 100])
    @pytest.mark.parametrize("is_direct", [True, False])
    async def test_memory_may_lie_anywhere(
        self, tmp_path, monkeypatch, offset, nbytes, is_direct
    ):
        """At a page or beside one, direct or not: the bytes are the same."""
        if not is_direct:
            monkeypatch.setattr(_drive.Drive, "_open_direct", lambda *args: -1)
        backend = await open_disk(tmp_path)
        if is_direct and not backend._drives[0].is_direct:
            pytest.skip("no direct I/O in this file system")
        block = seal(KEYS[0], nbytes)
        data = page_aligned(block.data, offset)
        await backend.put([Sealed(block.key, data, block.checksum)])
        target = page_aligned(bytes(nbytes), offset)
        (got,) = await backend.get(KEYS[:1], [target])
        assert (Verdict.DONE, block.checksum) == (got.verdict, got.checksum)
        assert block.data == target
        await backend.aclose()

    async def test_whole_pages_move_without_a_copy(self, tmp_path, monkeypatch):
        """What lies at a page is handed to the kernel where it is."""
        backend, seen = await open_disk(tmp_path), []
        real = os.pwritev
        monkeypatch.setattr(
            _drive.os, "pwritev", lambda *args: seen.append(args[1]) or real(*args)
        )
        data = page_aligned(seal(KEYS[0], 2 * BLOCK + 5).data, 0)
        await backend.put([Sealed(KEYS[0], data, 1)])
        assert [2 * BLOCK, 2 * BLOCK] == [len(part) for part in seen[-1]]
        assert seen[-1][0].obj is data.obj
        await backend.aclose()

    async def test_saving_reads_nothing(self, tmp_path, monkeypatch):
        """R-61: no put, look-up or eviction reads from the drive."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)

        def read(*args):
            raise AssertionError("a drive was read")

        monkeypatch.setattr(_drive.os, "preadv", read)
        for key in make_keys(40):
            assert [Verdict.DONE] == await backend.put([seal(key)])
            await backend.exists([key])
        assert 24 == (await backend.stats()).evicted_blocks_total
        monkeypatch.undo()
        await backend.aclose()


class TestFailing:
    @pytest.mark.parametrize(
        ("how", "least"),
        [("at once", 0), ("at once", 2 * BLOCK), ("short", 2 * BLOCK)],
        ids=["all", "blocks", "short"],
    )
    async def test_block_that_cannot_be_written_is_not_there(
        self, tmp_path, monkeypatch, how, least
    ):
        """Unavailable, found by nobody, also not by a later scan; others are served."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        await backend.put([seal(KEYS[0])])
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", lambda fd, place, nbytes: nbytes >= least, how)
            assert [Verdict.UNAVAILABLE] * 2 == await backend.put(
                [seal(key) for key in KEYS[1:3]]
            )
        assert [Presence.ABSENT] * 2 == await backend.exists(KEYS[1:3])
        assert [Verdict.DONE] * 2 == await backend.put([seal(key) for key in KEYS[3:5]])
        assert [True, False, False, True, True] == await fetch_sound(backend, KEYS[:5])
        await backend.aclose()
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        assert [True, False, False, True, True] == await fetch_sound(backend, KEYS[:5])
        await backend.aclose()

    async def test_block_that_cannot_be_read_is_no_miss(self, tmp_path, monkeypatch):
        """R-51: unavailable, and there again when the drive is."""
        backend = await open_disk(tmp_path)
        await backend.put([seal(KEYS[0])])
        with monkeypatch.context() as patch:
            Refused(patch, "preadv")
            (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(BLOCK))])
        assert Verdict.UNAVAILABLE is got.verdict
        assert [True] == await fetch_sound(backend, KEYS[:1])
        await backend.aclose()

    async def test_want_of_memory_is_no_word_on_a_block(self, tmp_path, monkeypatch):
        """R-51: where the system had none for a request its block was garbage, which goes; where a thread had
        none, the call raised, which ended the agent as by a bug."""

        def refuse(*args):
            raise OSError(errno.ENOMEM, "no memory")

        backend = await open_disk(tmp_path)
        await backend.put([seal(KEYS[0])])
        for name in ("get", "preadv"):
            with monkeypatch.context() as patch:
                if name == "get":
                    patch.setattr(Scratch, name, refuse)
                    assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[1])])
                where = lambda fd, place, nbytes: nbytes > 4096
                Refused(patch, "preadv", where, error=errno.ENOMEM)
                (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(BLOCK))])
            assert Verdict.UNAVAILABLE is got.verdict
        assert [True] == await fetch_sound(backend, KEYS[:1])
        assert [Verdict.DONE] == await backend.put([seal(KEYS[1])])
        await backend.aclose()

    async def test_block_whose_stamp_stays_is_told(self, tmp_path, monkeypatch):
        """A deletion that the drive refuses is no deletion; its slot is used once it is wiped."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        await backend.put([seal(key) for key in make_keys(16)])
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            assert [Verdict.UNAVAILABLE] == await backend.delete(KEYS[:1])
        assert 15 == (await backend.stats()).blocks
        await backend.put([seal(key) for key in make_keys(1, first=20)])
        assert 16 == (await backend.stats()).blocks
        assert KEYS[0] not in keys_on(tmp_path)
        await backend.aclose()

    async def test_block_whose_stamp_stayed_is_no_absent_one(
        self, tmp_path, monkeypatch
    ):
        """Who asked anew for a deletion that a drive had refused was told that the block was not there, and a start
        had it again; so it was of one that had to make room when a write failed."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        keys, late = make_keys(16), make_keys(1, first=20)
        await backend.put([seal(key) for key in keys])
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev")
            Refused(patch, "preadv")
            await backend.put([seal(late[0])])  # in the place of the first
            assert 15 == (await backend.stats()).blocks
            for _ in range(2):
                verdicts = [Verdict.UNAVAILABLE] * 2 + [Verdict.ABSENT]
                gone = [*keys[:2], make_keys(1, first=30)[0]]
                assert verdicts == await backend.delete(gone)
        assert set(keys) == keys_on(tmp_path)
        assert [Verdict.ABSENT] * 2 == await backend.delete(keys[:2])
        assert set(keys[2:]) == keys_on(tmp_path)
        await backend.put([seal(key) for key in [*late, keys[0]]])
        assert 16 == (await backend.stats()).blocks
        await backend.aclose()

    async def test_block_that_was_written_over_stays_nowhere(
        self, tmp_path, monkeypatch
    ):
        """It was told to be kept, though it was gone, where what had taken its place could not be deleted."""
        backend = await open_disk(tmp_path, capacity=16 * 3 * 4096)
        keys, late = make_keys(16), make_keys(1, first=20)
        for some in (keys, late, keys[:1]):  # each in the place of the oldest
            await backend.put([seal(key) for key in some])
        start, _, stamp = find(tmp_path, late[0])
        with monkeypatch.context() as patch:
            Refused(patch, "pwritev", lambda fd, place, _: start <= place <= stamp)
            assert [Verdict.UNAVAILABLE] == await backend.delete(late)
            assert [Verdict.DONE] == await backend.delete(keys[:1])
        assert {*late, *keys[2:]} == keys_on(tmp_path)
        await backend.aclose()

    @pytest.mark.parametrize("durability", ["process", "power"])
    async def test_durability_is_what_was_asked_for(
        self, tmp_path, monkeypatch, durability
    ):
        """For power a put ends behind a flush, and one that fails is not done."""
        flushed, is_failing, real = [], [], os.fdatasync

        def fdatasync(fd):
            flushed.append(fd)
            if is_failing:
                raise OSError(errno.EIO, "I/O error")
            real(fd)

        monkeypatch.setattr(_drive.os, "fdatasync", fdatasync)
        backend = await open_disk(tmp_path, durability=durability)
        assert durability == backend.capabilities.durable
        assert [Verdict.DONE] * 2 == await backend.put([seal(key) for key in KEYS[:2]])
        assert (durability == "power") == len(flushed)
        is_failing.append(True)
        verdicts = await backend.put([seal(KEYS[2])])
        wanted = Verdict.UNAVAILABLE if durability == "power" else Verdict.DONE
        assert [wanted] == verdicts
        await backend.aclose()
