# SPDX-License-Identifier: Apache-2.0
"""Who follows a slab's changes has its index, whatever happened meanwhile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.index_kit import OWNER, Index
from tests.stores.slab_kit import die, open_slab
from ucm.blocks import PackedKey
from ucm.stores.memory import MemoryStore
from ucm.stores.slab._changes import changes_since
from ucm.stores.slab._layout import Word
from ucm.stores.slab._tenants import places_of, tenants_at
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save
from ucm.uses import Uses

pytestmark = pytest.mark.usefixtures("either_way")

KEYS = [
    PackedKey(bytes([2, *bytes(20), *number.to_bytes(8, "big")]))
    for number in range(300)
]


A, B, C, D = make_keys(4)


class Mirror:
    """Follows an index, or a store."""

    def __init__(self, ask) -> None:
        self._ask = ask
        self._cursor = None
        self.sizes: dict[PackedKey, int] = {}
        self.num_listings = 0

    def follow(self) -> set[PackedKey]:
        """Ask until there is nothing more; return what is there."""
        is_all = False
        while not is_all:
            found = self._ask(self._cursor)
            if found.begins:
                self.num_listings += 1
                self.sizes.clear()
            for key, nbytes, _ in found.told:
                if nbytes:
                    self.sizes[key] = nbytes
                else:
                    self.sizes.pop(key, None)
            self._cursor, is_all = found.cursor, found.is_all
        return set(self.sizes)


def mirror_of(index: Index) -> Mirror:
    """Return one that follows an index by itself."""
    return Mirror(lambda cursor: changes_since(index.index, cursor))


def stored_in(index: Index) -> set[PackedKey]:
    """Return what an index has."""
    return {key for key, there in zip(KEYS, index.has(KEYS), strict=True) if there}


@pytest.fixture
def index(tmp_path) -> Index:
    """Return an index of 64 slots."""
    return Index(tmp_path / "lock", 64)


STEP = st.tuples(
    st.sampled_from(
        ["save", "one", "forget", "discard", "clear", "withdraw", "follow"]
    ),
    st.integers(0, 250),
    st.integers(1, 50),
)


class TestMirror:
    @settings(max_examples=40, deadline=None)
    @given(steps=st.lists(STEP, max_size=25))
    def test_reader_that_follows_has_what_is_stored(
        self, steps, tmp_path_factory
    ) -> None:
        """R-57: whatever is saved, evicted, forgotten, given up or withdrawn, a mirror
        that hears of the changes has the keys of the index."""
        index = Index(tmp_path_factory.mktemp("index") / "lock", 64)
        mirror = mirror_of(index)
        for verb, first, count in steps:
            keys = KEYS[first : first + count]
            match verb:
                case "save":
                    index.save(keys)
                case "one":
                    index.save(keys[:1])
                case "forget":
                    index.index.forget(index.index.batch(keys))
                case "discard":
                    grant = index.index.reserve(index.index.batch(keys), 1, OWNER)
                    index.index.discard(grant, OWNER)
                case "clear":
                    index.index.clear(KEYS[first][:-2])
                case "withdraw":
                    slots = np.arange(first % 60, first % 60 + 4)
                    index.index.withdraw(slots)
                    index.index.admit(slots)
                case "follow":
                    assert stored_in(index) == mirror.follow()
        assert stored_in(index) == mirror.follow()

    def test_reader_that_was_left_behind_lists_again(self, index: Index) -> None:
        """S15: more changes than the ring has places are noticed, and cost a listing."""
        mirror = mirror_of(index)
        mirror.follow()
        for _ in range(len(index.index.changes) // 32 + 1):
            index.save(KEYS[:32])
            index.index.forget(index.index.batch(KEYS[:32]))
        index.save(KEYS[200:203])
        assert set(KEYS[200:203]) == mirror.follow()
        assert 2 == mirror.num_listings

    def test_reader_that_keeps_up_lists_once(self, index: Index) -> None:
        """S15: a ring that has gone round several times is read without a listing."""
        mirror = mirror_of(index)
        for start in range(0, 250, 10):
            index.save(KEYS[start : start + 10])
            mirror.follow()
        assert len(index.index.changes) < index.index.words[Word.CHANGES]
        assert stored_in(index) == mirror.follow()
        assert 1 == mirror.num_listings

    def test_reservation_that_was_given_up_is_not_told(self, index: Index) -> None:
        """R-57: a block that was never visible was never removed."""
        cursor = changes_since(index.index, None).cursor
        grant = index.index.reserve(index.index.batch(KEYS[:5]), 1, OWNER)
        index.index.discard(grant, OWNER)
        assert () == changes_since(index.index, cursor).told

    @pytest.mark.parametrize("count", [1, 5])
    def test_change_that_a_death_left_is_listed(self, index: Index, count: int) -> None:
        """S15: what a repair completes was not written down by the dead one: the reader
        is sent to list."""
        mirror = mirror_of(index)
        mirror.follow()
        keys = KEYS[:count]
        grant = index.index.reserve(index.index.batch(keys), 1, OWNER)
        index.index.begin(grant.slots)
        index.index.words[Word.PUBLISHING] = grant.generation
        assert set(keys) == mirror.follow()
        assert 2 == mirror.num_listings


class TestStore:
    def test_changes_are_told_across_stores_of_a_slab(self, tmp_path) -> None:
        """S15: what one process saves and forgets, another one hears of, with sizes."""
        with (
            open_slab(tmp_path / "slab") as writer,
            open_slab(tmp_path / "slab") as reader,
        ):
            save(writer, [A, B])
            mirror = Mirror(reader.changes)
            mirror.follow()
            assert {A: BLOCK_BYTES, B: BLOCK_BYTES} == mirror.sizes
            save(writer, [C, D])
            writer.forget([A])
            assert {B, C, D} == mirror.follow()
            assert 1 == mirror.num_listings

    def test_changes_say_whose_a_block_is(self, tmp_path) -> None:
        """R-55: in a listing and behind it, as long as the block is there; nobody's if nobody was named."""
        moments, tenants = np.full(2, 10**15), np.array([0xFFFFFFFF, 9], np.uint32)
        uses = Uses(moments, tenants)
        with open_slab(tmp_path / "slab") as store:
            cursor = store.changes(None).cursor
            save(store, [A, B], uses=uses)
            save(store, [C])
            save(store, [D], uses=Uses(moments[:1], tenants[1:]))
            store.forget([D])
            followed = store.changes(cursor).told
            assert [(A, BLOCK_BYTES), (B, BLOCK_BYTES), (C, BLOCK_BYTES)] == [
                each[:2] for each in followed[:3]
            ]
            shared = followed[0].tenant  # more tenants than places: one of its share
            assert [shared, 9, 0, 0, 0] == [each.tenant for each in followed]
            assert shared == tenants_at(places_of(tenants))[0]
            listed = store.changes(None).told
            assert {(A, shared), (B, 9), (C, 0)} == {
                (each.key, each.tenant) for each in listed
            }

    def test_block_that_is_gone_is_nobodys(self, tmp_path) -> None:
        """R-55: whoever has the other slots of a full slab."""
        with open_slab(tmp_path / "slab", 4) as store:
            uses = Uses(np.full(4, 10**15), np.full(4, 9, np.uint32))
            for gone in (A, B, C, D):
                store.forget([A, B, C, D])
                cursor = store.changes(None).cursor
                save(store, [A, B, C, D], uses=uses)
                store.forget([gone])
                told = store.changes(cursor).told
                assert 5 == len(told)
                assert [9 * (each.key != gone) for each in told] == [
                    each.tenant for each in told
                ]

    def test_index_without_slots_tells_changes(self, tmp_path) -> None:
        """S15: who only looks up may follow as well."""
        with open_slab(tmp_path / "slab") as writer:
            save(writer, [A])
            with open_slab(tmp_path / "slab", index_only=True) as reader:
                assert {A} == Mirror(reader.changes).follow()

    def test_what_outlived_its_process_is_listed(self, tmp_path) -> None:
        """S15: after a kill the blocks that are there are listed for the next one."""
        writer = open_slab(tmp_path / "slab")
        save(writer, [A, B, C])
        die(writer)
        with open_slab(tmp_path / "slab") as reader:
            assert {A, B, C} == Mirror(reader.changes).follow()

    def test_store_without_a_record_says_so(self) -> None:
        """S15: a store that keeps no record of changes is told from one without any."""
        with MemoryStore(1, BLOCK_BYTES) as store, pytest.raises(NotImplementedError):
            store.changes(None)
