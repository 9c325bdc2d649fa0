# SPDX-License-Identifier: Apache-2.0
"""A slab remembers what became of its blocks, for all who use it (R-71)."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.slab_kit import SLOT_BYTES, Child, open_slab
from ucm.blocks import PackedKey, keyspace_prefix
from ucm.errors import ConfigError
from ucm.fates import Fate, Told
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore, _fates, explain
from ucm.stores.slab._fates import fates_nbytes
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    load,
    make_keys,
    make_keyspace,
    save,
)

pytestmark = pytest.mark.usefixtures("either_way")

KEYS = make_keys(40)


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all slabs draw one seed: which blocks share their place, of 16384, is no accident of a run."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(1, count + 1)))


def fates(store: Store, keys: list[PackedKey]) -> list[Fate]:
    """Return what has become of blocks, without when."""
    return [told.fate for told in store.fates(keys)]


class TestFates:
    def test_each_fate_is_told(self, tmp_path: Path) -> None:
        """R-71: never offered, being written, stored, evicted, forgotten and cleared can
        be told apart."""
        other = make_keys(1, keyspace=make_keyspace("other"))
        with open_slab(tmp_path / "s", 8) as store:
            assert [Told(Fate.NEVER)] * 2 == store.fates(KEYS[:2])
            lease = store.reserve(KEYS[:2], BLOCK_BYTES)
            assert [Fate.WRITING] * 2 == fates(store, KEYS[:2])
            lease.discard()
            assert [Fate.NEVER] * 2 == fates(store, KEYS[:2])
            save(store, KEYS[:8])
            assert [Fate.STORED] * 8 == fates(store, KEYS[:8])
            save(store, KEYS[8:11])
            assert 3 == fates(store, KEYS[:8]).count(Fate.EVICTED)
            store.forget(KEYS[8:9])
            store.forget(KEYS[9:10], Fate.CORRUPT)
            save(store, other)
            store.clear(keyspace_prefix(make_keyspace("other").digest))
            told = store.fates([*KEYS[8:10], *other, KEYS[30]])
            assert [Fate.FORGOTTEN, Fate.CORRUPT, Fate.CLEARED, Fate.NEVER] == [
                each.fate for each in told
            ]
            assert all(0 <= each.age_s < 600 for each in told[:3])

    @pytest.mark.parametrize("at_once", [1, 5])
    def test_evictions_one_by_one_and_together_are_remembered(
        self, tmp_path: Path, at_once: int
    ) -> None:
        """R-71: both ways in which room is made say whose it was; a place that two keys
        have in common is rare."""
        with open_slab(tmp_path / "s", 10) as store:
            for start in range(0, 40, at_once):
                save(store, KEYS[start : start + at_once])
            told = fates(store, KEYS)
            assert [Fate.STORED] * 10 == told[30:]
            assert 28 <= told.count(Fate.EVICTED)

    def test_block_that_comes_back_is_stored_and_its_next_end_counts(
        self, tmp_path: Path
    ) -> None:
        """R-71: the last word is the one that is told."""
        with open_slab(tmp_path / "s", 2) as store:
            save(store, KEYS[:2])
            save(store, KEYS[2:3])
            (gone,) = [key for key in KEYS[:2] if not store.contains([key])[0]]
            assert [Fate.EVICTED] == fates(store, [gone])
            save(store, [gone])
            assert [Fate.STORED] == fates(store, [gone])
            store.forget([gone])
            assert [Fate.FORGOTTEN] == fates(store, [gone])

    @pytest.mark.slow
    def test_fates_are_shared_and_survive_everybody(self, tmp_path: Path) -> None:
        """R-71: who looks up hears what another process evicted, also after a restart."""
        with (
            open_slab(tmp_path / "s", 8, index_only=True) as looks,
            open_slab(tmp_path / "s", 8) as saves,
        ):
            save(saves, KEYS[10:18])
            save(saves, KEYS[18:22])
            assert 4 == fates(looks, KEYS[10:18]).count(Fate.EVICTED)
        with Child(tmp_path / "s", "save", 8) as child:
            assert "3" == child.say()
            child.tell("")
            assert 0 == child.finish()
        with open_slab(tmp_path / "s", 8) as again:
            assert [Fate.STORED] * 3 == fates(again, KEYS[:3])
            assert 7 == fates(again, KEYS[10:22]).count(Fate.EVICTED)

    def test_blocks_go_with_the_memory_that_another_class_takes(
        self, memory_path: Path
    ) -> None:
        """R-71: who loses its extent to blocks of another size hears of an eviction; a place
        that two keys have in common is rare."""
        capacity = 2 << 20

        def open_class(nbytes: int) -> SlabStore:
            return SlabStore(
                path=str(memory_path), capacity_bytes=capacity, block_bytes=nbytes
            )

        with open_class(SLOT_BYTES) as small:
            count = small.stats().capacity_blocks
            keys = make_keys(count)
            save(small, keys, SLOT_BYTES)
        with open_class(4 * SLOT_BYTES) as large:
            save(large, make_keys(4, first=count), 4 * SLOT_BYTES)
        told = [explain(memory_path, key).told.fate for key in keys]
        assert {Fate.EVICTED, Fate.STORED, Fate.NEVER} >= set(told)
        assert Fate.EVICTED in told
        assert 2 >= told.count(Fate.NEVER)


def cut(path: Path) -> None:
    """Leave some bytes of a file."""
    os.truncate(path, 100)


def trim(path: Path) -> None:
    """Take a byte of a file, and so none of its pages."""
    os.truncate(path, path.stat().st_size - 1)


def swap_for_a_link(path: Path) -> None:
    """Have the name lead elsewhere."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def fill_with_garbage(path: Path) -> None:
    """Write what somebody else might have written."""
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


def swap_for_a_directory(path: Path) -> None:
    """Put in its place what is no file."""
    path.unlink()
    path.mkdir(0o700)


def open_to_others(path: Path) -> None:
    """Let anybody write to it."""
    path.chmod(0o666)


DAMAGES = (cut, swap_for_a_link, fill_with_garbage, swap_for_a_directory, Path.unlink)


class TestLoss:
    @pytest.mark.parametrize("damage", [*DAMAGES, open_to_others])
    def test_file_that_is_lost_or_not_ours_costs_the_reason_only(
        self, tmp_path: Path, damage: Callable[[Path], object]
    ) -> None:
        """R-71: whatever has become of it, the slab serves its blocks; what is told is
        that nothing is known."""
        path = tmp_path / "s"
        with open_slab(path, 8) as store:
            save(store, KEYS[:8])
            save(store, KEYS[8:9])
        damage(path / "fates")
        with open_slab(path, 8) as store:
            (gone,) = [key for key in KEYS[:9] if not store.contains([key])[0]]
            assert {Fate.NEVER, Fate.UNKNOWN} >= set(fates(store, [gone]))
            assert load(store, KEYS[8:9])
            save(store, KEYS[10:20])
            assert store.audit() == []

    @pytest.mark.parametrize("damage", [swap_for_a_link, swap_for_a_directory])
    def test_what_is_not_ours_is_left_alone(
        self, tmp_path: Path, damage: Callable[[Path], object]
    ) -> None:
        """What stands in the file's place is neither followed nor removed."""
        path = tmp_path / "s"
        open_slab(path, 8).close()
        damage(path / "fates")
        before = (path / "fates").lstat()
        open_slab(path, 8).close()
        after = (path / "fates").lstat()
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)

    @pytest.mark.parametrize("damage", [cut, trim, Path.unlink])
    def test_file_that_is_cut_in_use_is_let_go(
        self, memory_path: Path, damage: Callable[[Path], object]
    ) -> None:
        """R-71: who evicts or looks afterwards is not ended by a page that is gone."""
        with (
            open_slab(memory_path, 8) as store,
            open_slab(memory_path, 8, index_only=True) as looks,
        ):
            save(store, KEYS[:8])
            damage(memory_path / "fates")
            save(store, KEYS[10:16])
            save(store, KEYS[20:21])
            gone = [key for key in KEYS[:8] if not store.contains([key])[0]]
            told = {*fates(store, gone), *fates(looks, gone)}
            if damage is Path.unlink:  # two of the keys may have a place in common
                assert {Fate.EVICTED} == told - {Fate.NEVER}
            else:
                assert {Fate.UNKNOWN} == told

    def test_lost_file_is_made_anew_by_the_next(self, tmp_path: Path) -> None:
        """A slab that a release without it has made gets one; one of no such size goes."""
        path = tmp_path / "s"
        for damage in (Path.unlink, cut):
            open_slab(path, 8).close()
            damage(path / "fates")
            with open_slab(path, 8) as store:
                save(store, KEYS[:8])
                save(store, KEYS[8:])
                assert Fate.EVICTED in fates(store, KEYS[:8])

    def test_no_room_for_it_is_no_reason_to_fail(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slab that has no room for its memory of what is gone does without."""
        open_slab(tmp_path / "s", 8).close()
        (tmp_path / "s/fates").unlink()
        monkeypatch.setattr(_fates, "fates_nbytes", lambda num_slots: 1 << 60)
        with open_slab(tmp_path / "s", 8) as store:
            save(store, KEYS[:9])
            assert [Fate.UNKNOWN] == fates(store, KEYS[30:31])

    @pytest.mark.parametrize(
        ("num_slots", "entries"),
        [
            (1, 1 << 14),
            (4096, 1 << 14),
            (4097, 1 << 15),
            (1 << 18, 1 << 20),
            (1 << 24, 1 << 20),
        ],
    )
    def test_size_follows_the_slots_within_bounds(
        self, num_slots: int, entries: int
    ) -> None:
        """As many entries as slots, a power of two of them, and a million at most."""
        assert 16 * entries == fates_nbytes(num_slots)


class TestEverywhere:
    def test_blocks_of_other_sizes_are_found_once_they_were_seen(
        self, memory_path: Path
    ) -> None:
        """R-71: an engine whose blocks have another size is a neighbour as well; a class
        that comes later is seen by the next who reads the key spaces."""

        def open_class(nbytes: int, *, index_only: bool = False) -> SlabStore:
            return SlabStore(
                path=str(memory_path),
                capacity_bytes=4 << 20,
                block_bytes=nbytes,
                index_only=index_only,
            )

        with open_class(SLOT_BYTES, index_only=True) as looks:
            assert {} == looks.keyspaces()
            with open_class(4 * SLOT_BYTES) as other:
                other.describe(make_keyspace())
                save(other, KEYS[:2], 4 * SLOT_BYTES)
                assert [False, False] == looks.everywhere(KEYS[:2])
                assert 1 == len(looks.keyspaces())
                assert [True, True, False] == looks.everywhere(KEYS[:3])
                assert [False] == looks.contains(KEYS[:1])
                other.forget(KEYS[:1])
                assert [False, True] == looks.everywhere(KEYS[:2])
            (path,) = memory_path.glob(f"index-{4 * SLOT_BYTES}.*")
            os.truncate(path, 100)
            assert [False, False] == looks.everywhere(KEYS[:2])
            looks.keyspaces()
            assert [False, False] == looks.everywhere(KEYS[:2])


class TestExplain:
    def test_block_is_explained_while_others_use_the_slab(self, tmp_path: Path) -> None:
        """R-71: what a command asks needs no engine, and takes nothing from one."""
        mine, theirs = make_keyspace("mine"), make_keyspace("theirs")
        own = make_keys(9, keyspace=mine)
        with open_slab(tmp_path / "s", 8) as store:
            store.describe(mine)
            store.describe(theirs)
            save(store, own[:8])
            save(store, own[8:])
            save(store, make_keys(2, first=7, keyspace=theirs))
            told = [explain(tmp_path / "s", key) for key in own]
            assert {Fate.STORED, Fate.EVICTED} == {each.told.fate for each in told}
            assert [mine] * 9 == [each.keyspace for each in told]
            differs = {"model": ("mine", "theirs")}
            assert [{}] * 7 + [{theirs.digest: differs}] * 2 == [
                each.others for each in told
            ]
            assert load(store, make_keys(1, first=8, keyspace=theirs))

    def test_key_space_that_nobody_described_differs_in_nothing_known(
        self, tmp_path: Path
    ) -> None:
        """Where the key is stored is told also if its own key space has no text."""
        theirs = make_keyspace("theirs")
        with open_slab(tmp_path / "s", 8) as store:
            store.describe(theirs)
            save(store, make_keys(1, keyspace=theirs))
        told = explain(tmp_path / "s", KEYS[0])
        assert (Told(Fate.NEVER), None) == (told.told, told.keyspace)
        assert {theirs.digest: {}} == told.others

    def test_damaged_description_takes_nothing_from_the_rest(
        self, tmp_path: Path
    ) -> None:
        """What became of the block is told although a text beside it is no key space."""
        with open_slab(tmp_path / "s", 8) as store:
            store.describe(make_keyspace())
            save(store, KEYS[:1])
        (path,) = (tmp_path / "s/keyspaces").iterdir()
        path.write_bytes(b"\x00")
        told = explain(tmp_path / "s", KEYS[0])
        assert (Fate.STORED, None, {}) == (told.told.fate, told.keyspace, told.others)

    @pytest.mark.parametrize("name", ["missing", "empty", "file", "nul\0"])
    def test_what_is_no_slab_is_refused_and_not_changed(
        self, tmp_path: Path, name: str
    ) -> None:
        """Nothing is made where somebody only asks."""
        (tmp_path / "empty").mkdir(0o700)
        (tmp_path / "file").write_text("")
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(ConfigError, match=r"store\.path"):
            explain(tmp_path / name, KEYS[0])
        assert before == sorted(os.listdir(tmp_path))
        assert [] == os.listdir(tmp_path / "empty")
