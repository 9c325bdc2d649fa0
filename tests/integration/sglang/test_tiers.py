# SPDX-License-Identifier: Apache-2.0
"""R-81, R-53: pages of one machine are another's through a tier, by both doors."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cache.test_tiers import until
from tests.integration.sglang.fake import PoolTransfer, content_of, hashes
from tests.integration.sglang.kit import Kit
from tests.integration.sglang.test_hicache import Windows, fill, slots
from tests.integration.sglang.test_linker import page_of
from ucm.testing.door_tiers import await_spilled, damage_files, end_agent, tiers_at
from ucm.testing.slab_damage import drop, stored

pytestmark = pytest.mark.slow

NAMES = hashes(5)


class Machines:
    """One after the other, with a slab each and a tier that all have in common."""

    def __init__(self, kit: Kit, shm: Path, share: Path) -> None:
        self._kit, self._shm, self._share = kit, shm, share
        kit.slab = shm / "0"
        kit.longest = 240.0  # of a busy machine

    def open(self, make: Callable[..., Any]) -> Any:
        """Return a door whose agents are there."""
        timeout = {"fetch": 60.0}  # likewise
        door = make(tiers=tiers_at(self._share), timeout=timeout)
        for pages in pages_of(door):
            until(lambda: all(one._core.fetches.is_served for one in caches(pages)))  # noqa: B023 - now
        return door

    def move(self) -> None:
        """Have the next one on another machine, once the tier has all."""
        await_spilled(self._kit.slab, self._share)
        self.end()
        self._kit.slab = self._shm / "1"

    def rot(self) -> None:
        """Have the tier alone, with other bytes."""
        assert drop(self._kit.slab, stored(self._kit.slab)) == len(NAMES)
        assert damage_files(self._share) == len(NAMES)

    def end(self) -> None:
        """Have no agent run."""
        end_agent(self._kit.slab)


def pages_of(door: Any) -> list[Any]:
    """Return what a door keeps of pages, kind by kind."""
    kinds = getattr(getattr(door, "storage", door), "_kinds", None)
    return [door.linker._pages] if kinds is None else [k.pages for k in kinds.values()]


def caches(pages: Any) -> tuple[Any, Any]:
    """Return those of a door: over the engine's pages, and over its own."""
    return pages._pool, pages.staged._cache


def fetched(pages: Any) -> int:
    """Return how many pages a tier has brought."""
    name, tier = "ucm_fetched_parts_total", "files"
    totals = [each._core._counters.total(name, tier=tier) for each in caches(pages)]
    return int(sum(totals))


def test_linker_stages_what_a_tier_has(kit: Kit, machines: Machines) -> None:
    """R-81, R-53: cold on a machine, warm on the next, byte for byte; pages that rot in the
    tier are not reported, as a load that fails behind a look-up is an aborted request."""
    first = machines.open(kit.engine)
    assert [] == first.linker.lookup("a", [PoolTransfer(NAMES)])
    assert first.offload(NAMES, first.take(5))
    first.linker.close()
    machines.move()
    second = machines.open(kit.engine)
    pages = second.load("b", [*NAMES, *hashes(1, 7)])
    second.forward()
    assert second.is_whole
    assert 5 == len(pages) == fetched(second.linker._pages)
    for name, page in zip(NAMES, pages, strict=True):
        assert torch.equal(content_of(name), page_of(second, page))
    second.linker._pages.staged.forget()
    machines.rot()
    assert [] == second.linker.lookup("c", [PoolTransfer(NAMES)])
    second.linker.close()


def test_storage_has_what_a_tier_has(kit: Kit, machines: Machines) -> None:
    """R-81, R-53: cold on a machine, warm on the next, byte for byte; pages that rot in the
    tier are not there."""
    into = [4, 8, 7, 6, 1]
    first = machines.open(kit.storage)
    assert 0 == first.batch_exists(NAMES)
    fill(first, NAMES, into)
    assert [True] * 5 == first.batch_set_v1(NAMES, slots(into))
    first.close()
    machines.move()
    second = machines.open(kit.storage)
    assert 5 == second.batch_exists([*NAMES, *hashes(1, 7)])
    assert [True] * 5 == second.batch_get_v1(NAMES, slots(into))
    assert 5 == fetched(*pages_of(second))
    for name, page in zip(NAMES, into, strict=True):
        found = second.mem_pool_host.page(page).transpose(0, 1).flatten(0, 1)
        assert torch.equal(content_of(name), found)
    machines.rot()
    assert 0 == second.batch_exists(NAMES)
    assert [False] * 5 == second.batch_get_v1(NAMES, slots(into))
    second.close()


def test_windows_have_what_a_tier_has(kit: Kit, machines: Machines) -> None:
    """R-81, R-53: the last window's pages come with those of all tokens."""
    first = machines.open(functools.partial(Windows, kit))
    first.save(NAMES, NAMES[3:])
    first.storage.close()
    machines.move()
    second = machines.open(functools.partial(Windows, kit))
    assert 5 == second.found(NAMES, 2).kv_hit_pages
    assert [5, 2] == [fetched(pages) for pages in pages_of(second)]
    second.storage.close()
