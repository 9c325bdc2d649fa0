# SPDX-License-Identifier: Apache-2.0
"""
What every store that keeps blocks must pass about room: what goes, and for whom.

A part of ``StoreContract``, which authors derive from.
"""

import time
from pathlib import Path

import pytest

from ucm.errors import StoreFullError
from ucm.stores.abc import Store
from ucm.testing.lease_contract import NUM_BLOCKS, LeaseContract
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    payload,
    save,
    uses_at,
)

__all__ = ["RoomContract"]

_HOUR_NS = 3600 * 10**9


class RoomContract(LeaseContract):
    """What a store does when it is full; 8 blocks of 96 bytes."""

    def make_tenant_store(
        self, directory: Path, num_blocks: int, share: float
    ) -> Store | None:
        """Return a store that bounds its tenants; None if it cannot."""
        return None

    def test_least_recently_used_block_is_evicted(self, store: Store) -> None:
        """Over capacity the block goes that was not saved or touched (S2-05)."""
        keys = make_keys(NUM_BLOCKS)
        for key in keys:
            save(store, [key])
        store.touch(keys[:2])
        load(store, keys[2:3])
        store.touch(make_keys(1, first=100))
        save(store, make_keys(2, first=20))
        assert store.contains(keys) == [True, True, False, False] + [True] * 4
        stats = store.stats()
        assert (stats.evicted_blocks_total, stats.committed_blocks) == (2, 8)

    def test_end_of_a_prefix_goes_before_its_start(self, store: Store) -> None:
        """Of blocks used in one call the later are evicted first."""
        keys = make_keys(NUM_BLOCKS)
        save(store, keys)
        save(store, make_keys(3, first=20))
        assert store.match(keys) == NUM_BLOCKS - 3

    def test_slot_being_written_is_never_evicted(self, store: Store) -> None:
        """Room is made from committed blocks only (S2-05); none left means full."""
        first, second = make_keys(5), make_keys(5, first=20)
        with store.reserve(first, BLOCK_BYTES) as lease:
            with store.reserve(second, BLOCK_BYTES) as short:
                assert (short.keys, short.num_stored) == (tuple(second[:3]), 0)
                assert store.stats().reserved_blocks == NUM_BLOCKS
                with pytest.raises(StoreFullError):
                    store.reserve(make_keys(1, first=40), BLOCK_BYTES)
                fill(short)
                short.commit()
            save(store, make_keys(3, first=60))
            assert store.contains(second) == [False] * 5
            fill(lease)
            assert lease.commit() == 5
        assert [payload(key) for key in first] == load(store, first)

    def test_deeper_blocks_of_prefixes_go_first(self, store: Store) -> None:
        """R-29: of each prefix the end goes, in all its parts, whoever saved it when."""
        old, parts = make_keys(4), make_keys(4, first=10)
        save(store, old, uses=uses_at([100, 84, 68, 52]))
        save(store, parts[::2], uses=uses_at([100, 84]))  # one rank's, then another's
        save(store, parts[1::2], uses=uses_at([100, 84]))
        save(store, make_keys(1, first=20), uses=uses_at([200]))
        assert store.match(old) == 3
        save(store, make_keys(1, first=21), uses=uses_at([184]))
        assert store.match(old) == 2
        save(store, make_keys(3, first=22), uses=uses_at([168, 152, 136]))
        assert store.match(old) == 1
        assert store.contains(parts) == [True, True, False, False]

    def test_prompt_that_does_not_fit_keeps_its_head(self, store: Store) -> None:
        """R-29: a prompt larger than the store matches up to its size, however often."""
        keys = make_keys(NUM_BLOCKS + 4)
        for life in range(3):
            for start in range(0, len(keys), 2):
                depths = range(start, start + 2)
                uses = uses_at([1000 * life - depth for depth in depths])
                store.touch(keys, uses_at([1000 * life - i for i in range(len(keys))]))
                try:
                    save(store, keys[start : start + 2], uses=uses)
                except StoreFullError:
                    assert start >= NUM_BLOCKS
            assert store.match(keys) == NUM_BLOCKS

    def test_no_block_goes_for_one_that_was_used_before_it(self, store: Store) -> None:
        """
        Whoever comes with old blocks gets the room of older ones only (R-29).

        It goes to those of them that were used last.
        """
        save(store, make_keys(5), uses=uses_at([500] * 5))
        save(store, make_keys(3, first=5), uses=uses_at([55, 49, 30]))
        keys = make_keys(4, first=10)
        with store.reserve(keys, BLOCK_BYTES, uses_at([20, 60, 40, 50])) as lease:
            assert lease.positions == (1, 3)
            assert lease.num_stored == 0
            fill(lease)
            lease.commit()
        with pytest.raises(StoreFullError):
            store.reserve(keys[:1], BLOCK_BYTES, uses_at([50]))
        assert store.contains(keys) == [False, True, False, True]
        assert store.match(make_keys(8)) == 6

    def test_nothing_goes_for_what_is_asked_for_with_it(self, store: Store) -> None:
        """R-29: blocks that a reservation finds stored are not evicted for the others."""
        keys = make_keys(2, first=10)
        save(store, keys[:1], uses=uses_at([1]))
        save(store, make_keys(NUM_BLOCKS - 1), uses=uses_at([2] * (NUM_BLOCKS - 1)))
        with store.reserve(keys, BLOCK_BYTES, uses_at([100, 99])) as lease:
            assert (lease.positions, lease.num_stored) == ((1,), 1)
            fill(lease)
            lease.commit()
        assert store.match(keys) == 2

    def test_touch_never_makes_a_block_older(self, store: Store) -> None:
        """A use of long ago that is told late does not count."""
        keys = make_keys(NUM_BLOCKS)
        save(store, keys, uses=uses_at(range(100, 100 + NUM_BLOCKS)))
        store.touch(keys[2:3], uses_at([1]))
        store.touch(keys[:1], uses_at([200]))
        save(store, make_keys(1, first=20), uses=uses_at([300]))
        assert store.contains(keys) == [True, False] + [True] * 6

    def test_retained_blocks_stay_within_the_budget(self, store: Store) -> None:
        """
        Blocks that count as used later than now outlive others, in a quarter of all slots.

        What is beyond counts as used now, its end first.
        """
        keys = make_keys(NUM_BLOCKS)
        later = time.monotonic_ns() + _HOUR_NS
        before = store.stats().curbed_blocks_total
        save(store, keys[:6], uses=uses_at([later - i for i in range(6)]))
        save(store, keys[6:])
        assert store.stats().curbed_blocks_total - before == 4
        store.touch(keys[:2], uses_at([later + _HOUR_NS] * 2))
        assert store.stats().curbed_blocks_total - before == 4
        save(store, make_keys(6, first=20))
        assert store.contains(keys) == [True] * 2 + [False] * 6
        store.touch(make_keys(1, first=20), uses_at([later]))
        assert store.stats().curbed_blocks_total - before == 5

    def test_tenant_makes_room_among_its_own(self, tmp_path: Path) -> None:
        """A tenant that has its share evicts its own oldest, and nobody else's."""
        store = self.make_tenant_store(tmp_path / "store", NUM_BLOCKS, 0.25)
        if store is None:
            pytest.skip("this store has no tenants")
        with store:
            theirs, mine = make_keys(4), make_keys(4, first=10)
            save(store, theirs[:2], uses=uses_at([10, 9], tenant=1))
            save(store, theirs[2:], uses=uses_at([8, 7]))
            save(store, mine[:2], uses=uses_at([100, 99], tenant=2))
            save(store, mine[2:3], uses=uses_at([101], tenant=2))
            assert store.contains(mine) == [True, False, True, False]
            with pytest.raises(StoreFullError):
                store.reserve(mine[3:], BLOCK_BYTES, uses_at([100], tenant=2))
            assert store.stats().over_share_blocks_total == 1
            with store.reserve(mine[1:], BLOCK_BYTES, uses_at([200] * 3, 2)) as lease:
                assert (lease.positions, lease.num_stored) == ((0,), 1)
            assert store.contains(theirs) == [True] * 4
            assert store.contains(mine) == [False, False, True, False]
            assert self.audit(store) == []
