# SPDX-License-Identifier: Apache-2.0
"""Fetch: a tenant that wants very much keeps no other from what it wants."""

import anyio
import pytest

from tests.agent.test_fetch_line import Slow
from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(80)


def prompt(number):
    """Return the keys of a prompt of four blocks, one call of the tier."""
    return KEYS[4 * number : 4 * number + 4]


@pytest.mark.parametrize("num_blocks", [64, 800], ids=["slots", "tier"])
def test_flood_of_one_tenant_keeps_no_other_waiting(tmp_path, num_blocks) -> None:
    """R-53: behind a tenant's fifteen prompts of a second each another one's is in time, whether they wait for
    slots or for the tier; it waited for all of them. The flood loses one turn to it, and no more."""
    backend, ends = Slow(), {}

    async def ask(core, number, tenant) -> None:
        await core.fetch(want := want_of(prompt(number), 60.0, tenant=tenant))
        ends[number] = round(anyio.current_time(), 3)
        assert (4, Reason.NONE) == (want.found, want.reason)
        core.drop(want)

    async def run(slab):
        await lay(backend, KEYS)
        async with open_core(slab, backend) as core:
            began = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for number in range(15):
                    tasks.start_soon(ask, core, number, 1)
                await anyio.sleep(0.5)
                tasks.start_soon(ask, core, 15, 2)
            assert {} == core.fetcher._budget.held
            return began

    with open_slab(tmp_path / "slab", num_blocks) as slab:
        began = run_virtual(lambda: run(slab))
    assert ends[15] - began <= 3.0
    assert max(ends.values()) - began == pytest.approx(16.0)


def test_slots_are_whose_want_has_them(tmp_path) -> None:
    """R-53: blocks that two tenants want, of which the first gives up before there are slots, count
    for the second, as long as it has them, and then for nobody."""
    tier = Unruly()

    async def run(slab):
        await lay(tier, KEYS)
        async with open_core(slab, tier) as core:
            budget = core.fetcher._budget
            held = want_of(KEYS[:8], tenant=3)
            await core.fetch(held)
            async with anyio.create_task_group() as tasks:
                first = want_of(KEYS[8:12], seconds=1.0, tenant=1)
                second = want_of(KEYS[8:12], tenant=2)
                tasks.start_soon(core.fetch, first)
                await anyio.sleep(0.5)
                tasks.start_soon(core.fetch, second)
                await anyio.sleep(1.0)
                before = dict(budget.held)
                core.drop(held)
            after = dict(budget.held)
            core.drop(second)
            return before, after, dict(budget.held), budget.left, second.found

    with open_slab(tmp_path / "slab", 64) as slab:
        told = run_virtual(lambda: run(slab))
    assert ({3: 8}, {2: 4}, {}, 8, 4) == told


def test_slots_that_come_as_their_want_goes_are_nobodys(tmp_path) -> None:
    """R-53, R-63: whose want ends as its slots are granted has none, and neither has anybody else."""
    tier = Unruly()

    async def run(slab):
        await lay(tier, KEYS)
        async with open_core(slab, tier) as core:
            budget = core.fetcher._budget
            held = want_of(KEYS[:8], tenant=3)
            await core.fetch(held)
            want = want_of(KEYS[8:12], tenant=1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(core.fetch, want)
                await anyio.sleep(0.5)
                core.drop(held)
                tasks.cancel_scope.cancel()
            core.drop(want)
            await anyio.sleep(1.0)
            return dict(budget.held), budget.left

    with open_slab(tmp_path / "slab", 64) as slab:
        assert ({}, 8) == run_virtual(lambda: run(slab))
