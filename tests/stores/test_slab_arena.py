# SPDX-License-Identifier: Apache-2.0
"""Slots of several sizes in one directory, within one capacity that may change."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.stores.slab_kit import die
from ucm.blocks import PackedKey
from ucm.errors import BlockNotFoundError, ConfigError, StoreFullError
from ucm.stores.slab import SlabStore
from ucm.stores.slab import _arena as arena_module
from ucm.stores.slab._extents import NOBODY
from ucm.stores.slab._layout import SlotState
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    payload,
    save,
)
from ucm.uses import Uses

SMALL, LARGE = 4096, 16_384
CAPACITY = 24 * 49_152
"""With slots of 4 KiB made first: 24 extents of 12 slots, or of 3 large ones."""
EVERY = make_keys(600)


def open_class(
    path: Path, slot_bytes: int = SMALL, capacity: int = CAPACITY, **more: object
) -> SlabStore:
    """Open a slab for blocks of that size."""
    return SlabStore(
        path=str(path), capacity_bytes=capacity, block_bytes=slot_bytes, **more
    )


def change(path: str, capacity: int) -> None:
    """Open a slab with another capacity, and leave it."""
    open_class(Path(path), SMALL, capacity).close()


def owned(store: SlabStore, slot_bytes: int) -> list[int]:
    """Return the extents of a class."""
    return np.flatnonzero(store._slab.arena.owners == slot_bytes).tolist()


def stored(store: SlabStore, keys: Sequence[PackedKey] = EVERY) -> list[PackedKey]:
    """Return which keys are found, once each was read and is right."""
    there = store.contains(keys)
    found = [key for key, is_there in zip(keys, there, strict=True) if is_there]
    assert [payload(key) for key in found] == load(store, found)
    return found


def check(*stores: SlabStore) -> None:
    """Check that no two classes use one extent and that each index is in order."""
    for store in stores:
        assert [] == store.audit()
        geometry, index = store._slab.geometry, store._slab.index
        there = np.flatnonzero(index.state != SlotState.ABSENT)
        extents = set((there // geometry.slots_per_extent).tolist())
        assert extents <= set(owned(store, geometry.slot_bytes))


@pytest.fixture
def asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a class that was given nothing ask again at once."""
    monkeypatch.setattr(arena_module, "_ASK_EVERY_S", 0.0)


class TestSeveral:
    def test_two_models_are_served_within_one_capacity(self, memory_path):
        """R-31: each finds its own blocks, now and after both were away; together they
        take no byte more than one would."""
        keys, others = make_keys(60), make_keys(20, first=100)
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            assert (288, 72) == (
                one.stats().capacity_blocks,
                two.stats().capacity_blocks,
            )
            assert (SMALL, LARGE) == (
                one.capabilities.max_block_bytes,
                two.capabilities.max_block_bytes,
            )
            assert (60, 20) == (save(one, keys), save(two, others))
            assert (keys, others) == (stored(one), stored(two))
            check(one, two)
        assert CAPACITY == (memory_path / "data").stat().st_size
        with open_class(memory_path, LARGE) as two, open_class(memory_path) as one:
            assert (keys, others) == (stored(one), stored(two))
            check(one, two)

    def test_scheduler_looks_into_the_class_of_its_blocks(self, memory_path):
        """R-31: whichever capacity it was told, and although another class is there."""
        with (
            open_class(memory_path) as one,
            open_class(memory_path, LARGE) as two,
            open_class(memory_path, LARGE, 1 << 30, index_only=True) as looker,
        ):
            save(one, make_keys(3))
            save(two, make_keys(3, first=50))
            assert 0 == looker.match(make_keys(3))
            assert 3 == looker.match(make_keys(3, first=50))
            assert "" == looker.capabilities.caveat

    def test_new_model_gets_its_share_of_a_full_slab(self, memory_path, asks_always):
        """R-31: half of it, from a class that goes on with the other half."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            assert 288 == save(one, EVERY[:288])
            for at in range(300, 400, 4):
                assert 4 == save(two, EVERY[at : at + 4])
                save(one, EVERY[at + 100 : at + 103])
                check(one, two)
            assert (12, 12) == (len(owned(one, SMALL)), len(owned(one, LARGE)))
            assert 36 == len(stored(two))
            assert 144 == len(stored(one))

    def test_model_that_is_gone_gives_way(self, memory_path, asks_always):
        """R-31: extents of a class that nobody uses go, those used first before others,
        and its blocks in the rest stay."""
        with open_class(memory_path) as one:
            for at in range(0, 288, 12):
                save(one, EVERY[at : at + 12])
        with open_class(memory_path, LARGE) as two:
            assert 30 == save(two, EVERY[300:330])
            with open_class(memory_path) as one:
                assert EVERY[120:288] == stored(one)
                check(one, two)

    def test_slot_of_a_killed_writer_is_taken_with_its_extent(
        self, memory_path, asks_always
    ):
        """R-31: what was being written when its process died keeps nothing."""
        one = open_class(memory_path)
        with open_class(memory_path, LARGE) as two:
            one.reserve(EVERY[:288], BLOCK_BYTES)
            die(one)
            assert 72 == save(two, EVERY[300:372])

    def test_extent_that_is_being_written_stays(self, memory_path, asks_always):
        """R-31: nobody gets a slot into which another process may be copying."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            lease = one.reserve(EVERY[:288], BLOCK_BYTES)
            with pytest.raises(StoreFullError):
                two.reserve(EVERY[300:301], BLOCK_BYTES)
            fill(lease)
            assert 288 == lease.commit()
            assert 1 == save(two, EVERY[300:301])
            check(one, two)

    def test_slot_that_is_written_keeps_its_own_extent_alone(
        self, memory_path, asks_always
    ):
        """R-31: where that one was used least recently another goes; a save that is stuck
        has its slots for as long as its process lives."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            lease = one.reserve(EVERY[:1], BLOCK_BYTES)
            assert 24 == len(owned(one, SMALL))
            assert 36 == save(two, EVERY[300:336])
            assert (12, 12) == (len(owned(one, SMALL)), len(owned(two, LARGE)))
            fill(lease)
            assert 1 == lease.commit()
            check(one, two)

    def test_process_that_stands_in_its_index_costs_others_no_save(
        self, memory_path, asks_always
    ):
        """R-31: one that is stopped there keeps its extents, and who wants one evicts its
        own blocks instead."""
        with (
            open_class(memory_path) as one,
            open_class(memory_path, LARGE, lock_timeout=0.01) as two,
        ):
            save(one, EVERY[:288])
            assert 3 == save(two, EVERY[300:303])
            with one._slab.index.locked():
                assert 3 == save(two, EVERY[303:306])
            assert 6 == save(two, EVERY[306:312])
            assert EVERY[303:312] == stored(two)
            check(one, two)

    def test_process_that_stands_in_its_index_keeps_its_own_extents_alone(
        self, memory_path, asks_always
    ):
        """R-31: who has none yet takes those of a third one, though they were used later."""
        with (
            open_class(memory_path) as one,
            open_class(memory_path, 2 * SMALL) as two,
            open_class(memory_path, LARGE, lock_timeout=0.01) as three,
        ):
            assert (288, 72) == (save(one, EVERY[:288]), save(two, EVERY[300:372]))
            with one._slab.index.locked():
                assert 3 == save(three, EVERY[400:403])
            assert 144 == len(stored(one))
            check(one, two, three)

    def test_reader_of_an_extent_that_is_taken_fails_its_recheck(
        self, memory_path, asks_always
    ):
        """R-31: what was copied out of a slot that is another class's by now is not
        believed."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            for at in range(0, 288, 12):
                save(one, EVERY[at : at + 12])
            with one.read(EVERY[:12]) as lease:
                lease.verify(0, 12)
                save(two, EVERY[300:303])
                with pytest.raises(BlockNotFoundError):
                    lease.recheck()
            assert EVERY[12:288] == stored(one)

    def test_blocks_that_are_kept_longer_keep_their_extent(
        self, memory_path, asks_always
    ):
        """R-31: age is by uses, also by those that are still to come."""
        with open_class(memory_path) as one:
            for at in range(0, 288, 12):
                save(one, EVERY[at : at + 12])
            later = np.full(12, 2**60)
            one.touch(EVERY[:12], Uses(later, np.zeros(12, np.uint32)))
        with open_class(memory_path, LARGE) as two, open_class(memory_path) as one:
            save(two, EVERY[300:303])
            assert EVERY[:12] + EVERY[24:288] == stored(one)

    def test_claim_of_the_dead_is_used_by_the_next_who_needs_it(self, memory_path):
        """R-31: an extent whose owner died before it used a slot is no loss, also while
        others live."""
        with open_class(memory_path) as store, open_class(memory_path) as other:
            store._slab.arena.owners[:] = SMALL
            assert 288 == save(other, EVERY[:288])
            assert EVERY[:288] == stored(store)

    def test_index_of_a_class_without_blocks_goes(self, memory_path):
        """Layouts that were tried once do not keep memory for ever."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            save(one, EVERY[:12])
            save(two, EVERY[:1])
            two.forget(EVERY[:1])
        with open_class(memory_path) as one:
            assert 1 == len(list(memory_path.glob("index-*")))
            assert 276 == save(one, EVERY[12:288])
            assert EVERY[:288] == stored(one)
            check(one)

    def test_block_for_which_no_extent_is_large_enough_is_refused(self, memory_path):
        """R-31: while others use the slab it is not cut anew; both sizes are told."""
        with open_class(memory_path) as store:
            save(store, EVERY[:5])
            with pytest.raises(ConfigError, match=r"extents have 49152 .* 53248"):
                open_class(memory_path, 50_000)
            assert EVERY[:5] == stored(store)


class TestTable:
    def test_what_the_table_says_follows_from_the_indexes(self, memory_path):
        """R-31: a table that was lost is written anew by the first user."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            save(one, EVERY[:40])
            save(two, EVERY[40:50])
            before = one._slab.arena.owners.copy()
        text = (memory_path / "arena").read_bytes()
        (memory_path / "arena").write_bytes(bytes(len(text)))
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            assert before.tolist() == one._slab.arena.owners.tolist()
            assert one._slab.arena.populated.all()
            assert (EVERY[:40], EVERY[40:50]) == (stored(one), stored(two))

    def test_index_from_a_copy_gets_no_extent_of_others(self, memory_path):
        """R-31: what it says of memory that has gone to another class is dropped."""
        with open_class(memory_path) as one:
            save(one, EVERY[:288])
        index = memory_path / "index-4096.0"
        copy = index.read_bytes()
        with open_class(memory_path, LARGE) as two:
            assert 72 == save(two, EVERY[300:372])
            index.write_bytes(copy)
            with open_class(memory_path) as one:
                assert [] == stored(one)
                check(one, two)
            assert EVERY[300:372] == stored(two)

    def test_memory_that_a_copy_has_lost_is_populated_again(self, memory_path):
        """R-31: holes are seen by whoever comes first; no store meets one."""
        with open_class(memory_path) as store:
            save(store, EVERY[:288])
        data = memory_path / "data"
        os.truncate(data, 5 * 49_152)
        os.truncate(data, CAPACITY)
        (memory_path / "index-4096.0").unlink()
        with open_class(memory_path, index_only=True) as looker:
            populated = looker._slab.arena.populated
            assert [True] * 5 + [False] * 19 == populated.tolist()
            assert [NOBODY] * 24 == looker._slab.arena.owners.tolist()


class TestCapacity:
    def test_larger_one_keeps_every_block(self, memory_path):
        """R-31: growing by opening it costs nothing of what is stored."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            save(one, EVERY[:100])
            save(two, EVERY[100:130])
        with open_class(memory_path, LARGE, 2 * CAPACITY + 5) as two:
            assert EVERY[100:130] == stored(two)
            assert 144 == two.stats().capacity_blocks
            with open_class(memory_path, SMALL, 2 * CAPACITY) as one:
                assert EVERY[:100] == stored(one)
                assert 350 == save(one, EVERY[200:550])
                assert EVERY[:100] + EVERY[200:550] == stored(one)
                check(one, two)
        assert 2 * CAPACITY == (memory_path / "data").stat().st_size

    def test_smaller_one_keeps_what_was_used_last(self, memory_path):
        """R-31: whole extents go, those used first, whosever they are."""
        with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
            save(one, EVERY[:96])
            for at in range(100, 112, 3):
                save(two, EVERY[at : at + 3])
            save(one, EVERY[112:124])
            one.touch(EVERY[:12])
            two.touch(EVERY[103:106])
        with open_class(memory_path, SMALL, 5 * 49_152) as one:
            assert EVERY[:12] + EVERY[112:124] == stored(one)
            with open_class(memory_path, LARGE, 5 * 49_152) as two:
                assert EVERY[103:112] == stored(two)
                check(one, two)
            assert 60 == one.stats().capacity_blocks
        assert 5 * 49_152 == (memory_path / "data").stat().st_size

    def test_slab_in_use_is_joined_as_it_is(self, memory_path):
        """R-31: who asks for another capacity is told what there is and what to do."""
        with open_class(memory_path) as one:
            save(one, EVERY[:5])
            with open_class(memory_path, SMALL, 2 * CAPACITY) as two:
                assert EVERY[:5] == stored(two)
                assert 288 == two.stats().capacity_blocks
                assert f"{CAPACITY} bytes" in two.capabilities.caveat
                assert "stop all its users" in two.capabilities.caveat
            assert "" == one.capabilities.caveat

    def test_scheduler_changes_nothing(self, memory_path):
        """R-31: who only looks asks for no capacity."""
        with open_class(memory_path) as one:
            save(one, EVERY[:5])
        with open_class(memory_path, SMALL, 8192, index_only=True) as looker:
            assert 5 == looker.match(EVERY[:5])
            assert 288 == looker.stats().capacity_blocks

    def test_blocks_too_large_for_its_extents_cut_an_unused_slab_anew(
        self, memory_path
    ):
        """R-31: nothing that it holds would be of the new size, and a start is not
        refused for that."""
        with open_class(memory_path) as one:
            save(one, EVERY[:5])
        with open_class(memory_path, 100_000) as store:
            assert 102_400 == store.capabilities.max_block_bytes
            assert [] == stored(store)
            assert 11 == save(store, EVERY[:11])
            check(store)

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("factor", [1, 4], ids=["smaller", "larger"])
    def test_death_while_it_changes_leaves_a_slab(self, killer, memory_path, factor):
        """R-31: wherever whoever changes it is killed, the next opener finds blocks of
        both sizes, each of them right, and all of them where none had to go."""
        line = 0
        died = True
        wanted = factor * CAPACITY // 2
        while died:  # the crash benchmark takes every line
            with open_class(memory_path) as one, open_class(memory_path, LARGE) as two:
                save(two, EVERY[200:203])
                for at in range(0, 180, 12):
                    save(one, EVERY[at : at + 12])
                save(two, EVERY[203:212])

            line += 23
            died = killer.killed_at(line, change, str(memory_path), wanted)
            next_wanted = wanted if line % 2 else CAPACITY
            with (
                open_class(memory_path, SMALL, next_wanted) as one,
                open_class(memory_path, LARGE, next_wanted) as two,
            ):
                check(one, two)
                small, large = stored(one), stored(two)
                assert EVERY[180 - len(small) : 180] == small
                assert EVERY[212 - len(large) : 212] == large
                least = (180, 12) if factor == 4 else (108, 9)
                assert least <= (len(small), len(large))
            names = {path.name for path in memory_path.iterdir()}
            assert 6 == len(names)
            for path in memory_path.iterdir():
                path.unlink()
        assert line > 100
