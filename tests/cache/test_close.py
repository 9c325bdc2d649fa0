# SPDX-License-Identifier: Apache-2.0
"""What becomes of work that is pending when a cache, or a host's loop, ends."""

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

from tests.cache.kit import LIMIT_S, Host, both_loops, keys_of, leaving_nothing, run
from tests.clocks import RefusingThreads
from ucm.cache import aio
from ucm.cache.aio import Opening
from ucm.cache.sync import Cache
from ucm.errors import PipelineClosedError, PipelineError, StoreUnavailableError
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.threads import Threads

pytestmark = pytest.mark.anyio

BRIEF = {"timeout": {"shutdown": 0.05}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "refused", ["ucm-ask", "ucm-loop", "ucm-save-copy", "ucm-load-copy"]
)
def test_cache_for_which_the_system_has_no_thread_leaves_nothing(refused: str) -> None:
    """It says so when it is opened, and its host closes it as ever."""
    host = Host(config=BRIEF, threads=RefusingThreads(refused))
    with leaving_nothing(host), pytest.raises(PipelineClosedError):
        host.open_core()
    assert host.core is not None
    host.core.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        host.store.match([bytes(32)])


class EndsSlowly(Threads):
    """Its loops wait with their end until somebody knows."""

    def __init__(self) -> None:
        self.is_known = threading.Event()

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop whose thread goes on for as long."""
        loop = asyncio.new_event_loop()
        close = loop.close

        def close_late() -> None:
            assert self.is_known.wait(LIMIT_S)
            close()

        loop.close = close_late
        return loop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_cache_whose_store_raises_as_it_starts_is_not_open() -> None:
    """R-81: it would be open, and each save and load would wait for all its time."""
    threads = EndsSlowly()
    host = Host(config=BRIEF, threads=threads)
    host.store.watch = _die
    with pytest.raises(PipelineClosedError, match="did not start"):
        host.open_core()
    threads.is_known.set()
    host.join()
    host.check_left()


@both_loops
class TestClose:
    async def test_close_drains_what_is_under_way(self) -> None:
        """Who leaves the block right after a save finds it stored the next time."""
        host = Host()
        async with host.cache() as cache:
            saves = [
                cache.save(keys_of(4, seed), range(4), wait_for_room=seed > 3)
                for seed in range(8)
            ]
        assert {OutcomeKind.COMMITTED} == {
            save._transfer.over.result().kind for save in saves
        }
        host.check_left()

    def test_close_ends_what_it_has_no_time_for(self, loop: str) -> None:
        """Every awaiter hears of an end within the deadline, as a value."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)), BRIEF)

        async def main() -> None:
            ends = []

            async def wait(save) -> None:
                await save.source_released
                ends.append(await save.committed)

            async with anyio.create_task_group() as group, host.cache() as cache:
                for seed in range(3):
                    group.start_soon(wait, cache.save(keys_of(2, seed), [0, 1]))
                await anyio.to_thread.run_sync(gate.wait_reached)
            assert {OutcomeKind.CANCELLED} == {end.kind for end in ends}
            assert 3 == len(ends)
            gate.open()

        run(loop, main)
        host.join()
        host.check_left()

    def test_save_in_line_is_ended_by_close(self, loop: str) -> None:
        """It never began; its blocks are free and its end is told."""
        gate = Gate()
        config = {**BRIEF, "queue": {"tickets": 1}}
        host = Host(FaultPlan(Fault("commit", gate)), config)

        async def main() -> None:
            async with host.cache() as cache:
                cache.save(keys_of(1), [0], wait_for_room=True)
                await anyio.to_thread.run_sync(gate.wait_reached)
                second = cache.save(keys_of(1, 1), [1], wait_for_room=True)
            end = second._transfer.over.result()
            assert (OutcomeKind.CANCELLED, Reason.CLOSED) == (end.kind, end.reason)
            gate.open()

        run(loop, main)
        host.join()
        host.check_left()

    def test_question_that_hangs_keeps_the_store_open(self, loop: str) -> None:
        """A store is not closed under somebody who is in it; who asked hears of it."""
        gate = Gate()
        host = Host(FaultPlan(Fault("match", gate)), BRIEF)

        async def main() -> None:
            async with anyio.create_task_group() as group, host.cache() as cache:
                group.start_soon(self.expect_closed, cache)
                await anyio.to_thread.run_sync(gate.wait_reached)
            assert 0 == host.store.stats().committed_blocks  # open
            gate.open()

        run(loop, main)
        host.join()

    @staticmethod
    async def expect_closed(cache) -> None:
        """Ask, and be told that nobody will answer."""
        with pytest.raises(PipelineClosedError):
            await cache.match(keys_of(2))


class TestTold:
    def test_end_is_told(self) -> None:
        """Who waits for a save hears of it, without asking again."""
        host = Host(config={"timeout": {"save": 10.0, "stuck": 10.0}})
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            assert cache.save(keys_of(2), range(2)).wait_committed().is_whole

    @both_loops
    def test_two_who_close_at_once_tell_everybody(self, loop: str) -> None:
        """The second returns with the first, and whoever waits hears of the end, not of its
        own deadline, which is minutes away."""
        gate, late = Gate(), {"timeout": {"save": 600.0, "shutdown": 0.05}}
        host = Host(FaultPlan(Fault("reserve", gate)), late)

        async def main() -> None:
            opening = Opening(host.open_core)
            cache = await opening.__aenter__()
            save = cache.save(keys_of(2), range(2))

            async def wait() -> None:
                end = await save.committed
                assert OutcomeKind.CANCELLED is end.kind

            async def close() -> None:
                await opening.__aexit__(None, None, None)
                assert save.is_over

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.to_thread.run_sync(gate.wait_reached)
                group.start_soon(close)
                group.start_soon(close)
            gate.open()

        run(loop, main)
        host.join()
        host.check_left()


@both_loops
class TestEndOfTheLoop:
    def test_loop_that_ends_leaves_its_saves_to_be_stored(self, loop: str) -> None:
        """A host that stops in the middle loses nothing that it had asked for."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)))
        opening = Opening(host.open_core)

        async def main() -> None:
            cache = await opening.__aenter__()
            cache.save(keys_of(4), range(4))
            await anyio.to_thread.run_sync(gate.wait_reached)

        with leaving_nothing(host):
            run(loop, main)
            gate.open()
            (transfer,) = host.core.open_transfers() or [None]
            over = threading.Event()
            if transfer is not None and transfer.over.subscribe(over.set):
                assert over.wait(60.0)
            assert 4 == host.store.stats().committed_blocks
            host.core.close()

    async def test_tasks_that_die_with_the_loop_leave_nothing(self) -> None:
        """A loop that cancels all it has ends loads, and drains saves, in time."""
        gate = Gate()
        host = Host(FaultPlan(Fault("read", gate)))

        async def serve() -> None:
            async with host.cache() as cache:
                await cache.save(keys_of(4), range(4)).committed
                cache.save(keys_of(4, 1), range(4))
                await cache.load(keys_of(4), range(8, 12))

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await anyio.to_thread.run_sync(gate.wait_reached)
            group.cancel_scope.cancel()
            gate.open()
        host.check_left()


@both_loops
class TestDeadPipeline:
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_everybody_hears_when_our_loop_dies(self, loop: str) -> None:
        """What is under way fails, what comes later is refused, and close ends."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)), BRIEF)

        async def main() -> None:
            async with host.cache() as cache:
                save = cache.save(keys_of(2), range(2))
                await anyio.to_thread.run_sync(gate.wait_reached)
                host.core._runtime._pipeline._take_in = _die
                host.core._runtime._loop.wake()
                end = await save.committed
                gate.open()
                assert (OutcomeKind.FAILED, Reason.RUNTIME_FAILED) == (
                    end.kind,
                    end.reason,
                )
                later = await cache.save(keys_of(2, 1), range(2)).committed
                assert (OutcomeKind.REFUSED, Reason.FAILED) == (
                    later.kind,
                    later.reason,
                )
                assert "died" in (await cache.statistics()).failure

        run(loop, main)
        host.join()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    async def test_save_of_which_our_loop_dies_is_over_at_once(self) -> None:
        """Before it is a ticket: whoever waits hears of it, and not after minutes."""
        host = Host(config=BRIEF)
        async with host.cache() as cache:
            host.core._digest = b"no digest"
            end = await cache.save(keys_of(2), range(2)).committed
            assert (OutcomeKind.REFUSED, Reason.FAILED) == (end.kind, end.reason)
            assert "could not be taken in" in host.core._runtime.failure
        host.check_left()


def _die(*_: object) -> None:
    raise KeyError


class TestWrongPlace:
    async def test_cache_is_not_awaited_on_another_loop(self) -> None:
        """Nobody would be woken there: it is told at once."""
        host = Host()
        async with host.cache() as cache:

            def elsewhere() -> None:
                for call in (cache.match(keys_of(1)), cache.load(keys_of(1), [1])):
                    with pytest.raises(PipelineError, match="another loop"):
                        asyncio.run(call)

            await anyio.to_thread.run_sync(elsewhere)
            assert 0 == (await cache.statistics()).open_transfers
        host.check_left()

    @both_loops
    def test_cache_is_not_awaited_on_the_next_loop_of_its_thread(
        self, loop: str
    ) -> None:
        """A load would write to blocks whose host has an error of its loop's instead."""
        host = Host()

        async def elsewhere() -> None:
            for call in (cache.match(keys_of(1)), cache.load(keys_of(1), [1])):
                with pytest.raises(PipelineError, match="another loop"):
                    await call

        with leaving_nothing(host), asyncio.Runner() as own:
            opening = Opening(host.open_core)
            cache = own.run(opening.__aenter__())
            run(loop, elsewhere)
            own.run(cache.flush())
            own.run(opening.__aexit__(None, None, None))

    @both_loops
    def test_cache_of_a_loop_that_has_ended_is_closed_on_another(
        self, loop: str
    ) -> None:
        """Whoever comes behind it lets go of memory and threads."""
        host = Host()
        opening = Opening(host.open_core)

        async def close() -> None:
            await opening.__aexit__(None, None, None)

        with leaving_nothing(host):
            asyncio.run(opening.__aenter__())
            run(loop, close)

    def test_waiters_of_a_closed_loop_are_in_nobodys_way(self) -> None:
        """A loop that was closed with a task that waits hears no more of it; all is closed."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)))
        opening, first = Opening(host.open_core), asyncio.new_event_loop()

        async def committed(cache: aio.Cache) -> None:
            await cache.save(keys_of(1), [1]).committed

        async def begin() -> None:
            cache = await opening.__aenter__()
            waiting.append(asyncio.create_task(committed(cache)))
            await asyncio.to_thread(gate.wait_reached)

        async def close() -> None:
            await opening.__aexit__(None, None, None)

        waiting: list[asyncio.Task[None]] = []
        with leaving_nothing(host):
            first.run_until_complete(begin())
            first.close()
            gate.open()
            asyncio.run(close())
        waiting[0]._log_destroy_pending = False

    def test_closed_runtime_serves_no_more(self) -> None:
        """A host that begins to serve after the end is told so."""
        host = Host()
        core, opened = host.open_core()
        opened.close()
        with pytest.raises(PipelineClosedError):
            asyncio.run(core._runtime.serve(lambda: None))

    def test_store_is_closed_with_the_cache(self) -> None:
        """Whoever opened it; twice is as good as once."""
        host = Host()
        core, opened = host.open_core()
        opened.close()
        core.close()
        with pytest.raises(StoreUnavailableError):
            host.store.stats()
