# SPDX-License-Identifier: Apache-2.0
"""R-81: latent attention, and several ranks, as SGLang asks all of them."""

import pytest
import torch

from tests.integration.sglang import fake, pools
from tests.integration.sglang.fake import PoolTransfer, content_of, hashes
from tests.integration.sglang.kit import Kit
from tests.integration.sglang.test_hicache import slots
from tests.integration.sglang.test_linker import page_of
from ucm.testing.slab_damage import stored

NAMES = hashes(3)


def latent_of(name: str) -> torch.Tensor:
    """Return what a page of latent attention holds, ``[layers, tokens, 1, dim]``."""
    shape = (pools.LAYERS, pools.TOKENS, 1, pools.HEADS * pools.DIM)
    return content_of(name)[: pools.LAYERS].reshape(shape)


def ranks_of(kit: Kit, make: type = pools.MHATokenToKVPool) -> list[fake.Engine]:
    """Return two ranks' engines."""
    ranks = [kit.engine(make(), rank=rank, args={"tp_size": 2}) for rank in (0, 1)]
    for engine in ranks:
        assert engine.offload(NAMES, engine.take(3))
    return ranks


def common(ranks: list[fake.Engine], rid: str) -> int:
    """Return the pages that all ranks report, as SGLang does: the longest of all."""
    reported = [set(each.linker.lookup(rid, [PoolTransfer(NAMES)])) for each in ranks]
    return max(set.intersection(*reported), default=0)


def test_latent_pages_are_restored_in_another_process(kit: Kit) -> None:
    """R-81: byte by byte, and each layer when it is asked for and no sooner."""
    first = kit.engine(pools.MLATokenToKVPool())
    assert first.offload(NAMES, first.take(3))
    first.linker.close()
    second = kit.engine(pools.MLATokenToKVPool())
    pages = second.load("a", NAMES)
    filled = 3 * pools.TOKENS * pools.HEADS * pools.DIM
    assert [
        [filled, 0, 0],
        [filled, filled, 0],
        [filled, filled, filled],
    ] == second.forward()
    assert second.is_whole
    for name, page in zip(NAMES, pages, strict=True):
        assert torch.equal(latent_of(name), page_of(second, page))


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_latent_pages_of_a_host_pool_are_a_linkers(kit: Kit, layout: str) -> None:
    """R-81: the same bytes under the same keys, whatever the order of the pool."""
    pages = [9, 2, 4]
    storage = kit.storage(layout, pools.MLATokenToKVPoolHost)
    for name, page in zip(NAMES, pages, strict=True):
        storage.mem_pool_host.page(page).copy_(latent_of(name))
    assert [True] * 3 == storage.batch_set_v1(NAMES, slots(pages))
    into = [1, 5, 3]
    assert [True] * 3 == storage.batch_get_v1(NAMES, slots(into))
    assert torch.equal(latent_of(NAMES[1]), storage.mem_pool_host.page(5)[0])
    storage.close()
    engine = kit.engine(pools.MLATokenToKVPool())
    found = engine.load("a", NAMES)
    engine.forward()
    assert torch.equal(latent_of(NAMES[2]), page_of(engine, found[2]))


def test_ranks_have_parts_of_their_own(kit: Kit) -> None:
    """R-81: what one has saved is no other's, and what they report in common is loaded."""
    ranks = [kit.engine(rank=rank, args={"tp_size": 2}) for rank in (0, 1)]
    for engine, count in zip(ranks, (3, 2), strict=True):
        assert engine.offload(NAMES[:count], engine.take(count))
    assert 5 == len(stored(kit.slab))
    assert 2 == common(ranks, "a")
    for engine in ranks:
        pages = engine.take(2)
        transfer = PoolTransfer(NAMES[:2], engine.tokens_of(pages))
        assert engine.linker.load("a", [transfer])
        engine.forward()
        assert engine.is_whole
        assert torch.equal(content_of(NAMES[1]), page_of(engine, pages[1]))


def test_replicas_are_stored_once(kit: Kit) -> None:
    """R-81: each rank has all of a latent page; SGLang is told that each has stored it."""
    ranks = ranks_of(kit, pools.MLATokenToKVPool)
    assert 3 == len(stored(kit.slab))
    assert 3 == common(ranks, "a")


def test_rank_that_has_lost_a_page_fails_the_load_of_all(kit: Kit) -> None:
    """R-81: SGLang takes the same way on all ranks: what one does not queue the others
    would wait for. So it is queued and fails, and nothing is written."""
    ranks = ranks_of(kit)
    assert 3 == common(ranks, "a")
    other = ranks[1]
    assert -1 == other.linker.start_layer_wise_loading()
    other.linker._pages.staged.forget()
    landed = []
    for engine in ranks:
        pages = engine.take(3)
        transfer = PoolTransfer(NAMES, engine.tokens_of(pages))
        assert engine.linker.load("a", [transfer])
        engine.forward()
        landed.append(engine.is_whole)
    assert [True, False] == landed
    assert 0 == int(page_of(other, 4).count_nonzero())
    assert [0, 0] == [len(each.linker._pages.staged._held) for each in ranks]


def test_rank_that_refuses_a_save_says_so_when_it_is_over(kit: Kit) -> None:
    """R-81: the ranks' saves stand in one order, or results would be another page's."""
    engine = ranks_of(kit)[0]
    fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    pages = engine.tokens_of(engine.take(3))
    assert engine.linker.offload([PoolTransfer(hashes(3, 9), pages)])
    assert 1 == engine.linker.num_completed_offloads()
    assert not engine.linker.pop_completed_offload()
