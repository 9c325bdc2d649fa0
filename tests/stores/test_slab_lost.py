# SPDX-License-Identifier: Apache-2.0
"""A slab whose directory or files vanish, move, change or shrink under its users."""

import os
import shutil
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.stores.slab_kit import Child, die, index_path, open_slab
from ucm.errors import ConfigError, StoreError, StoreUnavailableError
from ucm.stores.slab import SlabStore, _classes, _opened
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    load,
    make_keys,
    make_keyspace,
    payload,
    save,
)

pytestmark = pytest.mark.usefixtures("either_way")

LATE, QUICK = make_keys(1), make_keys(1, first=9)


INDEX = "index-4096.0"


def swap(path: Path, name: str) -> None:
    """Put a copy in a file's place."""
    shutil.copy2(path / name, path / "copy")
    (path / "copy").rename(path / name)


def replace(path: Path) -> None:
    """Move the directory away and make another slab under its name."""
    path.rename(path.with_name("moved"))
    open_slab(path, 1).close()


def leave_the_essence(path: Path) -> None:
    """Remove everything but manifest, index and data: all that looks like a lock."""
    for each in path.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name not in {"slab.json", "data", "arena", INDEX}:
            each.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda path: path.rename(path.with_name("moved")),
    "replaced": replace,
    "without locks": leave_the_essence,
    "without index": lambda path: (path / INDEX).unlink(),
    "without arena": lambda path: (path / "arena").unlink(),
    "without data": lambda path: (path / "data").unlink(),
    "without manifest": lambda path: (path / "slab.json").unlink(),
    "other index": lambda path: swap(path, INDEX),
    "other arena": lambda path: swap(path, "arena"),
    "other data": lambda path: swap(path, "data"),
}


def join(path: Path) -> list[SlabStore]:
    """Open what is there now, if it can be opened."""
    try:
        return [open_slab(path, 1)]
    except (ConfigError, StoreUnavailableError):
        return []


def accepted(
    stores: Sequence[SlabStore], finish_late_copy: Callable[[], None]
) -> list[bytes]:
    """
    Save the quick key in each store and read it as a pipeline does.

    A copy into a slot that was given to somebody else ends where it does most harm:
    after the bytes were verified, before they are copied.

    Returns:
        What passed both checks.
    """
    passed = []
    for store in stores:
        try:
            save(store, QUICK)
            with store.read(QUICK) as lease:
                lease.verify(0, 1)
                finish_late_copy()
                seen = lease.slots.block(0).tobytes()
                lease.recheck()
        except StoreError:
            continue
        passed.append(seen)
    return passed


class TestWrongBytes:
    """The slab has one slot, so that two who think it theirs collide (R-23)."""

    @pytest.mark.slow
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_late_copy_of_another_process_is_never_read(self, tmp_path, damage):
        """R-23: whatever happens to the directory, who lives keeps its slots, and
        nobody accepts bytes of another key."""
        path = tmp_path / "s"
        with (
            open_slab(path, 1) as user,
            Child(path, "late", 1) as writer,
        ):
            assert "reserved" == writer.say()
            damage(path)
            stores = [user, *join(path)]

            def finish() -> None:
                writer.tell("")
                assert "written" == writer.say()

            for seen in accepted(stores, finish):
                assert payload(QUICK[0]) == seen
            for store in stores:
                store.close()

    @pytest.mark.parametrize("name", [INDEX, "arena", "data"])
    def test_copy_of_a_file_is_not_used_beside_it(self, tmp_path, name):
        """R-23: a slot that is free in a copied index is not written while it is used
        under the one that the copy replaced."""
        path = tmp_path / "s"
        with open_slab(path, 1) as writer:
            shutil.copy2(path / name, path / "copy")
            lease = writer.reserve(LATE, BLOCK_BYTES)
            (path / "copy").rename(path / name)

            def finish() -> None:
                lease.slots.block(0)[:] = 7

            stores = join(path)
            for seen in accepted(stores, finish):
                assert payload(QUICK[0]) == seen
            for store in stores:
                store.close()

    def test_who_leaves_a_moved_slab_ends_nobody_in_the_new_one(self, tmp_path):
        """R-23: owners of two slabs have equal numbers; the end of one is not taken
        for the end of the other."""
        path = tmp_path / "s"
        old = open_slab(path, 1)
        path.rename(tmp_path / "moved")
        with open_slab(path, 1) as writer, open_slab(path, 1) as user:
            lease = writer.reserve(LATE, BLOCK_BYTES)
            old.close()

            def finish() -> None:
                lease.slots.block(0)[:] = 7

            assert [] == accepted([user], finish)
            assert 1 == user.stats().reserved_blocks

    def test_number_of_an_owner_is_not_given_again(self, tmp_path):
        """R-23: not even after its death."""
        die(open_slab(tmp_path / "s"))
        with open_slab(tmp_path / "s") as store:
            assert 2 == store._slab.owner_id

    def test_number_that_somebody_has_is_passed_over(self, tmp_path):
        """R-23: a counter that was overwritten takes nobody's number away."""
        with open_slab(tmp_path / "s") as first:
            first._slab.index.header[9] = 0
            with open_slab(tmp_path / "s") as second:
                assert (1, 2) == (first._slab.owner_id, second._slab.owner_id)

    def test_data_are_used_under_a_new_index_once_nobody_else_does(self, tmp_path):
        """Files that were restored from a copy are a slab like any other."""
        path, keys = tmp_path / "s", make_keys(3)
        with open_slab(path) as store:
            save(store, keys)
        for name in (INDEX, "arena", "data"):
            swap(path, name)
        with open_slab(path) as store:
            assert [payload(key) for key in keys] == load(store, keys)


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (DAMAGES["removed"], f"{INDEX} was removed"),
    "moved": (DAMAGES["moved"], "removed or moved"),
    "replaced": (DAMAGES["replaced"], f"{INDEX} was replaced"),
    "without index": (DAMAGES["without index"], f"{INDEX} was removed"),
    "without arena": (DAMAGES["without arena"], "arena was removed"),
    "without data": (DAMAGES["without data"], "data was removed"),
    "other data": (DAMAGES["other data"], "data was removed"),
    "short data": (
        lambda path: os.truncate(path / "data", 8192),
        "data was shortened to 8192",
    ),
    "short arena": (
        lambda path: os.truncate(path / "arena", 0),
        "arena was shortened to 0",
    ),
    "short index": (
        lambda path: os.truncate(path / INDEX, 0),
        f"{INDEX} was shortened to 0",
    ),
}


class TestNotice:
    def test_a_byte_less_is_noticed_before_the_memory_is_touched(self, tmp_path):
        """R-32: sizes are looked at; as long as the last page is there nothing else
        would tell."""
        path, keys = tmp_path / "s", make_keys(3)
        with open_slab(path) as store:
            save(store, keys)
            os.truncate(path / "data", (path / "data").stat().st_size - 1)
            with pytest.raises(StoreUnavailableError, match="data was shortened"):
                store.read(keys)

    @pytest.mark.parametrize(("loss", "told"), LOSSES.values(), ids=LOSSES)
    def test_users_notice_and_serve_it_no_longer(
        self, tmp_path, monkeypatch, loss, told
    ):
        """R-23, R-32: each verb says that the slab is gone and why, with an error that
        is a miss, and the end is quiet."""
        monkeypatch.setattr(_opened, "_LOOK_EVERY_S", 0.0)
        path, keys = tmp_path / "s", make_keys(3)
        with open_slab(path) as store, open_slab(path, index_only=True) as looker:
            save(store, keys)
            read = store.read(keys)
            written = store.reserve(make_keys(2, first=9), BLOCK_BYTES)
            loss(path)
            for verb in (
                lambda: looker.match(keys),
                lambda: looker.contains(keys),
                lambda: looker.touch(keys),
                lambda: read.verify(0, 3),
                read.recheck,
                lambda: written.seal(0, 2),
                written.commit,
                lambda: store.read(keys),
                lambda: store.reserve(make_keys(1, first=20), BLOCK_BYTES),
                lambda: store.forget(keys),
                lambda: store.clear(b""),
                lambda: store.describe(make_keyspace()),
                store.keyspaces,
                store.stats,
            ):
                with pytest.raises(StoreUnavailableError, match=told):
                    verb()
            written.discard()
            read.close()
        assert not list(tmp_path.glob("s/keyspaces"))

    def test_look_up_looks_at_the_index_each_time(self, tmp_path, monkeypatch):
        """R-32: whatever a look-up reads was there a moment before; data, which it does
        not read, are missed by the clock."""
        now = 100.0
        monkeypatch.setattr(
            _opened, "time", types.SimpleNamespace(monotonic=lambda: now)
        )
        keys = make_keys(3)
        for name, passed in ((INDEX, 0.0), ("arena", 0.25), ("data", 0.25)):
            path = tmp_path / name
            with open_slab(path) as store:
                save(store, keys)
                os.truncate(path / name, (path / name).stat().st_size - 1)
                if passed:
                    assert 3 == store.match(keys)
                now += passed
                for verb in (store.match, store.contains, store.touch):
                    with pytest.raises(StoreUnavailableError, match="shortened"):
                        verb(keys)

    def test_path_is_looked_at_every_quarter_of_a_second(self, tmp_path, monkeypatch):
        """R-23: a move is noticed by the clock, whatever is asked; what is lost stays
        so, although it comes back."""
        now = 100.0
        monkeypatch.setattr(
            _opened, "time", types.SimpleNamespace(monotonic=lambda: now)
        )
        path, keys = tmp_path / "s", make_keys(3)
        with open_slab(path) as store:
            save(store, keys)
            path.rename(tmp_path / "moved")
            assert 3 == store.match(keys)
            now += 0.25
            with pytest.raises(StoreUnavailableError, match="no longer served"):
                store.match(keys)
            (tmp_path / "moved").rename(path)
            now += 0.25
            with pytest.raises(StoreUnavailableError, match="no longer served"):
                store.match(keys)

    def test_process_that_goes_elsewhere_still_finds_its_slab(
        self, tmp_path, monkeypatch
    ):
        """A path is meant from where it was opened."""
        monkeypatch.setattr(_opened, "_LOOK_EVERY_S", 0.0)
        monkeypatch.chdir(tmp_path)
        with open_slab(Path("s")) as store:
            monkeypatch.chdir("/")
            assert 3 == save(store, make_keys(3))

    def test_who_leaves_late_says_no_word_to_a_slab_that_is_not_its_own(self, tmp_path):
        """R-23: the last user of a moved slab writes nothing down in it (its files may
        be on their way elsewhere), nor in the one in its place."""
        path = tmp_path / "s"
        store = open_slab(path)
        store.reserve(LATE, BLOCK_BYTES)  # which who leaves gives back
        path.rename(tmp_path / "moved")
        with open_slab(path) as new:
            indexes = [each._slab.index for each in (store, new)]
            before = [told(each) for each in indexes]
            store.close()
            assert before == [told(each) for each in indexes]


def told(index) -> tuple[list[int], list[int]]:
    """Return what an index says of the slab, and of each slot."""
    return index.header.tolist(), index.states.tolist()


def test_index_that_shrinks_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    """R-32: whatever its size was a moment before, what is mapped is what counts."""
    open_slab(tmp_path / "s").close()
    mapped = _classes.map_file

    def map_what_is_left(fd, *, at_once):
        os.truncate(index_path(tmp_path / "s"), 4096)
        return mapped(fd, at_once=at_once)

    monkeypatch.setattr(_classes, "map_file", map_what_is_left)
    with pytest.raises(ConfigError, match=r"index-4096\.0 has another size"):
        open_slab(tmp_path / "s")
