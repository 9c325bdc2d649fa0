# SPDX-License-Identifier: Apache-2.0
"""R-42: cancelled at any await point of any verb, nothing is left."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import anyio.to_thread
import attrs
import pytest

from tests.cache.kit import (
    LIMIT_S,
    Host,
    both_loops,
    keys_of,
    leaving_nothing,
    our_threads,
    run,
    span_of,
)
from ucm.cache.aio import Cache, Opening
from ucm.devices.cpu import CPUDevice
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate

pytestmark = pytest.mark.anyio

KEYS = keys_of(6)


@attrs.define
class CancelledAt:
    """
    Awaits something and is cancelled while it waits for the *n*-th time.

    Args:
        inner: What is awaited.
        nth: At which of the points where it waits, from 0.
        scope: Is cancelled there.
        points: How many there were.
    """

    inner: Awaitable[Any]
    nth: int
    scope: anyio.CancelScope
    points: int = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        """Pass on whatever the loop and the awaited say to each other."""
        steps = self.inner.__await__()
        say, word = steps.send, None
        while True:
            try:
                waited_for = say(word)
            except StopIteration as end:
                return end.value
            if self.points == self.nth:
                self.scope.cancel()
            self.points += 1
            try:
                say, word = steps.send, (yield waited_for)
            except BaseException as error:  # noqa: BLE001 - handed to whom it is for
                say, word = steps.throw, error


async def cancel_at(nth: int, inner: Awaitable[Any]) -> int:
    """Await something, cancelled at a point; return how many points there were."""
    with anyio.CancelScope() as scope:
        cancelled = CancelledAt(inner, nth, scope)
        await cancelled
    return cancelled.points


class Unpinnable(CPUDevice):
    """A device that needs more memory than it is given."""

    is_synchronous = False

    def stage(self, nbytes: int, slot_bytes: int) -> str:
        """Refuse."""
        raise ConfigError("queue.staging_bytes", 1, "too small", "Give more.")


async def save_and_wait(cache: Cache) -> None:
    """Save and wait for both moments."""
    save = cache.save(KEYS, range(6))
    await save.source_released
    await save.committed


VERBS: dict[str, Callable[[Cache], Awaitable[Any]]] = {
    "match": lambda cache: cache.match(KEYS),
    "contains": lambda cache: cache.contains(KEYS),
    "prefetch": lambda cache: cache.prefetch(keys_of(6, 7)),
    "load": lambda cache: cache.load(KEYS, range(20, 26)),
    "save": save_and_wait,
    "touch": lambda cache: cache.touch(KEYS),
    "retain": lambda cache: cache.retain(KEYS, ttl=1),
    "forget": lambda cache: cache.forget(KEYS[4:]),
    "flush": lambda cache: cache.flush(),
    "statistics": lambda cache: cache.statistics(),
}


def test_every_verb_that_waits_is_here() -> None:
    """A verb that is new is cancelled as well; a save is waited for by what it returns."""
    waiting = {
        name
        for name, each in vars(Cache).items()
        if inspect.iscoroutinefunction(each) and not name.startswith("_")
    }
    assert set(VERBS) == waiting | {"save"}


async def see_that_nothing_is_left(host: Host, cache: Cache) -> None:
    """Check a cache that goes on: no slot, no block, nobody who waits, nothing open."""
    await cache.flush()
    assert 0 == (await cache.statistics()).open_transfers
    while host.store.stats().reserved_blocks:  # a copy thread gives them back
        await cache.statistics()
    assert 0 == len(host.core._users)
    assert {} == host.core._open
    keys, blocks = keys_of(2, 99), [0, 1]
    assert (await cache.save(keys, blocks).committed).is_whole
    assert (await cache.load(keys, blocks)).is_whole  # all blocks are free


@both_loops
@pytest.mark.parametrize("verb", VERBS)
async def test_verb_cancelled_at_each_point_leaves_nothing(verb: str) -> None:
    """Whatever it waits for, somebody else can use all of it afterwards."""
    host = Host(config=span_of())
    async with host.cache() as cache:
        await cache.save(KEYS, range(6)).committed
        await see_that_nothing_is_left(host, cache)
        nth, points = 0, 1
        while nth < points:
            if verb == "flush":
                cache.save(keys_of(2, nth + 1), [3, 4])
            points = await cancel_at(nth, VERBS[verb](cache))
            await see_that_nothing_is_left(host, cache)
            nth += 1
        assert 1 <= points
    host.check_left()


@both_loops
async def test_open_and_close_cancelled_at_each_point_leave_nothing() -> None:
    """Neither a thread nor an open store is left, and what was asked for has its end."""
    nth, points = 0, 1
    while nth < points:
        host = Host()

        async def use(host: Host = host) -> None:
            async with Opening(host.open_core) as cache:
                cache.save(KEYS, range(6))

        points = await cancel_at(nth, use())
        assert set() == our_threads()
        if host.core is not None:
            host.check_left()
            with pytest.raises(StoreUnavailableError):
                host.store.stats()
        nth += 1
    assert 3 <= nth


@both_loops
@pytest.mark.parametrize("at", ["read", "scatter", "recheck"])
async def test_load_cancelled_anywhere_returns_once_nothing_writes(at: str) -> None:
    """The host may use the blocks for others the moment it is back."""
    gate = Gate()
    host = Host(FaultPlan(Fault(at, gate)))
    async with host.cache() as cache:
        await cache.save(KEYS, range(6)).committed
        async with anyio.create_task_group() as group:
            group.start_soon(cache.load, KEYS, range(20, 26))
            await anyio.to_thread.run_sync(gate.wait_reached)
            group.cancel_scope.cancel()
            gate.open()
        assert 0 == len(host.core._users)
        assert (await cache.load(KEYS, range(20, 26))).is_whole
    host.check_left()


@both_loops
async def test_cancelled_load_does_not_wait_for_the_store() -> None:
    """As long as nothing writes to its blocks, they are the host's again at once."""
    gate = Gate()
    host = Host(FaultPlan(Fault("read", gate)))
    async with host.cache() as cache:
        await cache.save(KEYS, range(6)).committed
        async with anyio.create_task_group() as group:
            group.start_soon(cache.load, KEYS, range(20, 26))
            await anyio.to_thread.run_sync(gate.wait_reached)
            group.cancel_scope.cancel()
        assert 0 == len(host.core._users)
        gate.open()
        why = {"direction": "load", "reason": Reason.WITHDRAWN}
        total = host.core._counters.total
        assert 6 == total("ucm_settled_parts_total", **why)  # not its deadline
    host.check_left()


@both_loops
@pytest.mark.parametrize("at", ["reserve", "gather", "seal", "commit"])
async def test_save_cancelled_anywhere_gives_all_back(at: str) -> None:
    """Its blocks are released and its slots given back, wherever it was."""
    gate = Gate()
    host = Host(FaultPlan(Fault(at, gate)))
    async with host.cache() as cache:
        save = cache.save(KEYS, range(6))
        await anyio.to_thread.run_sync(gate.wait_reached)
        save.cancel()
        end = await save.committed
        assert (OutcomeKind.CANCELLED, Reason.WITHDRAWN) == (end.kind, end.reason)
        gate.open()
        await save.source_released
        await see_that_nothing_is_left(host, cache)
        assert 0 == await cache.match(KEYS)  # nobody finds what was not stored
    host.check_left()


@both_loops
async def test_who_is_cancelled_while_awaiting_a_save_leaves_it_alone() -> None:
    """The others who await it hear of its end, and it is stored."""
    gate = Gate()
    host = Host(FaultPlan(Fault("commit", gate)))
    async with host.cache() as cache:
        save = cache.save(KEYS, range(6))
        await anyio.to_thread.run_sync(gate.wait_reached)
        with anyio.move_on_after(0):
            await save.committed
        left = len(save._transfer.over._waiters)
        gate.open()
        assert 0 == left
        assert (await save.committed).is_whole
        save.cancel()  # too late: it is nothing
        assert 6 == await cache.match(KEYS)
    host.check_left()


async def test_load_cancelled_twice_still_waits_for_the_copy() -> None:
    """A loop can cancel a task that cleans up already; its blocks stay ours."""
    gate = Gate()
    host = Host(FaultPlan(Fault("scatter", gate)))
    async with host.cache() as cache:
        await cache.save(KEYS, range(6)).committed
        task = asyncio.create_task(cache.load(KEYS, range(20, 26)))
        await anyio.to_thread.run_sync(gate.wait_reached)
        for _ in range(3):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 == len(host.core._users)
    host.check_left()


class TestCut:
    """Tasks that are cancelled by asyncio's own means, which know no scope that shields."""

    def test_task_cancelled_again_and_again_closes_all(self) -> None:
        """R-42: a cache that a task leaves is closed behind it, and not left to nobody."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)))

        async def serve() -> None:
            async with host.cache() as cache:
                await cache.save(KEYS, range(6)).committed

        async def main() -> None:
            task = asyncio.create_task(serve())
            await anyio.to_thread.run_sync(gate.wait_reached)
            await cancel_often(task)
            assert not task.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert set() == our_threads()

        with leaving_nothing(host):
            run("asyncio", main)

    def test_task_cancelled_while_it_opens_leaves_nothing(self) -> None:
        """R-42: what a thread opens then, for nobody, is closed."""
        host, opens, goes_on = Host(), threading.Event(), threading.Event()

        def open_core():
            opens.set()
            assert goes_on.wait(LIMIT_S)
            return host.open_core()

        async def main() -> None:
            task = asyncio.create_task(Opening(open_core).__aenter__())
            await anyio.to_thread.run_sync(opens.wait)
            await cancel_often(task)
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

        with leaving_nothing(host):
            run("asyncio", main)


async def cancel_often(task: "asyncio.Task[Any]") -> None:
    """Cancel a task whenever it waits, a few times over."""
    for _ in range(5):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)


@both_loops
async def test_failed_open_closes_what_was_opened() -> None:
    """A host that cannot open the cache holds neither threads nor the store."""
    host = Host(make_device=Unpinnable)
    with pytest.raises(ConfigError, match="too small"):
        async with host.cache():
            raise AssertionError
    with pytest.raises(StoreUnavailableError):
        host.store.stats()
    host.check_left()
