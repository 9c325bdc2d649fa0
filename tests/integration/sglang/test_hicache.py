# SPDX-License-Identifier: Apache-2.0
"""R-81: SGLang's storage, asked in the order in which SGLang asks."""

import types

import pytest
import torch

from tests.integration.sglang import fake
from tests.integration.sglang.fake import content_of, hashes
from tests.integration.sglang.kit import Kit
from ucm.errors import ConfigError
from ucm.testing.slab_damage import Damage, damage, stored

LAYOUTS = ("layer_first", "page_first_direct")


def slots(pages: list[int]) -> torch.Tensor:
    """Return the slots of pages, as SGLang gives them."""
    first = torch.tensor(pages).repeat_interleave(fake.TOKENS) * fake.TOKENS
    return first + torch.arange(fake.TOKENS).repeat(len(pages))


def fill(storage: object, names: list[str], pages: list[int]) -> None:
    """Write what belongs to hashes into the host pool."""
    for name, page in zip(names, pages, strict=True):
        rows = content_of(name).unflatten(0, (-1, 2)).transpose(0, 1)
        storage.mem_pool_host.page(page).copy_(rows)


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_pages_are_restored_whatever_the_order_of_the_pool(
    kit: Kit, saved: str, loaded: str
) -> None:
    """R-81: in another process, up to the first that is not stored."""
    names, pages = hashes(5), [9, 2, 3, 5, 1]
    first = kit.storage(saved)
    fill(first, names, pages)
    assert [True] * 5 == first.batch_set_v1(names, slots(pages))
    first.close()
    second = kit.storage(loaded)
    asked, into = [*names, *hashes(1, 4)], [4, 8, 7, 6, 1, 3]
    assert 5 == second.batch_exists(asked)
    assert second.exists(names[0])
    got = second.batch_get_v1(asked, slots(into))
    assert [True] * 5 + [False] == got
    for name, page in zip(names, into[:5], strict=True):
        found = second.mem_pool_host.page(page).transpose(0, 1).flatten(0, 1)
        assert torch.equal(content_of(name), found)
    assert 0 == int(second.mem_pool_host.page(3).count_nonzero())


def test_linker_finds_what_a_storage_has_saved(kit: Kit) -> None:
    """R-81: a host page and a device page are the same bytes."""
    names, pages = hashes(2), [3, 4]
    storage = kit.storage()
    fill(storage, names, pages)
    assert [True] * 2 == storage.batch_set_v1(names, slots(pages))
    storage.close()
    assert 2 == len(kit.engine().load("a", names))


def test_page_that_is_not_as_it_was_saved_is_not_there(kit: Kit) -> None:
    """R-81: nor any behind it; the pool is as it was."""
    names = hashes(3)
    storage = kit.storage()
    fill(storage, names, [1, 2, 3])
    storage.batch_set_v1(names, slots([1, 2, 3]))
    damage(kit.slab, Damage.BITS, stored(kit.slab))
    assert [False] * 3 == storage.batch_get_v1(names, slots([4, 5, 6]))
    assert 0 == int(storage.mem_pool_host.page(4).count_nonzero())


def test_call_that_carries_more_than_is_staged_is_cut(kit: Kit) -> None:
    """R-81: SGLang computes the rest."""
    names, pages = hashes(10), list(range(10))
    storage = kit.storage()
    fill(storage, names, pages)
    assert [True] * 10 == storage.batch_set_v1(names, slots(pages))
    assert 10 == storage.batch_exists(names)
    got = storage.batch_get_v1(names, slots(pages))
    assert [True] * 8 + [False] * 2 == got


def test_storage_without_a_store_answers(kit: Kit) -> None:
    """R-81: before a pool is registered, when it is closed, and in the old interface."""
    names = hashes(2)
    storage = kit.storage()
    storage.close()
    bare = kit.installed().hicache.Storage(
        types.SimpleNamespace(extra_config={"interface_v1": 1}), {}
    )
    bare.close()
    bare.mem_pool_host = storage.mem_pool_host
    for one in (storage, bare):
        assert 0 == one.batch_exists(names)
        assert [False] * 2 == one.batch_get_v1(names, slots([1, 2]))
        assert [False] * 2 == one.batch_set_v1(names, slots([1, 2]))
        assert one.batch_get(names) is None
        assert one.get(names[0]) is None
        assert not one.set(names[0])
        assert not one.batch_set(names)


def test_weights_that_may_have_changed_end_all_reuse(kit: Kit) -> None:
    """R-81: from before they are written on, and for good."""
    names = hashes(2)
    storage = kit.storage()
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))
    fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    assert 0 == storage.batch_exists(names)
    assert [False] * 2 == storage.batch_get_v1(names, slots([1, 2]))
    assert [False] * 2 == storage.batch_set_v1(hashes(2, 3), slots([1, 2]))


def test_storage_that_has_refused_a_model_serves_nothing(kit: Kit) -> None:
    """R-81: SGLang that attaches a storage while it runs keeps it, whatever it has said,
    and a prompt needs its pages of all kinds."""
    names = hashes(2)
    storage = kit.storage()
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))
    with pytest.raises(ConfigError, match="swa"):
        storage.register_mem_host_pool_v2(None, "swa")
    assert 0 == storage.batch_exists(names)
    assert [False] * 2 == storage.batch_get_v1(names, slots([1, 2]))
    assert [False] * 2 == storage.batch_set_v1(hashes(2, 3), slots([1, 2]))


def test_what_is_not_taken_is_refused_by_name(kit: Kit) -> None:
    """R-81: other interfaces, orders of pages, and pools of other kinds."""
    storage = kit.storage()
    with pytest.raises(ConfigError, match="mamba"):
        storage.register_mem_host_pool_v2(None, fake.PoolName.MAMBA)
    with pytest.raises(ConfigError, match="interface_v1"):
        kit.installed().hicache.Storage(types.SimpleNamespace(extra_config={}), {})
    with pytest.raises(ConfigError, match="page_head"):
        storage.register_mem_pool_host(fake.MHATokenToKVPoolHost("page_head"))
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        storage.register_mem_pool_host(types.SimpleNamespace())
