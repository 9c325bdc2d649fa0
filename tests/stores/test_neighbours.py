# SPDX-License-Identifier: Apache-2.0
"""Blocks are found under other key spaces, for a thread that must not wait."""

from collections.abc import Iterator, Sequence

import attrs
import pytest

from tests.clocks import AdvancingThreads
from ucm.blocks import KeySpace, PackedKey, under
from ucm.errors import StoreUnavailableError
from ucm.stores.memory import MemoryStore
from ucm.stores.neighbours import MAX_NEIGHBOURS, Neighbours
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, make_keyspace, save

OWN = make_keyspace("own")
(KEY,) = make_keys(1, keyspace=OWN)


class Watched(WrapperStore):
    """A store that counts how often it is read, and of how many keys it is asked."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(16, BLOCK_BYTES))
        self.reads = 0
        self.asked: list[int] = []
        self.is_up = True

    def keyspaces(self) -> dict[bytes, KeySpace]:
        """Count, then forward."""
        self.reads += 1
        if not self.is_up:
            raise StoreUnavailableError("planned")
        return super().keyspaces()

    def everywhere(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Count, then forward."""
        self.asked.append(len(keys))
        return super().everywhere(keys)


@pytest.fixture
def store() -> Watched:
    """Return a store with nothing in it."""
    return Watched()


@pytest.fixture
def threads() -> AdvancingThreads:
    """Return threads whose clock can be put forward."""
    return AdvancingThreads()


@pytest.fixture
def neighbours(store: Watched, threads: AdvancingThreads) -> Iterator[Neighbours]:
    """Return what looks for others; it must end in time."""
    neighbours = Neighbours(store, threads)
    yield neighbours
    assert neighbours.close()
    assert neighbours.close()


def put(store: Watched, keyspace: KeySpace, key: PackedKey = KEY) -> None:
    """Store a block under a key space that is described."""
    store.describe(keyspace)
    save(store, [under(keyspace.digest, key)])


class TestNeighbours:
    def test_key_space_that_has_the_block_is_told_by_what_differs(
        self, store: Watched, neighbours: Neighbours
    ) -> None:
        """R-71: the fields, each with our value and theirs."""
        put(store, attrs.evolve(OWN, kv_dtype="fp8", parallel="tp=2"))
        neighbours.moved(OWN)
        expected = {"kv_dtype": ("float16", "fp8"), "parallel": ("tp=1", "tp=2")}
        assert expected == neighbours.holding(KEY)

    def test_block_that_nobody_has_is_nowhere(
        self, store: Watched, neighbours: Neighbours
    ) -> None:
        """Neither our own key space nor one without the block is another's."""
        put(store, OWN)
        neighbours.moved(OWN)
        assert neighbours.holding(KEY) is None
        assert [] == store.asked
        store.describe(make_keyspace("empty"))
        neighbours.moved(OWN)
        assert neighbours.holding(KEY) is None
        assert [1] == store.asked

    def test_nothing_is_asked_before_our_own_key_space_is_known(
        self, store: Watched, neighbours: Neighbours
    ) -> None:
        """Without it nothing could differ."""
        put(store, make_keyspace("other"))
        assert neighbours.holding(KEY) is None

    def test_those_most_like_ours_are_asked_and_no_more(
        self, store: Watched, neighbours: Neighbours
    ) -> None:
        """However many there are, a look-up costs a bounded number of keys."""
        for number in range(3 * MAX_NEIGHBOURS):
            far = attrs.evolve(OWN, model=f"m{number}", weights="x", layout="y")
            store.describe(far)
        put(store, attrs.evolve(OWN, weights="v2"))
        neighbours.moved(OWN)
        assert {"weights": ("w", "v2")} == neighbours.holding(KEY)
        assert [MAX_NEIGHBOURS] == store.asked

    def test_others_that_come_later_are_read_behind_the_caller(
        self, store: Watched, threads: AdvancingThreads, neighbours: Neighbours
    ) -> None:
        """Who asks never reads; a hundred questions in a second are one read."""
        neighbours.moved(OWN)
        put(store, make_keyspace("other"))
        for _ in range(100):
            neighbours.holding(KEY)
        threads.advance(1.5)
        for _ in range(100):
            neighbours.holding(KEY)
        assert neighbours.close()
        assert 3 == store.reads
        assert {"model": ("own", "other")} == neighbours.holding(KEY)
        threads.advance(1.5)
        neighbours.holding(KEY)
        assert neighbours.close()
        assert 3 == store.reads

    def test_store_that_cannot_be_read_leaves_what_is_known(
        self, store: Watched, neighbours: Neighbours
    ) -> None:
        """Descriptions are for people: an error of theirs is nobody's."""
        put(store, make_keyspace("other"))
        neighbours.moved(OWN)
        store.is_up = False
        neighbours.moved(OWN)
        assert {"model": ("own", "other")} == neighbours.holding(KEY)
