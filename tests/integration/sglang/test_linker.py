# SPDX-License-Identifier: Apache-2.0
"""R-81: SGLang's linker, asked in the order in which SGLang asks."""

import pytest
import torch

from tests.integration.sglang import fake, pools
from tests.integration.sglang.fake import PoolTransfer, content_of, hashes
from tests.integration.sglang.kit import Kit
from ucm.testing.slab_damage import Damage, damage, stored


def page_of(engine: fake.Engine, page: int) -> torch.Tensor:
    """Return what is in a page of the engine, row by row."""
    part = slice(page * pools.TOKENS, (page + 1) * pools.TOKENS)
    return torch.stack([buffer[part] for buffer in engine.buffers])


def test_offloaded_pages_are_restored_in_another_process(kit: Kit) -> None:
    """R-81: what one engine has computed the next one has, byte by byte."""
    first = kit.engine()
    names = hashes(5)
    assert [] == first.linker.lookup("a", [PoolTransfer(names)])
    assert first.offload(names, first.take(5))
    first.linker.close()
    second = kit.engine()
    pages = second.load("b", [*names, *hashes(1, 7)])
    assert 5 == len(pages)
    second.forward()
    assert second.is_whole
    for name, page in zip(names, pages, strict=True):
        assert torch.equal(content_of(name), page_of(second, page))


def test_layers_are_copied_when_they_are_asked_for(kit: Kit) -> None:
    """R-81: a pass that is at one layer has nothing of later ones."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    page = pools.TOKENS * pools.HEADS * pools.DIM
    engine.load("a", names)
    engine.load("b", names)
    both = [2 * page * 3, 2 * page]
    seen = engine.forward()
    assert [both[0]] * 2 + [both[1]] * 4 == seen[0]
    assert [both[0]] * 4 + [both[1]] * 2 == seen[1]
    assert [both[0]] * 6 == seen[2]


def test_lookup_reports_nothing_that_is_not_staged(kit: Kit) -> None:
    """R-81: not what was never saved, nor bytes that are not as they were."""
    engine = kit.engine()
    names = hashes(3)
    assert engine.offload(names, engine.take(3))
    assert [] == engine.linker.lookup("a", [PoolTransfer(hashes(3, 9))])
    damage(kit.slab, Damage.BITS, stored(kit.slab))
    assert [] == engine.linker.lookup("b", [PoolTransfer(names)])


def test_what_a_lookup_has_reported_stays_until_the_next_batch(kit: Kit) -> None:
    """R-81: however many others are looked up meanwhile; they find less room."""
    engine = kit.engine()
    first, others = hashes(6), hashes(8, 5)
    for names in (first, others):
        assert engine.offload(names, engine.take(len(names)))
    assert list(range(1, 7)) == engine.linker.lookup("a", [PoolTransfer(first)])
    assert [1, 2] == engine.linker.lookup("b", [PoolTransfer(others)])
    assert [1, 2] == engine.linker.lookup("b", [PoolTransfer(others)])
    transfer = PoolTransfer(first, engine.tokens_of([1, 2, 3, 4, 5, 6]))
    assert engine.linker.load("a", [transfer])
    engine.forward()
    assert engine.is_whole
    assert 0 == len(engine.linker._pages.staged._held)
    assert 8 == len(engine.linker.lookup("b", [PoolTransfer(others)]))
    engine.linker.reset()
    assert 0 == len(engine.linker._pages.staged._held)


def test_load_of_what_is_not_staged_any_more_is_not_queued(kit: Kit) -> None:
    """R-81: SGLang computes it then; it would abort a load that fails later."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    assert [1, 2] == engine.linker.lookup("a", [PoolTransfer(names)])
    assert -1 == engine.linker.start_layer_wise_loading()
    engine.linker._pages.staged.forget()
    transfer = PoolTransfer(names, engine.tokens_of(engine.take(2)))
    assert not engine.linker.load("a", [transfer])
    assert -1 == engine.linker.start_layer_wise_loading()


def test_cancelled_load_writes_nothing_and_holds_nothing(kit: Kit) -> None:
    """R-81: the request that it was for has gone, and its pages are another's."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    pages = engine.load("a", names)
    again = PoolTransfer(names, engine.tokens_of(engine.take(2)))
    assert not engine.linker.load("a", [again])
    assert engine.linker.cancel_queued_load("a")
    assert not engine.linker.cancel_queued_load("a")
    engine.forward()
    assert 0 == int(page_of(engine, pages[0]).count_nonzero())
    assert 0 == len(engine.linker._pages.staged._held)


def test_reset_leaves_nothing_but_what_is_stored(kit: Kit) -> None:
    """R-81: in whatever state loads and saves are; the store has the pages after it."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    engine.load("queued", names)
    engine.load("begun", names)
    index = engine.linker.start_layer_wise_loading()
    engine.load("queued", names)
    others = engine.take(2)
    assert engine.linker.offload([PoolTransfer(hashes(2, 5), engine.tokens_of(others))])
    engine.linker.reset()
    assert -1 == engine.linker.start_layer_wise_loading()
    assert 0 == engine.linker.num_completed_offloads()
    assert engine.linker.finish_layer_wise_loading(index)
    staged = engine.linker._pages.staged
    assert (0, 0, 8) == (len(staged._held), len(staged._verified), len(staged._free))
    assert [1, 2] == engine.linker.lookup("a", [PoolTransfer(names)])


def test_failed_copy_is_told_at_the_end(kit: Kit) -> None:
    """R-81: the pass goes on, and SGLang drops what comes of it."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    engine.load("a", names)
    rows = engine.linker.layer_done_counter._rows
    rows[3] = rows[3][0].half(), rows[3][1]  # which torch does not copy
    engine.forward()
    assert not engine.is_whole
    assert 0 == len(engine.linker._pages.staged._held)


def test_closed_linker_finds_and_saves_nothing(kit: Kit) -> None:
    """R-81: what SGLang still asks while it ends is answered."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    engine.linker.close()
    assert [] == engine.linker.lookup("a", [PoolTransfer(names)])
    assert not engine.offload(hashes(1, 3), engine.take(1))
    engine.linker.close()


def test_weights_that_may_have_changed_end_all_reuse(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    """R-81: from before they are written on, and for good; the log says so once."""
    engine = kit.engine()
    names = hashes(2)
    assert engine.offload(names, engine.take(2))
    assert [1, 2] == engine.linker.lookup("a", [PoolTransfer(names)])
    updated = fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    assert [("target", "all")] == updated
    assert [] == engine.linker.lookup("b", [PoolTransfer(names)])
    assert not engine.offload(hashes(1, 3), engine.take(1))
    fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    assert 1 == caplog.text.count("Weights are written")
