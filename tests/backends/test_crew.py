# SPDX-License-Identifier: Apache-2.0
"""Threads that may hang: bounded, in turns, and safe to leave or to wait for."""

import asyncio
import threading

import anyio
import pytest

from tests.clocks import no_threads
from ucm.backends._crew import Crew
from ucm.testing.faults import Gate

pytestmark = pytest.mark.asyncio


async def reached(gate):
    """Wait until a thread stands at a gate, and let the loop go on meanwhile."""
    await asyncio.to_thread(gate.wait_reached)


async def hang_in(crew, gate):
    """Have a thread stand at a gate, and leave it there when cancelled."""
    await crew.run([None], lambda item: gate(), [None], leave=True)


class TestRun:
    async def test_results_come_in_order_of_items(self):
        """Whoever works on which: results lie beside their items."""
        crew, results = Crew(3, "crew"), [0] * 100
        await crew.run(range(100), lambda item: item * 2, results)
        assert [2 * item for item in range(100)] == results
        assert await crew.aclose()

    async def test_threads_are_bounded(self):
        """A hundred items and four calls never have more than three threads."""
        crew, seen = Crew(3, "crew"), set()

        def work(item):
            seen.add(threading.get_ident())

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(crew.run, range(25), work, [None] * 25)
        assert 1 <= len(seen) <= 3
        await crew.aclose()

    async def test_items_are_for_the_threads_that_the_system_starts(self):
        """One that could not be started was counted as if it were there, and ended the agent."""
        crew, results = Crew(2, "crew"), [0, 0]
        await crew.run([1], lambda item: item, [0])
        with no_threads("crew"):
            await crew.run([1, 2], lambda item: item, results)
        assert [1, 2] == results
        await crew.run([1, 2], lambda item: item, results)
        assert 2 == len(crew._threads)
        assert await crew.aclose()

    async def test_long_batch_does_not_keep_a_short_one_waiting(self):
        """Batches take turns item by item."""
        crew, gate, order = Crew(1, "crew"), Gate(), []

        def work(item):
            if item == 0:
                gate()
            order.append(item)

        async with anyio.create_task_group() as group:
            group.start_soon(crew.run, range(10), work, [None] * 10)
            await reached(gate)
            group.start_soon(crew.run, [99], work, [None])
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert 1 >= order.index(99)
        await crew.aclose()

    async def test_error_of_one_item_is_told_when_all_are_through(self):
        """A bug is raised, and nobody works on behind the end of the call."""
        crew, results = Crew(2, "crew"), [0] * 4

        def work(item):
            if item == 1:
                raise ZeroDivisionError
            return item

        with pytest.raises(ZeroDivisionError):
            await crew.run(range(4), work, results)
        assert [0, 0, 2, 3] == results
        await crew.run([5], work, results)
        assert 5 == results[0]
        await crew.aclose()

    async def test_panic_of_native_code_costs_no_thread(self):
        """What is no Exception is told like a bug, however often it comes; others are served."""

        class PanicException(BaseException):
            """No error that anybody expects."""

        def work(item):
            if item:
                raise PanicException("at the disco")

        crew = Crew(1, "crew")
        for leave in (False, True):
            with pytest.raises(RuntimeError, match="PanicException"):
                await crew.run([1], work, [None], leave=leave)
        await crew.run([0], work, [None], leave=True)
        assert 0 == crew.num_hung
        assert await crew.aclose()


class TestRoom:
    async def test_items_come_behind_those_that_fill_the_room(self):
        """Threads are free, and what has no bytes passes by: who came first goes first."""
        crew, gate, begun = Crew(6, "crew", most_bytes=8), Gate(), []

        def work(item):
            begun.append(item)
            if item == "first":
                gate()

        async def run(name, nbytes):
            await crew.run([name] * 2, work, [None] * 2, nbytes=nbytes)

        async with anyio.create_task_group() as group:
            group.start_soon(run, "first", 4)
            await reached(gate)
            group.start_soon(run, "second", 1)
            await crew.run(["other"] * 100, work, [None] * 100)
            early = list(begun)
            gate.open()
        assert "second" not in early
        assert 2 == begun.count("second")
        assert await crew.aclose()

    async def test_larger_item_goes_by_itself(self):
        """One of more than there is room for finds its turn like any other."""
        crew, lock, together = Crew(4, "crew", most_bytes=8), threading.Lock(), []

        def work(item):
            together.append(lock.acquire(blocking=False))
            lock.release()

        await crew.run(range(50), work, [None] * 50, nbytes=9)
        assert [True] * 50 == together
        assert await crew.aclose()

    async def test_thread_for_which_no_item_is_left_waits_for_no_room(self):
        """It goes on to others, which need none."""
        crew, results = Crew(2, "crew", most_bytes=1), ["not begun"]
        first, last = Gate(), Gate()

        async def fill():
            gates = [first, last]
            await crew.run(gates, lambda gate: gate(), [None] * 2, nbytes=1)

        async with anyio.create_task_group() as group:
            group.start_soon(fill)
            await reached(first)
            while not crew._room._turn.locked():  # the other thread waits for room
                await anyio.lowlevel.checkpoint()
            first.open()
            await reached(last)
            with anyio.move_on_after(60):
                await crew.run([None], lambda _: "begun", results)
            last.open()
        assert ["begun"] == results
        assert await crew.aclose()

    async def test_what_waits_for_room_can_be_cancelled(self):
        """Nobody works on it: there is nothing to wait for."""
        crew, gate = Crew(2, "crew", most_bytes=1), Gate()

        async def run(work, results):
            await crew.run([None], work, results, nbytes=1)

        async with anyio.create_task_group() as group:
            group.start_soon(run, lambda item: gate(), [0])
            await reached(gate)
            results = ["not begun"]
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(run, lambda item: "begun", results)
                while not crew._room._turn.locked():  # the other thread has come
                    await anyio.lowlevel.checkpoint()
                waiting.cancel_scope.cancel()
            gate.open()
        assert await crew.aclose()
        assert ["not begun"] == results


class TestCancelled:
    async def test_call_ends_when_nobody_works_on_it(self):
        """What is under way is waited for, and nothing else is begun."""
        crew, gate, results, ended = Crew(1, "crew"), Gate(), [None] * 3, []

        def work(item):
            gate()
            return item

        async def call():
            try:
                await crew.run([7, 8, 9], work, results)
            finally:
                ended.append(list(results))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await reached(gate)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            assert [] == ended
            gate.open()
        assert [[7, None, None]] == ended
        await crew.aclose()

    async def test_left_call_ends_at_once_and_is_counted(self):
        """X-14: hung threads are bounded and counted; once all hang nothing is begun."""
        crew, gate = Crew(2, "crew"), Gate()
        for number in (1, 2):
            with anyio.move_on_after(5.0) as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(hang_in, crew, gate)
                    await reached(gate)
                    gate.reached.clear()
                    group.cancel_scope.cancel()
            assert not scope.cancelled_caught
            assert number == crew.num_hung
        results = ["not begun"]
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: crew.run([1], lambda item: item, results, leave=True)
            )
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert ["not begun"] == results
        assert await crew.aclose()
        assert 0 == crew.num_hung

    async def test_calls_that_were_given_up_leave_nothing_behind(self):
        """X-14: what no thread came to has no place in the queue, which holds its memory."""
        crew, gate, ended = Crew(1, "crew"), Gate(), []
        async with anyio.create_task_group() as group:
            group.start_soon(hang_in, crew, gate)
            await reached(gate)
            group.start_soon(crew.run, [7], ended.append, [None])
            await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await crew.run([1, 2], ended.append, [None, None], leave=True)
            assert 1 == crew._queue.qsize()
            gate.open()
        assert [7] == ended
        assert await crew.aclose()

    async def test_hung_thread_does_not_hold_up_the_end(self):
        """It is left behind, and told."""
        crew, gate = Crew(1, "crew"), Gate()
        async with anyio.create_task_group() as group:
            group.start_soon(hang_in, crew, gate)
            await reached(gate)
            group.cancel_scope.cancel()
        assert not await crew.aclose(seconds=0.01)
        gate.open()
        assert await crew.aclose()

    async def test_memory_of_a_caller_who_has_gone_is_not_used(self):
        """X-14: what a hung thread has read comes too late, and is thrown away."""
        crew, gate, used = Crew(1, "crew"), Gate(), []

        def work(item):
            gate()
            mine = crew.gate
            used.append((mine.is_left, mine.touch(lambda: used.append("touched"))))

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: crew.run([1], work, [None], leave=True))
            await reached(gate)
            group.cancel_scope.cancel()
        gate.open()
        assert await crew.aclose()
        assert [(True, None)] == used

    async def test_caller_does_not_go_amid_a_copy(self):
        """While a thread copies to its memory, a cancelled call waits for the copy."""
        crew, gate, target = Crew(1, "crew"), Gate(), []

        def copy():
            gate()
            target.append("copied")

        def opened():
            gate.wait_reached()
            gate.open()

        opener = threading.Timer(0.05, opened)
        async with anyio.create_task_group() as group:
            work = lambda item: crew.gate.touch(copy)
            group.start_soon(lambda: crew.run([1], work, [None], leave=True))
            await reached(gate)
            opener.start()
            group.cancel_scope.cancel()
        assert ["copied"] == target
        opener.join()
        await crew.aclose()


class TestClose:
    async def test_call_under_way_ends(self):
        """What was begun is done, nothing else is, and nobody waits for ever."""
        crew, gate, results = Crew(1, "crew"), Gate(), [None] * 3

        def work(item):
            gate()
            return item

        async with anyio.create_task_group() as group:
            group.start_soon(crew.run, [7, 8, 9], work, results)
            await reached(gate)
            group.start_soon(crew.run, [1], work, [None])
            group.start_soon(crew.aclose)
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert [7, None, None] == results

    async def test_nothing_is_begun_behind_the_end(self):
        """Whoever goes on with another call has it end at once, and no thread comes of it."""
        crew, results = Crew(1, "crew"), [None]
        await crew.run([5], lambda item: item, [None])
        assert await crew.aclose()
        await crew.run([7], lambda item: item, results)
        assert [None] == results
        assert await crew.aclose(seconds=0)


class TestJob:
    async def test_job_goes_on_without_those_who_wait(self):
        """Whoever waits may go; its end is there for the others."""
        crew, gate = Crew(1, "crew"), Gate()

        def work():
            gate()
            return 5

        job = crew.start(work)
        async with anyio.create_task_group() as group:
            group.start_soon(job.wait)
            await reached(gate)
            group.cancel_scope.cancel()
        assert (False, None) == (job.is_over, job.result)
        gate.open()
        await job.wait()
        assert (True, 5, None) == (job.is_over, job.result, job.error)
        await crew.aclose()

    async def test_error_of_a_job_is_kept(self):
        """It has an end, and no result."""
        crew = Crew(1, "crew")
        job = crew.start(lambda: 1 // 0)
        await job.wait()
        assert isinstance(job.error, ZeroDivisionError)
        assert None is job.result
        await crew.aclose()

    async def test_job_that_hangs_is_no_thread_for_others(self):
        """X-14: where one hangs in a job, and the others for somebody who has gone, a call ends
        at once; behind the job it is served again."""
        crew, gate, other = Crew(2, "crew"), Gate(), Gate()
        job = crew.start(gate)
        await reached(gate)
        async with anyio.create_task_group() as group:
            group.start_soon(hang_in, crew, other)
            await reached(other)
            group.cancel_scope.cancel()
        results = ["not begun"]
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: crew.run([5], lambda item: item, results, leave=True)
            )
            await anyio.wait_all_tasks_blocked()
            assert 1 == crew.num_hung
            gate.open()
        assert ["not begun"] == results
        await job.wait()
        await crew.run([5], lambda item: item, results, leave=True)
        assert [5] == results
        other.open()
        assert await crew.aclose()

    async def test_job_that_has_ended_needs_no_thread(self):
        """However many there were one after the other, one thread does them."""
        crew = Crew(4, "crew")
        for _ in range(4):
            await crew.start(lambda: None).wait()
        assert 1 == len(crew._threads)
        await crew.aclose()
