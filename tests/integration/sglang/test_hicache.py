# SPDX-License-Identifier: Apache-2.0
"""R-81: SGLang's storage, asked in the order in which SGLang asks."""

import math
import os
import types

import pytest
import torch

from tests.clocks import AdvancingThreads
from tests.integration.sglang import fake, pools
from tests.integration.sglang.fake import content_of, hashes
from tests.integration.sglang.kit import Kit
from tests.stores.slab_kit import Child
from ucm.errors import ConfigError
from ucm.integration.sglang import pages as pages_module
from ucm.testing.slab_damage import Damage, damage, stored

LAYOUTS = ("layer_first", "page_first_direct")


def slots(pages: list[int]) -> torch.Tensor:
    """Return the slots of pages, as SGLang gives them."""
    first = torch.tensor(pages).repeat_interleave(pools.TOKENS) * pools.TOKENS
    return first + torch.arange(pools.TOKENS).repeat(len(pages))


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


@pytest.mark.parametrize("room", [1, 3, 8])
def test_call_that_carries_more_than_is_staged_at_once_is_whole(
    kit: Kit, room: int
) -> None:
    """R-81: SGLang uses nothing of a prompt with windows that is not whole."""
    names, pages = hashes(10), list(range(10))
    storage = kit.storage(stage_bytes=room * pools.PAGE_BYTES)
    fill(storage, names, pages)
    assert [True] * 10 == storage.batch_set_v1(names, slots(pages))
    assert 10 == storage.batch_exists(names)
    asked, into = [*names, *hashes(4, 4)], [*pages[::-1], 10, 11, 12, 13]
    got = storage.batch_get_v1(asked, slots(into))
    assert [True] * 10 + [False] * 4 == got
    for name, page in zip(names, into[:10], strict=True):
        found = storage.mem_pool_host.page(page).transpose(0, 1).flatten(0, 1)
        assert torch.equal(content_of(name), found)


def test_pages_behind_a_part_that_is_not_whole_are_not_loaded(kit: Kit) -> None:
    """R-81: SGLang takes none of them, and may have given their memory to others."""
    names, pages = hashes(6), list(range(6))
    storage = kit.storage(stage_bytes=2 * pools.PAGE_BYTES)
    fill(storage, names, pages)
    storage.batch_set_v1(names[:3], slots(pages[:3]))
    storage.batch_set_v1(names[4:], slots(pages[4:]))
    got = storage.batch_get_v1(names, slots(list(range(8, 14))))
    assert [True] * 3 + [False] * 3 == got
    for page in (11, 12, 13):
        assert 0 == int(storage.mem_pool_host.page(page).count_nonzero())


class SlowClock(AdvancingThreads):
    """A clock that is three seconds later each time that somebody looks."""

    def _monotonic(self) -> float:
        self.advance(3.0)
        return self._ahead


def test_load_in_parts_begins_none_once_its_time_is_over(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81: SGLang flushes while one goes on that nobody wants, and ends itself behind 10 s."""
    names, pages = hashes(6), list(range(6))
    storage = kit.storage(stage_bytes=pools.PAGE_BYTES)
    fill(storage, names, pages)
    assert [True] * 6 == storage.batch_set_v1(names, slots(pages))
    monkeypatch.setattr(pages_module, "SYSTEM", SlowClock())
    got = storage.batch_get_v1(names, slots(list(range(8, 14))))
    assert [True] * 2 + [False] * 4 == got
    for page in (10, 11, 12, 13):
        assert 0 == int(storage.mem_pool_host.page(page).count_nonzero())


def test_call_that_saves_more_than_may_wait_is_whole(kit: Kit) -> None:
    """R-81: SGLang saves nothing of a prefix behind a page that was refused."""
    names, pages = hashes(10), list(range(10))
    few = {"tickets": 1, "nbytes": pools.PAGE_BYTES, "span_bytes": pools.PAGE_BYTES}
    storage = kit.storage(queue=few)
    assert [True] * 10 == storage.batch_set_v1(names, slots(pages))
    assert 10 == storage.batch_exists(names)


@pytest.mark.slow
def test_process_that_stands_still_delays_a_save_for_less_than_sglang_waits(
    kit: Kit,
) -> None:
    """R-81: it has the index's lock, which nobody breaks. All pages are dropped together when
    their time is up, and counted, not one after the other as each gives up the lock."""
    longest = kit.storage()._kinds["kv"].pages._pool._core.timeout
    assert (8.0, 8.0) == (longest.save, longest.load)
    names, pages = hashes(6), list(range(6))
    storage = kit.storage(longest=1.0, queue={"span_bytes": 2 * pools.PAGE_BYTES})
    with Child(kit.slab, "stand still", 256) as other:
        _, status = os.waitpid(other.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert [False] * 6 == storage.batch_set_v1(names, slots(pages))
        other.kill()
    counters = storage._kinds["kv"].pages._pool.measure().counters
    settled = {name: n for name, n in counters.items() if "_settled_parts_" in name}
    assert {"ucm_settled_parts_total|save|cancelled|deadline": 6} == settled


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


@pytest.mark.parametrize(
    ("action", "found"),
    [("checksum", 2), ("compare", 2), ("snapshot", 2), ("reset_tensors", 0)],
)
def test_weights_that_are_read_stay_those_of_the_keys(
    kit: Kit, action: str, found: int
) -> None:
    """R-81: SGLang's check of weights reads them, or resets them; behind new ones it proves nothing."""
    names, updater = hashes(2), fake.SchedulerWeightUpdaterManager()
    asked, check = types.SimpleNamespace(action=action), updater.check_weights
    storage = kit.storage()  # attached while SGLang runs, which has bound its methods
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))
    assert (action, [("target", "all")]) == check(asked)
    assert found == storage.batch_exists(names)
    updater.update_weights_from_disk()
    check(asked)
    assert 0 == storage.batch_exists(names)


def test_storages_that_come_and_go_listen_once(kit: Kit) -> None:
    """R-81: SGLang attaches one as often as it is told, and each call to it would be deeper."""
    kit.storage().close()
    listens = fake.SchedulerWeightUpdaterManager._select_runners
    kit.storage().close()
    assert listens is fake.SchedulerWeightUpdaterManager._select_runners


def test_storage_that_is_attached_behind_new_weights_serves_nothing(kit: Kit) -> None:
    """R-81: its keys name what the engine began with."""
    names = hashes(2)
    first = kit.storage()
    assert [True] * 2 == first.batch_set_v1(names, slots([1, 2]))
    fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    first.close()
    second = kit.storage()
    assert 0 == second.batch_exists(names)
    assert [False] * 2 == second.batch_set_v1(hashes(2, 3), slots([1, 2]))


def test_pool_that_is_registered_anew_takes_the_place_of_the_first(kit: Kit) -> None:
    """R-81: nothing is left open over the one before."""
    names, pool = hashes(2), pools.MHATokenToKVPoolHost()
    storage = kit.storage()
    before = storage._kinds["kv"].pages
    storage.register_mem_pool_host(pool)
    assert before.save(names, [1, 2]) is None
    fill(storage, names, [1, 2])
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))
    assert [True] * 2 == storage.batch_get_v1(names, slots([4, 5]))
    assert torch.equal(pool.page(1), pool.page(4))


def test_storage_that_has_refused_a_model_serves_nothing(kit: Kit) -> None:
    """R-81: SGLang that attaches a storage while it runs keeps it, whatever it has said,
    and a prompt needs its pages of all kinds."""
    names = hashes(2)
    storage = kit.storage()
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))
    storage.register_mem_host_pool_v2(pools.MHATokenToKVPoolHost(), fake.PoolName.SWA)
    with pytest.raises(ConfigError, match="indexer"):
        storage.register_mem_host_pool_v2(None, fake.PoolName.INDEXER)
    assert 0 == storage.batch_exists(names)
    assert [False] * 2 == storage.batch_get_v1(names, slots([1, 2]))
    assert [False] * 2 == storage.batch_set_v1(hashes(2, 3), slots([1, 2]))


def test_flag_of_sglangs_own_files_is_none_of_ours(kit: Kit) -> None:
    """R-81: SGLang adds ``--file-storage-path`` to the configuration of any storage."""
    names = hashes(2)
    storage = kit.storage(file_storage_path="/elsewhere")
    assert [True] * 2 == storage.batch_set_v1(names, slots([1, 2]))


def test_what_is_not_taken_is_refused_by_name(kit: Kit) -> None:
    """R-81: other interfaces, orders of pages, and pools of other kinds."""
    storage = kit.storage()
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        storage.register_mem_host_pool_v2(types.SimpleNamespace(), fake.PoolName.SWA)
    with pytest.raises(ConfigError, match="interface_v1"):
        kit.installed().hicache.Storage(types.SimpleNamespace(extra_config={}), {})
    with pytest.raises(ConfigError, match="page_head"):
        storage.register_mem_pool_host(pools.MHATokenToKVPoolHost("page_head"))
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        storage.register_mem_pool_host(types.SimpleNamespace())


class Windows:
    """
    A storage with pages of two kinds.

    Args:
        kit: Makes it.
        settings: More of ours.
    """

    def __init__(self, kit: Kit, **settings: object) -> None:
        self.storage = kit.storage(**settings)
        self.pool = pools.MHATokenToKVPoolHost()
        self.storage.register_mem_host_pool_v2(self.pool, fake.PoolName.SWA)

    def transfer(self, names: list[str], pages: list[int] | None = None, **more):
        """Return what SGLang asks about pages of windows."""
        where = None if pages is None else slots(pages)
        return fake.PoolTransfer(
            names, name=fake.PoolName.SWA, host_indices=where, **more
        )

    def save(self, names: list[str], windows: list[str]) -> None:
        """Save pages of all tokens, and of windows what is twice as much."""
        pages = list(range(len(names)))
        fill(self.storage, names, pages)
        self.storage.batch_set_v1(names, slots(pages))
        for at, name in enumerate(windows):
            rows = content_of(name).unflatten(0, (-1, 2)).transpose(0, 1)
            self.pool.page(at).copy_(2 * rows)
        pages = list(range(len(windows)))
        saved = self.storage.batch_set_v2([self.transfer(windows, pages)])
        assert {"swa": [True] * len(windows)} == saved

    def found(self, names: list[str], window: int):
        """Return what there is of a prefix that needs the last pages of its windows."""
        asked = self.transfer(names[:window])
        return self.storage.batch_exists_v2(names, [asked])


def test_windows_are_restored_beside_pages_of_the_same_hashes(kit: Kit) -> None:
    """R-81: in another process, and neither for the other, though layers are numbered alike."""
    names = hashes(5)
    first = Windows(kit)
    first.save(names, names[3:])
    first.storage.close()
    second = Windows(kit)
    found = second.found(names, 2)
    assert (5, [5]) == (found.kv_hit_pages, found.restorable_prefix_pages)
    assert {"kv": 5, "swa": 5} == found.extra_pool_hit_pages
    asked = second.transfer(names[3:], [7, 8])
    assert {"swa": [True] * 2} == second.storage.batch_get_v2([asked])
    assert [True] * 5 == second.storage.batch_get_v1(names, slots([1, 2, 3, 7, 8]))
    for name, page in zip(names[3:], [7, 8], strict=True):
        window = second.pool.page(page).transpose(0, 1).flatten(0, 1)
        assert torch.equal(2 * content_of(name), window)
        whole = second.storage.mem_pool_host.page(page).transpose(0, 1).flatten(0, 1)
        assert torch.equal(content_of(name), whole)


@pytest.mark.parametrize(
    ("windows", "size", "ends"),
    [
        ([], 2, []),
        ([0], 2, [1]),
        ([1, 2], 2, [3]),
        ([0, 1, 3, 4], 2, [1, 2, 5]),
        ([0, 1, 2, 3, 4], 3, [1, 2, 3, 4, 5]),
        ([4], 1, [5]),
        ([3], 0, [4]),
    ],
)
def test_prefix_ends_where_its_last_window_is_whole(
    kit: Kit, windows: list[int], size: int, ends: list[int]
) -> None:
    """R-81: a window that lacks a page is no window, and a shorter prefix may have its own."""
    names = hashes(5)
    world = Windows(kit)
    world.save(names, [names[at] for at in windows])
    found = world.found(names, size)
    assert ends == found.restorable_prefix_pages
    assert max(ends, default=0) == found.kv_hit_pages
    assert max(ends, default=0) == found.extra_pool_hit_pages["swa"]


def test_window_behind_the_last_page_is_no_hit(kit: Kit) -> None:
    """R-81: of what the pages of all tokens lack nothing is found."""
    names = hashes(5)
    world = Windows(kit)
    world.save(names[:3], names)
    found = world.found(names, 2)
    assert [1, 2, 3] == found.restorable_prefix_pages
    assert {"kv": 3, "swa": 3} == found.extra_pool_hit_pages


def test_questions_that_nobody_expected_find_and_move_nothing(kit: Kit) -> None:
    """R-81: of other kinds and rules, and where pages and slots do not fit."""
    names = hashes(3)
    world = Windows(kit)
    world.save(names, names)
    mamba = fake.PoolTransfer(names[:1], name=fake.PoolName.MAMBA)
    every = world.transfer(names[:1], hit_policy=fake.PoolHitPolicy.ALL_PAGES)
    for asked in (mamba, every):
        assert 0 == world.storage.batch_exists_v2(names, [asked]).kv_hit_pages
    assert 3 == world.storage.batch_exists_v2(names, None).kv_hit_pages
    short, bare = world.transfer(names, [1, 2]), world.transfer(names)
    for move in (world.storage.batch_get_v2, world.storage.batch_set_v2):
        assert {"swa": [False] * 3} == move([short])
        assert {"swa": [False] * 3} == move([bare])
        assert {"mamba": [False]} == move([mamba])
        assert {"swa": []} == move([fake.PoolTransfer(None, name=fake.PoolName.SWA)])


def test_weights_in_doubt_end_the_reuse_of_windows(kit: Kit) -> None:
    """R-81: as of all else."""
    names = hashes(3)
    world = Windows(kit)
    world.save(names, names)
    fake.SchedulerWeightUpdaterManager().update_weights_from_disk()
    assert [False] * 3 == world.storage._kinds["swa"].pages.are_stored(names, math.inf)
    assert 0 == world.found(names, 1).kv_hit_pages
