# SPDX-License-Identifier: Apache-2.0
"""The index of a slab by itself: how much it looks at, and what a repair leaves."""

import contextlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stores.index_kit import OWNER
from tests.stores.slab_kit import SLOT_BYTES, open_slab
from tests.stores.test_slab_crash import run_until
from ucm.blocks import PackedKey
from ucm.config import StoreConfig
from ucm.errors import KeyFormatError, StoreFullError, StoreUnavailableError
from ucm.stores.slab import SlabStore, _index, _oldest, _reserving
from ucm.stores.slab._audit import audit
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import (
    COMMITTED,
    FREE,
    GROUP,
    MOST,
    NEVER,
    SlotState,
    Word,
)
from ucm.stores.slab._oldest import Oldest
from ucm.stores.slab._tenants import places_of
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    payload,
    save,
    uses_at,
)
from ucm.uses import Uses

pytestmark = pytest.mark.usefixtures("by_python")


class Counted(np.ndarray):
    """An array that adds up how many of its elements are taken out."""

    taken = 0

    def __getitem__(self, at):
        """Count and take."""
        found = super().__getitem__(at)
        Counted.taken += np.size(found)
        return found


class TestBounds:
    """R-28: what is done under the lock does not grow with the slab."""

    def test_change_touches_no_more_slots_than_a_death_may_leave(
        self, make_index, monkeypatch
    ):
        """R-28: whatever a verb is asked, it goes in changes of a bounded size, and the
        lock is free between them."""
        made = make_index(3 * MOST)
        index, sizes, holds = made.index, [], []
        begin, held = index.begin, index._lock.held

        def count(slots, *more):
            sizes.append(len(slots))
            begin(slots, *more)

        def hold():
            holds.append(len(sizes))
            return held()

        monkeypatch.setattr(index, "begin", count)
        monkeypatch.setattr(index._lock, "held", hold)
        keys = make_keys(3 * MOST)
        for start in range(0, len(keys), MOST):
            assert MOST == made.save(keys[start:])
        assert 2 * MOST == index.forget(index.batch(keys[: 2 * MOST]))
        assert 2 * MOST == made.save(keys[:MOST]) + made.save(keys[MOST:][:MOST])
        assert index.withdraw(np.arange(3 * MOST))
        index.admit(np.arange(3 * MOST))
        made.save(keys[:100])
        assert 100 == index.clear(b"")
        assert MOST == max(sizes)
        assert MOST // 1024 + 1 < len(holds)
        assert all(after - before <= 1 for before, after in itertools.pairwise(holds))
        assert [] == audit(index)

    def test_of_too_many_keys_those_used_last_are_granted(self, make_index):
        """A lease is one publication and so has a bound, like every change."""
        made = make_index(2 * MOST)
        keys = make_keys(MOST + 10)
        made.save(keys, uses_at(range(len(keys))))
        assert [False] * 10 + [True] * MOST == made.has(keys)

    def test_slots_are_granted_in_the_order_of_the_keys(self, tmp_path):
        """Whichever was used last has its slot first, and each its place in the lease."""
        with open_slab(tmp_path, 8) as store:
            keys, uses = make_keys(3), uses_at([20, 60, 40])
            with store.reserve(keys, BLOCK_BYTES, uses) as lease:
                assert (0, 1, 2) == lease.positions
                assert keys == list(lease.keys)

    def test_victim_is_found_without_looking_at_all(self, make_index):
        """R-28: of 65536 stamps a few groups are looked at for each of the oldest."""
        made = make_index(256 * GROUP)
        index, oldest = made.index, made.index.oldest
        index.state[:] = COMMITTED
        index.stamps[:] = np.random.default_rng(1).permutation(len(index.stamps))
        index.rebuild(0)
        in_order = np.argsort(index.stamps)
        oldest._groups = oldest._groups.view(Counted)
        Counted.taken = 0
        slots, _, is_done = oldest.pick(4, NEVER)
        assert (in_order[:4].tolist(), True) == (slots.tolist(), is_done)
        assert Counted.taken <= 32 * GROUP

    def test_bounds_out_of_date_are_put_right_in_pieces(self, make_index, monkeypatch):
        """R-28: where every stamp has grown the lock is given back between pieces, and
        the oldest goes all the same."""
        made = make_index(64 * GROUP)
        index, keys = made.index, make_keys(64 * GROUP + 1)
        for start in range(0, 64 * GROUP, MOST):
            made.save(keys[start : start + MOST])
        index.touch(np.arange(64 * GROUP), np.arange(64 * GROUP) + index.moment())
        oldest = int(np.argmin(index.stamps))
        monkeypatch.setattr(_oldest, "MOST_LOOKED_AT", 4 * GROUP)
        monkeypatch.setattr(_oldest, "_WIDEST", 4)
        holds = []
        held = index._lock.held
        monkeypatch.setattr(index._lock, "held", lambda: holds.append(1) or held())
        grant = index.reserve(index.batch(keys[-1:]), 1, OWNER)
        assert [oldest] == grant.slots.tolist()
        assert 4 < len(holds)

    def test_last_try_takes_what_is_known(self, make_index, monkeypatch):
        """A reservation ends, also where stamps grow faster than it looks at them."""
        made = make_index(64 * GROUP)
        index, keys = made.index, make_keys(64 * GROUP + 2)
        for start in range(0, 64 * GROUP, MOST):
            made.save(keys[start : start + MOST])
        index.touch(np.arange(64 * GROUP), np.arange(64 * GROUP) + index.moment())
        monkeypatch.setattr(_oldest, "MOST_LOOKED_AT", 1)
        monkeypatch.setattr(_reserving, "_TRIES", 2)
        assert 1 <= made.save(keys[-2:])

    def test_scheduler_waits_for_the_lock_no_longer_than_told(self, tmp_path):
        """R-28: who only asks the index gives up on its lock within 5 ms."""
        config = StoreConfig(path=str(tmp_path / "s"), capacity=5 * SLOT_BYTES)
        with SlabStore.open_configured(
            config, block_bytes=BLOCK_BYTES, index_only=True
        ) as store:
            assert store._slab._class.lock.timeout < 0.005


def snapshot(index: SlotIndex, keys: list[PackedKey]) -> tuple:
    """Return all that an index says, but for the order of its chains."""
    return (
        index.state.tolist(),
        np.where(index.state == COMMITTED, index.stamps, 0).tolist(),
        index.chains.find(index.batch(keys)).tolist(),
        index.tally.counts.tolist(),
        np.flatnonzero(index.shares).tolist(),
        index.shares[np.flatnonzero(index.shares)].tolist(),
        index.header[Word.NUM_FREE : Word.NUM_EVICTED].tolist(),
        int(index.words[Word.GENERATION]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_repair_leaves_what_a_rebuild_leaves(make_index, seed):
    """R-28: after a death anywhere in a random history both agree in everything."""
    chance = random.Random(seed)
    every = make_keys(400)
    made = make_index(300)
    for _ in range(25):
        index = made.index
        keys = chance.sample(every, chance.choice([1, 2, 30, 80]))
        tenants = np.array([chance.choice([0, 0, 5, 6]) for _ in keys], dtype=np.uint32)
        moments = np.array([chance.randrange(1000) for _ in keys], dtype=np.int64)
        uses = chance.choice([None, Uses(moments, tenants)])
        some = np.array(chance.sample(range(300), 20))

        what = chance.random()

        def act(made=made, keys=keys, uses=uses, some=some, what=what):
            if what < 0.7:
                with contextlib.suppress(StoreFullError):
                    made.save(keys, uses)
            elif what < 0.8:
                made.index.forget(made.index.batch(keys))
            elif what < 0.9:
                made.index.withdraw(some)
            else:
                made.index.admit(some)

        run_until(chance.choice([10**9, chance.randrange(1, 200)]), act)
        index._lock.abandon()  # as the kernel does, wherever it was left
        rebuilt = make_index(300, bytes(made.data))
        made = make_index(300, bytes(made.data))
        made.index.seed = rebuilt.index.seed = index.seed
        rebuilt.index.rebuild(7)
        with made.index.locked():
            made.index.reclaim([OWNER])
        with rebuilt.index.locked():
            rebuilt.index.reclaim([OWNER])
        stamped = made.index.stamps != rebuilt.index.stamps
        made.index.stamps[stamped] = rebuilt.index.stamps[stamped] = NEVER - 1
        made.index.stamps[made.index.state != COMMITTED] = NEVER
        rebuilt.index.stamps[rebuilt.index.state != COMMITTED] = NEVER
        assert snapshot(rebuilt.index, every) == snapshot(made.index, every)
        assert [] == audit(made.index)
        assert [] == audit(rebuilt.index)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_oldest_are_what_sorting_all_finds(data):
    """Whatever happened to stamps and bounds, the oldest are found, in their order."""
    num_groups = data.draw(st.sampled_from([1, 3, 300]))
    chance = random.Random(data.draw(st.integers(0, 1000)))
    states = np.full(num_groups * GROUP, COMMITTED, dtype=np.uint8)
    stamps = np.array(chance.sample(range(10**6), len(states)), dtype=np.int64)
    bounds = np.zeros(-(-num_groups // GROUP) * GROUP, dtype=np.int64)
    uppers = np.zeros(-(-num_groups // GROUP), dtype=np.int64)
    oldest = Oldest(states, stamps, bounds, uppers)
    oldest.rebuild()
    for _ in range(data.draw(st.integers(1, 12))):
        slots = np.array(chance.sample(range(len(states)), 40))
        what = data.draw(st.sampled_from(["touch", "publish", "free", "late touch"]))
        if what == "touch":
            stamps[slots] += 10**6
        elif what == "publish":
            fresh = np.array(chance.sample(range(10**6), 40)) - 10**6 * chance.random()
            oldest.lower(slots, fresh.astype(np.int64))
            states[slots], stamps[slots] = COMMITTED, fresh
        else:
            states[slots] = FREE
            stamps[slots] = NEVER if what == "free" else stamps[slots]
        there = np.flatnonzero((states == COMMITTED) & (stamps != NEVER))
        expected = there[np.argsort(stamps[there])]
        count = data.draw(st.sampled_from([1, 5, 300]))
        before = int(stamps[expected[len(expected) // 2]])
        found, stamped, is_done = oldest.pick(count, before)
        half = expected[: len(expected) // 2][:count]
        assert is_done
        assert stamps[half].tolist() == stamped.tolist()
        if len(set(stamped.tolist())) == len(stamped):
            assert half.tolist() == found.tolist()


class TestTenants:
    def test_places_are_never_nobodys(self):
        """Whatever number a tenant has, it is counted; only nobody is not."""
        tenants = np.array([0, 1, 65534, 65535, 65536, 2**32 - 1], dtype=np.uint32)
        places = places_of(tenants)
        assert 0 == places[0]
        assert (places[1:] > 0).all()
        assert len(set(places[:4].tolist())) == 4

    def test_tenants_of_one_place_share_a_share(self, tmp_path):
        """More tenants than places: two that meet have one share together."""
        keys = make_keys(3)
        with open_slab(tmp_path / "s", tenant_share=0.25) as store:
            save(store, keys[:2], uses=uses_at([1, 2], tenant=1))
            save(store, keys[2:], uses=uses_at([3], tenant=1 + 65535))
            assert [False, True, True] == store.contains(keys)

    def test_list_of_its_own_is_ended_by_an_older_block(self, tmp_path):
        """A tenant's oldest goes, also if it was published after its list was made."""
        keys = make_keys(7)
        with open_slab(tmp_path / "s", tenant_share=0.5) as store:
            save(store, keys[:4], uses=uses_at([10, 20, 30, 40], tenant=1))
            save(store, keys[4:5], uses=uses_at([50], tenant=1))  # lists them
            store.forget(keys[1:2])
            save(store, keys[5:6], uses=uses_at([5], tenant=1))
            save(store, keys[6:], uses=uses_at([60], tenant=1))
            expected = [False, False, True, True, True, False, True]
            assert expected == store.contains(keys)
            assert [] == store.audit()


class TestWithdrawal:
    def test_withdrawn_slots_are_used_no_more(self, make_index):
        """What is absent is not granted; once admitted it is."""
        made = make_index(10)
        keys = make_keys(12)
        made.save(keys[:6])
        assert made.index.withdraw(np.arange(3, 8))
        assert [True] * 3 + [False] * 3 == made.has(keys[:6])
        assert 5 == made.save(keys[6:11])
        assert made.index.withdraw(np.arange(3, 8))
        made.index.admit(np.arange(5, 8))
        assert 8 == np.count_nonzero(made.index.state != SlotState.ABSENT)
        assert [] == audit(made.index)

    def test_slot_being_written_is_not_withdrawn(self, make_index, monkeypatch):
        """One that is reserved keeps all where they are, also if others went first."""
        monkeypatch.setattr(_index, "MOST", 4)
        made = make_index(10)
        index, keys = made.index, make_keys(10)
        grant = index.reserve(index.batch(keys[:1]), 1, OWNER)
        assert not index.withdraw(np.arange(10))
        assert 10 == np.count_nonzero(index.state != SlotState.ABSENT)
        index.discard(grant, OWNER)
        withdraw = index._withdraw

        def reserve_meanwhile(slots, **how):
            if 4 in slots:
                index.reserve(index.batch(keys[1:3]), 1, OWNER)
            return withdraw(slots, **how)

        monkeypatch.setattr(index, "_withdraw", reserve_meanwhile)
        assert not index.withdraw(np.arange(10))
        assert 10 == np.count_nonzero(index.state != SlotState.ABSENT)
        assert 2 == index.words[Word.NUM_RESERVED]
        assert [] == audit(index)

    def test_slot_with_a_block_is_not_withdrawn_where_none_is_to_go(self, make_index):
        """R-31: who gives back what is not needed takes no block along."""
        index = make_index(10).index
        keys = make_keys(1)
        grant = index.reserve(index.batch(keys), 1, OWNER)
        index.publish(grant, np.zeros(1, np.uint64), OWNER)
        assert not index.withdraw(np.arange(10), evicts=False)
        assert 10 == np.count_nonzero(index.state != SlotState.ABSENT)
        assert index.look_up(index.batch(keys)).committed.all()
        assert index.withdraw(np.arange(10))

    def test_withdrawal_that_ends_half_way_shows_at_the_last_slot(
        self, make_index, monkeypatch
    ):
        """R-31: by it whoever comes next knows that slots are to be admitted again."""
        monkeypatch.setattr(_index, "MOST", 4)
        index = make_index(12).index
        withdraw, calls = index._withdraw, itertools.count()

        def time_out(slots, **how):
            if next(calls) == 2:
                raise StoreUnavailableError("held by another process")
            return withdraw(slots, **how)

        monkeypatch.setattr(index, "_withdraw", time_out)
        with pytest.raises(StoreUnavailableError):
            index.withdraw(np.arange(12))
        assert 4 == np.count_nonzero(index.state == FREE)
        assert SlotState.ABSENT == index.state[-1]


class TestSlots:
    def test_many_keys_of_many_lengths_are_told_apart(self, tmp_path):
        """Long chains, mixed key lengths and zero bytes find the right slot."""
        keys = [PackedKey(bytes(n)) for n in range(1, 86)]
        keys += make_keys(415)
        with open_slab(tmp_path / "s", 500) as store:
            assert save(store, keys) == 500
            assert [payload(key) for key in keys] == load(store, keys)
            assert store.forget(keys[::2]) == 250
            assert store.contains(keys) == [False, True] * 250
            assert store.clear(b"\0" * 80) == 3
            assert store.clear(b"\0" * 88) == 0
            assert store.audit() == []
            with pytest.raises(KeyFormatError):
                store.match([PackedKey(bytes(86))])

    def test_slots_of_a_lease_are_neighbours(self, tmp_path):
        """A span's slots lie side by side, in a new slab and when it is full."""
        with open_slab(tmp_path / "s", 64) as store:
            for start in range(0, 192, 16):
                with store.reserve(make_keys(16, first=start), BLOCK_BYTES) as lease:
                    first = int(lease.slots.slots[0])
                    assert list(range(first, first + 16)) == lease.slots.slots.tolist()
                    fill(lease)
                    lease.commit()
