# SPDX-License-Identifier: Apache-2.0
"""Of how many slots a tenant's share is one, and that of what is retained."""

import time
from collections.abc import Sequence

import pytest

from tests.stores.test_slab_arena import EVERY, LARGE, open_class
from ucm.blocks import PackedKey
from ucm.stores.slab import SlabStore
from ucm.stores.slab import _arena as arena_module
from ucm.testing.store_blocks import make_keys, save, uses_at

ENDLESS = 2**62


def save_of(store: SlabStore, keys: Sequence[PackedKey], tenant: int) -> int:
    """Save a prompt of a tenant's as used now; return how many blocks have a slot."""
    now = time.monotonic_ns()
    return save(store, keys, uses=uses_at(range(now, now - len(keys), -1), tenant))


@pytest.fixture
def asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a class that was given nothing ask again at once."""
    monkeypatch.setattr(arena_module, "_ASK_EVERY_S", 0.0)


class TestSeveralSizes:
    def test_tenant_has_its_share_of_what_its_model_can_have(
        self, memory_path, asks_always
    ):
        """R-31: of an equal part of the slab, also before its model has come to that; the
        others of its model get the rest."""
        with (
            open_class(memory_path, tenant_share=0.5) as one,
            open_class(memory_path, LARGE, tenant_share=0.5) as two,
        ):
            assert 288 == save(one, EVERY[:288])
            for key in EVERY[300:336]:
                assert 1 == save_of(two, [key], tenant=1)
            assert 18 == save_of(two, EVERY[400:436], tenant=2)
            assert 18 == sum(two.contains(EVERY[300:336]))
            assert 18 == two.stats().over_share_blocks_total
            assert 72 == save_of(one, EVERY[500:600], tenant=1)
            told = one.stats(), two.stats()
            assert [144, 36] == [each.capacity_blocks for each in told]
            assert [144, 36] == [each.committed_blocks for each in told]

    def test_smallest_share_is_a_slot(self, memory_path):
        """R-31: a tenant whose share is less than a block has one, not none for ever."""
        with open_class(memory_path, LARGE, tenant_share=0.001) as store:
            assert 1 == save_of(store, EVERY[:4], tenant=1)
            assert 1 == save_of(store, EVERY[4:8], tenant=1)
            assert 1 == sum(store.contains(EVERY[:8]))

    def test_size_that_nobody_uses_takes_no_part(self, memory_path, asks_always):
        """R-31: a tenant has its share of all that a model can have which is alone."""
        with open_class(memory_path, LARGE) as gone:
            assert 18 == save(gone, EVERY[:18])
        with open_class(memory_path, tenant_share=0.5) as one:
            assert 144 == save_of(one, EVERY[:200], tenant=1)

    def test_retained_are_no_more_than_a_share_of_what_the_model_can_have(
        self, memory_path, asks_always
    ):
        """R-31: the others of a model that has half of a slab are not kept out for ever."""
        with (
            open_class(memory_path) as one,
            open_class(memory_path, LARGE, retain_share=0.5) as two,
        ):
            assert 288 == save(one, EVERY[:288])
            assert 36 == save(two, EVERY[300:336], uses=uses_at([ENDLESS] * 36))
            assert 18 == two.stats().curbed_blocks_total


def test_slab_without_all_of_its_memory_is_shared_as_it_is(memory_path):
    """R-25: a tenant has no more than its share of the memory that there is."""
    with open_class(memory_path, tenant_share=0.5) as one:
        one._slab.arena.populated[6:] = False
        assert 36 == save_of(one, make_keys(60), tenant=1)
        assert 72 == one.stats().capacity_blocks
