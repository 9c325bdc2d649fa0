# SPDX-License-Identifier: Apache-2.0
"""Fetch: many prompts at once, of which a tier serves one after the other."""

import anyio
import pytest

from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(80)
NUM_LEARNT = 4
"""Calls until a tier's speed is known."""


class Slow(Unruly):
    """One whose calls of four blocks take a second each, and side by side as much longer."""

    def __init__(self) -> None:
        super().__init__(in_flight=1)
        self.most = 0
        self._under_way = 0

    async def get(self, keys, targets):
        """Get, and take one's time."""
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            await anyio.sleep(self._under_way * len(keys) / 4)
            return await super().get(keys, targets)
        finally:
            self._under_way -= 1


@pytest.fixture
def slab(tmp_path):
    """Return a slab of which a fetch may have fifty blocks."""
    with open_slab(tmp_path / "slab", 400) as store:
        yield store


def prompt(number):
    """Return the keys of a prompt of four blocks, one call of the tier."""
    return KEYS[4 * number : 4 * number + 4]


def fetched(slab, *seconds):
    """Ask for a prompt's blocks for each time given, at once, once the tier's speed is known."""
    backend = Slow()

    async def fetch():
        await lay(backend, KEYS)
        async with open_core(slab, backend) as core:
            for number in range(NUM_LEARNT):
                await core.fetch(first := want_of(prompt(number)))
                core.drop(first)
            began, ends = anyio.current_time(), {}
            wants = [
                want_of(prompt(NUM_LEARNT + at), each)
                for at, each in enumerate(seconds)
            ]

            async def ask(want):
                await core.fetch(want)
                ends[want] = round(anyio.current_time() - began, 3)

            async with anyio.create_task_group() as tasks:
                for want in wants:
                    tasks.start_soon(ask, want)
            await anyio.sleep(10.0)
            told = [(want.found, want.reason, ends[want]) for want in wants]
            return told, core.fetcher.num_open

    told, num_open = run_virtual(fetch)
    assert 0 == num_open
    return told, backend


class TestLine:
    def test_prompts_that_come_at_once_are_served_one_after_the_other(
        self, slab
    ) -> None:
        """R-53: calls of many prompts do not make each other late."""
        told, backend = fetched(slab, *[10.0] * 6)
        assert [(4, Reason.NONE, 1.0 + at) for at in range(6)] == told
        assert 1 == backend.most

    def test_small_calls_go_side_by_side(self, slab) -> None:
        """R-53: as many at a time as make up a large one, which a tier far away is good for."""
        backend = Slow()

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                wants = [want_of(KEYS[at : at + 1]) for at in range(12)]
                async with anyio.create_task_group() as tasks:
                    for want in wants:
                        tasks.start_soon(core.fetch, want)
                return [want.found for want in wants]

        assert [1] * 12 == run_virtual(fetch)
        assert 4 == backend.most

    def test_blocks_that_would_come_late_keep_nobody_waiting(self, slab) -> None:
        """R-54: whose time would be over first hears so at once, and the next one is in time."""
        told, backend = fetched(slab, 10.0, 1.5, 2.5)
        assert [
            (4, Reason.NONE, 1.0),
            (0, Reason.DEADLINE, 1.0),
            (4, Reason.NONE, 2.0),
        ] == told
        assert not set(prompt(NUM_LEARNT + 1)) & set(backend.got)

    def test_tier_that_is_asked_for_too_much_serves_as_many_as_it_can(
        self, slab
    ) -> None:
        """R-54: of twice as many prompts as a tier can serve half are in time, and of those
        that are not nothing is fetched."""
        backend = Slow()

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                found = []

                async def ask(number):
                    await core.fetch(want := want_of(prompt(number), 2.75))
                    found.append(want.found)
                    core.drop(want)

                async with anyio.create_task_group() as tasks:
                    for number in range(20):
                        tasks.start_soon(ask, number)
                        await anyio.sleep(0.5)
                return found

        found = run_virtual(fetch)
        assert sum(found) >= 4 * 10
        assert sum(found) >= len(backend.got) - 4  # until its speed was known

    def test_blocks_that_come_late_are_there_for_the_next_prompt(self, slab) -> None:
        """R-53: where nobody else waits a tier that is too slow is asked all the same."""
        told, _ = fetched(slab, 0.5)
        assert [(0, Reason.DEADLINE, 0.5)] == told
        assert [True] * 4 == slab.contains(prompt(NUM_LEARNT))

    def test_who_wants_nothing_any_more_leaves_the_line(self, slab) -> None:
        """R-53, R-63: the slots of a prompt that was given up in the line are others' before
        its turn comes, and it is not got."""
        backend = Slow()

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                first, late = want_of(prompt(0)), want_of(prompt(1), 0.5)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, first)
                    await anyio.sleep(0.25)
                    await core.fetch(late)
                    core.drop(late)
                    await anyio.sleep(0.125)  # the first one's call goes on
                    left = core.fetcher._budget.left
                return left, first.found

        assert (50 - 4, 4) == run_virtual(fetch)
        assert prompt(0) == backend.got
