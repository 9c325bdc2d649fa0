# SPDX-License-Identifier: Apache-2.0
"""Reservations of a slab that are granted piece by piece, or among a tenant's own blocks."""

import contextlib

import numpy as np
import pytest

from tests.stores.index_kit import OWNER, Index
from tests.stores.slab_kit import open_slab
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import _reserving, _tenants
from ucm.stores.slab._audit import audit
from ucm.stores.slab._layout import Limits
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save, uses_at
from ucm.uses import Uses

pytestmark = pytest.mark.usefixtures("by_python")

PIECE = 4


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return an index of 24 slots, with pieces of four keys."""
    monkeypatch.setattr(_reserving, "_PIECE", PIECE)
    made = Index(tmp_path / "lock", 24)
    yield made
    made.index._lock.close()


class TestPieces:
    def test_keys_are_looked_up_once_and_again_in_their_piece(self, made, monkeypatch):
        """All are looked up at first, and then only those that are about to be granted:
        how much is looked at under the lock does not grow with the square of them."""
        find, asked = made.index.chains.find, []

        class Asked:
            """Chains that remember how many keys they were asked for."""

            find = staticmethod(lambda batch: asked.append(len(batch)) or find(batch))

            def __getattr__(self, name):
                return getattr(chains, name)

        chains = made.index.chains
        monkeypatch.setattr(made.index, "chains", Asked())
        assert 3 * PIECE == made.save(make_keys(3 * PIECE))
        assert [3 * PIECE, PIECE, PIECE] == asked

    def test_key_that_another_saves_meanwhile_is_left_to_it(self, made, monkeypatch):
        """Between two pieces others come: what they have saved by then is neither saved
        again nor evicted for the rest."""
        index, held, keys = made.index, made.index._lock.held, make_keys(24)
        assert 16 == made.save(make_keys(16, first=50))
        holds = []

        @contextlib.contextmanager
        def hold():
            holds.append(1)
            if len(holds) == 2:
                assert 1 == made.save(keys[5:6], uses_at([1]))  # the oldest of all
            with held():
                yield

        monkeypatch.setattr(index._lock, "held", hold)
        grant = index.reserve(index.batch(keys[:12]), 1, OWNER)
        index.publish(grant, np.zeros(len(grant.slots), dtype=np.uint64), OWNER)
        assert [at for at in range(12) if at != 5] == grant.positions.tolist()
        assert [True] * 12 == made.has(keys[:12])
        assert [] == audit(index)


class Alike:
    """A slab, and the store in memory whose answers it is to give."""

    def __init__(self, path, num_slots: int, share: int) -> None:
        self.slab = open_slab(path, num_slots, tenant_share=share / num_slots)
        self._memory = MemoryStore(
            num_slots, BLOCK_BYTES, tenant_share=share / num_slots
        )

    def save(self, keys, uses) -> int:
        """Store blocks in both; return of how many both have found room for."""
        in_slab, in_memory = self._both(lambda store: save(store, keys, uses=uses))
        assert in_memory == in_slab
        return in_slab

    def has(self, keys) -> list[bool]:
        """Return which keys both have, and neither alone."""
        in_slab, in_memory = self._both(lambda store: store.contains(keys))
        assert in_memory == in_slab
        return in_slab

    def _both(self, ask):
        return ask(self.slab), ask(self._memory)


@pytest.fixture
def alike(tmp_path):
    """Make both, with so many slots, of which a tenant may have a share."""
    with contextlib.ExitStack() as end:

        def make(num_slots: int, share: int) -> Alike:
            both = Alike(tmp_path / "slab", num_slots, share)
            end.callback(both.slab.close)
            return both

        yield make


class Guarded(dict):
    """Lists that somebody else uses whenever the lock of the index is free."""

    def __init__(self, lock) -> None:
        super().__init__()
        self._lock, self.num_changed = lock, 0

    def _change(self) -> None:
        assert self._lock._threads.locked()
        self.num_changed += 1

    def __setitem__(self, place, listed):
        self._change()
        super().__setitem__(place, listed)

    def __delitem__(self, place):
        self._change()
        super().__delitem__(place)

    def __ior__(self, lists):
        self._change()
        self.update(lists)
        return self


class TestShares:
    def test_blocks_of_the_same_prompt_do_not_hide_what_goes_for_it(self, alike):
        """A tenant that has its share makes room among all its own, also where those that
        were listed are stored blocks of the prompt that goes on."""
        both = alike(16, 4)
        first, second, third = (make_keys(2, first=at) for at in (0, 2, 4))
        assert 2 == both.save(first, uses_at([12, 11], tenant=1))
        assert 2 == both.save(second, uses_at([22, 21], tenant=1))
        assert 2 == both.save(third, uses_at([32, 31], tenant=1))
        longer = [*second, *make_keys(1, first=6)]
        assert 1 == both.save(longer, uses_at([43, 42, 41], tenant=1))
        assert [True] * 3 + [True, False] == both.has([*longer, *third])
        assert [] == both.slab.audit()

    def test_each_tenant_of_a_batch_makes_room_among_its_own(self, alike, monkeypatch):
        """However few lists are kept, those that one batch needs are there together."""
        monkeypatch.setattr(_tenants, "_MOST_LISTS", 2)
        both, before, after = alike(50, 1), make_keys(5), make_keys(5, first=5)
        tenants = np.arange(1, 6, dtype=np.uint32)
        assert 5 == both.save(before, Uses(np.full(5, 10), tenants))
        assert 5 == both.save(after, Uses(np.full(5, 20), tenants))
        assert [False] * 5 + [True] * 5 == both.has([*before, *after])
        assert 1 == both.save(make_keys(1, first=10), uses_at([30], tenant=1))
        assert 2 >= len(both.slab._slab.index.own._lists)

    def test_prompt_that_is_longer_than_a_list_is_stored_whole(
        self, alike, monkeypatch
    ):
        """A tenant's list has as many as are asked for, in each piece of a batch."""
        monkeypatch.setattr(_reserving, "_PIECE", PIECE)
        monkeypatch.setattr(_tenants, "_LEAST_LISTED", 1)
        both, keys = alike(24, 12), make_keys(24)
        assert 12 == both.save(keys[:12], uses_at(range(12, 0, -1), tenant=1))
        assert 12 == both.save(keys[12:], uses_at(range(32, 20, -1), tenant=1))
        assert [False] * 12 + [True] * 12 == both.has(keys)
        assert [] == both.slab.audit()

    def test_lists_are_changed_within_the_lock_only(self, made):
        """Else threads that save for tenants at once end in errors that nobody expects."""
        index, keys = made.index, make_keys(8)
        index.limits = Limits(0.25, 2 / 24)
        index.own._lists = lists = Guarded(index._lock)
        for at in range(0, 8, 2):
            moments = [10 * at + 12, 10 * at + 11]
            assert 2 == made.save(keys[at : at + 2], uses_at(moments, tenant=1))
        assert lists.num_changed
        assert [False] * 6 + [True] * 2 == made.has(keys)
