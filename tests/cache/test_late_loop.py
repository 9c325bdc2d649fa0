# SPDX-License-Identifier: Apache-2.0
"""R-42: what was asked for counts, also before our loop has come to look at it."""

import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest

from tests.cache.kit import LIMIT_S, Host, keys_of, leaving_nothing, run
from ucm.cache import sync
from ucm.cache.aio import Cache, Save
from ucm.errors import BlockInUseError
from ucm.pipeline.outcomes import OutcomeKind
from ucm.pipeline.recorder import Notice
from ucm.testing.faults import Fault, FaultPlan, Gate

pytestmark = pytest.mark.anyio


def late(host: Host, act: Callable[[Cache, Save], Awaitable[None]]) -> Save:
    """Save four blocks while our loop hears of nothing, and go on; return the save.

    It hears of it when the host's loop has nothing else to do.
    """
    saves = []

    async def main() -> None:
        async with host.cache() as cache:
            assert host.core is not None
            wake, host.core._serving.wake = host.core._serving.wake, lambda: None
            saves.append(cache.save(keys_of(4), range(4)))
            assert 1 == len(host.core._asked)
            async with anyio.create_task_group() as group:
                group.start_soon(act, cache, saves[0])
                await anyio.wait_all_tasks_blocked()
                host.core._serving.wake = wake
                wake()

    with leaving_nothing(host):
        run("asyncio", main)
    return saves[0]


def test_save_that_nobody_has_looked_at_is_flushed() -> None:
    """Whoever waits for all that was asked for waits for it."""

    async def act(cache: Cache, save: Save) -> None:
        await cache.flush()
        assert save.is_over

    assert OutcomeKind.COMMITTED is late(Host(), act)._transfer.over.result().kind


def test_save_that_nobody_has_looked_at_is_cancelled() -> None:
    """It ends, and its blocks are free."""

    async def act(_: Cache, save: Save) -> None:
        save.cancel()
        await save.source_released
        await save.committed

    end = late(Host(), act)._transfer.over.result()
    assert (OutcomeKind.CANCELLED, 0) == (end.kind, end.committed)


async def test_save_that_nobody_has_looked_at_is_drained_by_close() -> None:
    """It is stored as if the loop had been in time, which hears of nothing here."""
    host, saves = Host(), []
    async with host.cache() as cache:
        assert host.core is not None
        host.core._serving.wake = lambda: None
        saves.append(cache.save(keys_of(4), range(4)))
        assert not saves[0].is_over
    host.check_left()
    assert saves[0]._transfer.over.result().is_whole


def test_blocks_of_a_save_that_nobody_has_looked_at_are_in_use() -> None:
    """A load into them is refused as at any time."""

    async def act(cache: Cache, _: Save) -> None:
        with pytest.raises(BlockInUseError):
            await cache.load(keys_of(1), [3])

    late(Host(), act)


async def test_keys_that_the_host_changes_afterwards_are_those_it_gave() -> None:
    """A list that was handed in is the host's again at once."""
    keys, blocks = keys_of(2), [0, 1]
    host = Host()
    async with host.cache() as cache:
        assert host.core is not None
        wake, host.core._serving.wake = host.core._serving.wake, lambda: None
        save = cache.save(keys, blocks)
        keys.reverse()
        blocks.clear()
        host.core._serving.wake = wake
        wake()
        assert (await save.committed).is_whole
        assert 2 == await cache.match(keys_of(2))
        before = host.content(range(2))
        assert (await cache.load(keys_of(2), [8, 9])).is_whole
        assert before == host.content(range(8, 10))
    host.check_left()


def test_many_saves_are_taken_in_with_turns_of_others_between() -> None:
    """What was asked for before them is told, and moves, before the last of them is looked at."""
    gate, is_all, left = Gate(), threading.Event(), []
    host = Host(FaultPlan(Fault("reserve", gate)), {"timeout": {"save": 600.0}})
    with leaving_nothing(host), sync.Cache(*host.open_core()) as cache:
        core = host.core
        assert core is not None
        poll, wake = core._runtime.poll, core._serving.wake

        def look() -> list[Notice]:
            left.append(len(core._asked))
            if not left[-1]:
                is_all.set()
            return poll()

        core._runtime.poll, core._serving.wake = look, lambda: None
        saves = [cache.save(keys_of(1, at), [at % 64]) for at in range(600)]
        core._serving.wake = wake
        wake()
        is_taken = is_all.wait(LIMIT_S)  # though no notice comes
        gate.open()
        assert is_taken
        assert all(each.wait_committed() for each in saves)
    assert [344, 88, 0] == list(dict.fromkeys(each for each in left if each < 600))
