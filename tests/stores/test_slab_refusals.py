# SPDX-License-Identifier: Apache-2.0
"""What a slab refuses: sizes, paths, other slabs, damaged files, locks held."""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import stat
import tempfile
from pathlib import Path

import attrs
import pytest

from tests.stores.slab_kit import SLOT_BYTES, index_path, open_slab
from ucm.errors import ConfigError, StoreError, StoreUnavailableError
from ucm.stores.slab import SlabStore
from ucm.testing.store_blocks import make_keyspace


def erase(path):
    """Make a file zeros of the same size."""
    path.write_bytes(bytes(path.stat().st_size))


class TestRefusals:
    @pytest.mark.parametrize(
        ("num_blocks", "size", "key", "told"),
        [
            (0, 1, "store.capacity", "0 slots.*at least 4096"),
            (1, 0, "store.block_bytes", "at least one byte"),
            (1 << 40, 1, "store.capacity", "not 1 to.*at most"),
            (1 << 30, 1, "store.capacity", "bytes needed"),
        ],
    )
    def test_impossible_size_is_refused(self, tmp_path, num_blocks, size, key, told):
        """No slot, no block or no room is told with its sum (X-12)."""
        with pytest.raises(ConfigError, match=told) as caught:
            SlabStore(
                path=str(tmp_path / "s"),
                capacity_bytes=num_blocks * SLOT_BYTES,
                block_bytes=size,
            )
        assert key == caught.value.key
        assert caught.value.value == (num_blocks * SLOT_BYTES if size else size)
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize(
        ("code", "key"),
        [(errno.ENOSPC, "store.capacity"), (errno.EROFS, "store.path")],
    )
    def test_failed_creation_leaves_nothing(self, tmp_path, monkeypatch, code, key):
        """Room that vanishes while a slab is made is told, and all is removed."""

        def refuse(fd, offset, length):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(ConfigError) as caught:
            open_slab(tmp_path / "s")
        assert key == caught.value.key
        told = 8 * SLOT_BYTES if key == "store.capacity" else str(tmp_path / "s")
        assert told == caught.value.value
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"data_bytes": 1 << 20}, "store.path"),
            ({"schema": 5}, "store.path"),
            ({"schema": 7}, "store.path"),
            ({"color": "red"}, "store.path"),
        ],
    )
    def test_other_slab_is_refused(self, tmp_path, change, key):
        """A slab that is not what was asked for is left alone and told."""
        open_slab(tmp_path / "s").close()
        manifest = tmp_path / "s/slab.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
        with pytest.raises(ConfigError) as caught:
            open_slab(tmp_path / "s")
        assert key == caught.value.key
        assert caught.value.remedy
        assert (tmp_path / "s/data").exists()

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            (lambda s: (s / "data").unlink(), "data cannot be opened"),
            (lambda s: os.truncate(s / "data", 4096), "data has another size"),
            (
                lambda s: os.truncate(index_path(s), 4096),
                "index-4096.0 has another size",
            ),
            (lambda s: erase(index_path(s)), "is no index"),
            (lambda s: (s / "data").chmod(0o666), "data has mode 0666"),
            (
                lambda s: (s / "data").rename(s / "d") and (s / "data").symlink_to("d"),
                "symbolic link",
            ),
            (lambda s: s.chmod(0o770), "it has mode 0770"),
            (
                lambda s: os.chown(s, 12345, -1),
                r"belongs to user 12345\. Use another path, or run as that user\.",
            ),
        ],
        ids=[
            "no data",
            "short data",
            "short index",
            "no index",
            "open data",
            "linked data",
            "open directory",
            "foreign directory",
        ],
    )
    def test_unsafe_or_damaged_files_are_refused(self, tmp_path, damage, told):
        """Files that are damaged, linked or writable by others are not used."""
        open_slab(tmp_path / "s").close()
        try:
            damage(tmp_path / "s")
        except PermissionError:
            pytest.skip("needs a privileged user")
        with pytest.raises(ConfigError, match=told) as caught:
            open_slab(tmp_path / "s")
        assert caught.value.key == "store.path"

    def test_nobody_else_may_look_into_a_slab(self, tmp_path):
        """Files and directories are for this user only, whatever the umask."""
        before = os.umask(0)
        try:
            with open_slab(tmp_path / "s") as store:
                store.describe(make_keyspace())
                modes = {
                    path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
                    for path in (tmp_path / "s", *(tmp_path / "s").rglob("*"))
                }
                wanted = {
                    path: 0o700 if (tmp_path / path).is_dir() else 0o600
                    for path in modes
                }
        finally:
            os.umask(before)
        assert len(modes) == 8
        assert wanted == modes

    def test_slots_that_cannot_be_mapped_are_told(self, tmp_path, monkeypatch):
        """Too little address space is an error of the path, and nothing stays held."""

        def refuse(fd, length):
            raise OSError(errno.ENOMEM, "no memory")

        open_slab(tmp_path / "s").close()
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", refuse)
            with pytest.raises(ConfigError, match="cannot be mapped"):
                open_slab(tmp_path / "s")
        with open_slab(tmp_path / "s") as store:
            assert store.audit() == []

    @pytest.mark.parametrize(
        ("path", "told"),
        [
            ("missing/s", "does not exist. Make .*/missing first"),
            ("file", "not a directory"),
            ("link", "not a directory"),
            ("/sys/kernel/s", "a slab is memory"),
        ],
    )
    def test_unusable_path_is_refused(self, tmp_path, path, told):
        """A path where no slab can be is named with what to do."""
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(ConfigError, match=told) as caught:
            open_slab(tmp_path / path)
        assert caught.value.key == "store.path"

    def test_place_of_somebody_else_is_told_with_who_must_write_there(self):
        """Nobody is told to remove what is not his; this looks as one who is not root."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            os.chmod(name, 0o555)
            owner = os.geteuid()
            user = owner or 65534
            os.seteuid(user)
            try:
                with pytest.raises(ConfigError, match="made or opened") as caught:
                    open_slab(Path(name) / "s")
            finally:
                os.seteuid(owner)
        remedy = f"Use another path, or let user {user} write there."
        assert remedy == caught.value.remedy

    @pytest.mark.parametrize(
        "name", [".", "arena", "index-4096.0"], ids=["directory", "arena", "index"]
    )
    def test_lock_held_by_another_is_not_waited_for_for_ever(self, tmp_path, name):
        """A stopped process that holds a lock costs its deadline and no more."""
        with open_slab(tmp_path / "s"), contextlib.ExitStack() as stack:
            file = os.open(tmp_path / "s" / name, os.O_RDONLY)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(StoreUnavailableError, match="held by a process"):
                open_slab(tmp_path / "s", open_timeout=0.01, lock_timeout=0.01)
            fcntl.flock(file, fcntl.LOCK_UN)
            with open_slab(tmp_path / "s") as store:
                assert store.audit() == []

    @pytest.mark.parametrize(
        "text",
        [
            b"{",
            b'{"model": "\xff"}',
            b'{"a": ' + b"[" * 9000,
            json.dumps(attrs.asdict(make_keyspace()) | {"model": ""}).encode(),
            json.dumps(attrs.asdict(make_keyspace("other"))).encode(),
        ],
        ids=["torn", "no text", "nested", "invalid", "misnamed"],
    )
    def test_damaged_key_space_is_told(self, tmp_path, text):
        """A key space that cannot be read or is another's is an error, not a guess."""
        with open_slab(tmp_path / "s") as store:
            store.describe(make_keyspace())
            (path,) = (tmp_path / "s/keyspaces").iterdir()
            path.write_bytes(text)
            with pytest.raises(StoreError, match="remove it"):
                store.keyspaces()

    def test_key_space_that_cannot_be_written_is_told(self, tmp_path):
        """A description that finds no place is an error of the store."""
        with open_slab(tmp_path / "s") as store:
            (tmp_path / "s/keyspaces").touch(0o600)
            with pytest.raises(StoreUnavailableError, match="cannot be written"):
                store.describe(make_keyspace())
            with pytest.raises(StoreUnavailableError, match="cannot be read"):
                store.keyspaces()
