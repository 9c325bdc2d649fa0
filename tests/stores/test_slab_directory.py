# SPDX-License-Identifier: Apache-2.0
"""Whose directory it is: foreign, of another release, widened, outgrown."""

import json
import os
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.stores.slab_kit import SLOT_BYTES, die, open_slab
from ucm.config import StoreConfig
from ucm.errors import ConfigError
from ucm.stores.slab import Mount, SlabStore, _files, look
from ucm.stores.slab._layout import IndexLayout
from ucm.testing.store_blocks import load, make_keys, make_keyspace, payload, save

OURS = b'{"kind":"ucm-slab",'
FOREIGN: dict[str, dict[str, bytes]] = {
    "namesakes": {"data": b"1", "index": b"2", "a.tmp": b"3"},
    "directories": {"owners/1.lock": b"", "keyspaces/k.json": b"{}"},
    "of a volume": {"lost+found/x": b""},
    "its own slab.json": {"slab.json": b'{"name": "my slab"}', "data": b"1"},
    "no text": {"slab.json": b'{"schema": "\xff"}', "data": b"1"},
    "endless nesting": {"slab.json": b'{"a": ' + b"[" * 9000, "data": b"1"},
    "another kind": {"slab.json": b'{"schema": 5, "kind": "x"}', "data": b"1"},
    "its own mark": {"slab.json.tmp": b"notes", "data": b"1"},
    "only a mark": {"slab.json.tmp": b"notes"},
    "hardly a mark": {"slab.json.tmp": b"", "data": b"1"},
    "manifest lost": {"data": b"1", "index": b"2", "keyspaces/k.json": b"{}"},
}


def make_tree(root: Path, files: dict[str, bytes]) -> None:
    """Make a directory that somebody else might have."""
    root.mkdir(0o700)
    for name, text in files.items():
        (root / name).parent.mkdir(0o700, exist_ok=True)
        (root / name).write_bytes(text)
        (root / name).chmod(0o600)


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return all that can be changed about a directory."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_ino,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (root, *root.rglob("*"))
    }


def as_an_earlier_release_left_it(root: Path, schema: int, num_slots: int) -> None:
    """Make a slab of schema 1, whose locks are files, or 2, which has no extents,
    or say that it is of a later one."""
    index = np.zeros(IndexLayout(num_slots).nbytes, dtype=np.uint8)
    index[:8].view("i8")[0] = int.from_bytes(b"ucmslab1")
    text = {
        "schema": schema,
        "slot_bytes": SLOT_BYTES,
        "num_slots": num_slots,
    }
    if schema > 1:
        text = {"kind": "ucm-slab"} | text
    files = {
        "slab.json": json.dumps(text).encode(),
        "data": bytes(num_slots * SLOT_BYTES),
        "index": index.tobytes(),
        "keyspaces/k.json": b"{}",
    }
    if schema == 1:
        files |= {"index.lock": b"", "open.lock": b"", "owners/1.lock": b""}
    make_tree(root, files)


class TestForeign:
    @pytest.mark.parametrize("num_blocks", [8, 1 << 30], ids=["fits", "fits nowhere"])
    @pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
    def test_directory_that_is_not_ours_is_left_as_it_is(
        self, tmp_path, files, num_blocks
    ):
        """R-24: a mistyped path changes nothing, also where creation is refused for
        another reason; what is said names path and remedy."""
        path = tmp_path / "s"
        make_tree(path, files)
        before = tree(path)
        with pytest.raises(ConfigError) as caught:
            open_slab(path, num_blocks)
        assert before == tree(path)
        assert "store.path" == caught.value.key
        assert str(path) in str(caught.value)
        assert "directory" in caught.value.remedy

    @pytest.mark.parametrize("name", ["slab.json", "slab.json.tmp"])
    def test_link_or_pipe_in_place_of_a_manifest_is_refused_by_name(
        self, tmp_path, name
    ):
        """R-24: what is no plain file is neither read through nor waited for."""
        (tmp_path / "real").write_bytes(OURS)
        for make, told in (
            (lambda path: path.symlink_to(tmp_path / "real"), "symbolic link"),
            (os.mkfifo, "not a plain file"),
        ):
            path = tmp_path / told
            path.mkdir(0o700)
            make(path / name)
            with pytest.raises(ConfigError, match=f"{name} is (a|not a) ") as caught:
                open_slab(path)
            assert told in str(caught.value)
            assert [name] == os.listdir(path)

    def test_mark_of_ours_says_that_the_rest_is_ours(self, tmp_path):
        """R-24: what a killed creation had made is made anew, and nothing else that
        lies there is touched."""
        path = tmp_path / "s"
        make_tree(path, {"slab.json.tmp": OURS, "data": b"1", "mine": b"!"})
        with open_slab(path) as store:
            assert 8 == save(store, make_keys(8))
        assert b"!" == (path / "mine").read_bytes()

    def test_refused_creation_leaves_an_empty_directory_empty(self, tmp_path):
        """R-24: a directory that was there before is there afterwards, with nothing
        in it."""
        with pytest.raises(ConfigError, match="bytes needed"):
            open_slab(tmp_path, 1 << 30)
        assert [] == os.listdir(tmp_path)


class TestReleases:
    @pytest.mark.parametrize("schema", [1, 2, 4, 5])
    def test_slab_of_an_earlier_release_is_refused_by_name(self, tmp_path, schema):
        """Its users would not see our locks, nor we theirs; nothing is changed."""
        path = tmp_path / "s"
        as_an_earlier_release_left_it(path, schema, 8)
        before = tree(path)
        for index_only in (False, True):
            with pytest.raises(ConfigError, match="another release made it") as caught:
                open_slab(path, index_only=index_only)
            assert f"schema version is {schema}, not 6" in str(caught.value)
            assert "remove the directory" in caught.value.remedy
        assert before == tree(path)


class TestModes:
    @pytest.mark.parametrize(
        ("directory", "file", "told"),
        [
            (0o2770, 0o660, r"it has mode 2770: group \d+ may write"),
            (0o2700, 0o660, r"slab.json has mode 0660: group \d+ may write"),
            (0o777, 0o600, "it has mode 0777: everybody may write"),
        ],
    )
    def test_widened_modes_are_refused_with_what_to_do(
        self, tmp_path, directory, file, told
    ):
        """R-34: who may write can forge a block, so that a slab which an orchestrator
        has opened to a group is not used; the command that is named helps."""
        path, keys = tmp_path / "a slab", make_keys(2)
        with open_slab(path) as store:
            save(store, keys)
            store.describe(make_keyspace())
        path.chmod(directory)
        for each in path.rglob("*"):
            each.chmod(directory if each.is_dir() else file)
        with pytest.raises(ConfigError, match=told) as caught:
            open_slab(path)
        assert "store.path" == caught.value.key
        assert "fsGroup" in caught.value.remedy
        command = caught.value.remedy.partition("run: ")[2].partition(";")[0]
        assert f"chmod -R go-w '{path}'" == command
        subprocess.run(command, shell=True, check=True)
        with open_slab(path) as store:
            assert [payload(key) for key in keys] == load(store, keys)
            assert [make_keyspace()] == list(store.keyspaces().values())

    def test_group_that_only_reads_is_no_obstacle(self, tmp_path):
        """R-34: a directory that inherits its group, and files that it may read, are
        used as they are."""
        tmp_path.chmod(0o2770)
        path = tmp_path / "s"
        open_slab(path).close()
        assert not stat.S_IMODE(path.stat().st_mode) & 0o77
        path.chmod(0o2750)
        for name in ("data", "arena", "index-4096.0", "slab.json"):
            (path / name).chmod(0o640)
        with open_slab(path) as store:
            assert 2 == save(store, make_keys(2))


class TestKeySpaces:
    @pytest.mark.slow
    def test_thousand_resets_leave_as_many_texts_as_one_reads(self, memory_path):
        """R-33: the newest are kept, whatever writers left that were killed."""
        with open_slab(memory_path) as store:
            store.describe(make_keyspace("first"))
            kept = memory_path / "keyspaces"
            for number in range(70):
                (kept / f"{number}.json.tmp").touch(0o600)
            for number in range(1000):
                store.describe(last := make_keyspace(f"model {number}"))
                assert 64 == len(os.listdir(kept))
            found = store.keyspaces()
        assert last == found[last.digest]
        assert make_keyspace("first") not in found.values()
        assert 64 == len(found)

    def test_text_that_was_removed_while_all_are_read_is_passed_over(
        self, tmp_path, monkeypatch
    ):
        """R-33: another engine's reset between listing and reading is no error."""
        with open_slab(tmp_path / "s") as store:
            store.describe(make_keyspace("a"))
            store.describe(make_keyspace("b"))
            (tmp_path / f"s/keyspaces/{make_keyspace('a').digest.hex()}.json").unlink()
            listed = [f"{make_keyspace(name).digest.hex()}.json" for name in "ab"]
            with monkeypatch.context() as patch:
                patch.setattr(os, "listdir", lambda fd: listed)
                assert [make_keyspace("b")] == list(store.keyspaces().values())

    def test_slab_without_texts_has_none(self, tmp_path):
        """Nobody has described anything yet."""
        with open_slab(tmp_path / "s") as store:
            assert {} == store.keyspaces()


class TestPlaces:
    @pytest.mark.parametrize("index_only", [False, True])
    def test_slab_on_a_disk_is_refused(self, disk_path, index_only):
        """Copies would wait for it while they hold blocks; the remedy names the tier for
        it, and nothing is made there."""
        with pytest.raises(
            ConfigError, match=r"a slab is memory.*/dev/shm.*type: disk"
        ):
            open_slab(disk_path / "s", index_only=index_only)
        (problem,) = look(
            StoreConfig(path=str(disk_path / "s"), capacity=1 << 20)
        ).problems
        assert "a slab is memory" in str(problem)
        assert [] == [*disk_path.iterdir()]

    def test_memory_that_the_table_of_mounts_lacks_is_taken(
        self, tmp_path, monkeypatch
    ):
        """A sandbox may tell little: the kernel's word on the path counts."""
        monkeypatch.setattr(_files, "mount_of", lambda root: Mount())
        open_slab(tmp_path / "s").close()

    @pytest.mark.parametrize("place", ["/proc/ucm", "/sys/ucm"])
    def test_what_is_no_place_for_files_is_refused_at_once(self, place):
        """R-24: nobody waits for a directory that can never be made."""
        with pytest.raises(ConfigError, match="a slab is memory"):
            open_slab(Path(place))

    def test_memory_is_asked_for_huge_pages(self, tmp_path):
        """R-27: the kernel decides; it was told."""
        with open_slab(tmp_path / "s", 512):
            smaps = Path("/proc/self/smaps").read_text()
            entry = smaps.partition(f"{tmp_path}/s/data\n")[2].partition("VmFlags:")[2]
            assert " hg" in entry.partition("\n")[0]

    def test_settings_of_a_dead_user_do_not_outlive_it(self, tmp_path):
        """A user that died without leaving is no user when the next one looks."""
        die(open_slab(tmp_path / "s"))
        with open_slab(tmp_path / "s") as store:
            assert not store._slab._class.owners.are_others()

    def test_symbolic_link_to_a_slab_is_refused(self, tmp_path):
        """R-24: another user might turn the link elsewhere."""
        open_slab(tmp_path / "s").close()
        (tmp_path / "link").symlink_to(tmp_path / "s")
        with pytest.raises(ConfigError, match="not a directory"):
            SlabStore(
                path=str(tmp_path / "link"), capacity_bytes=1 << 20, block_bytes=64
            )
