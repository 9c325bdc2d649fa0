# SPDX-License-Identifier: Apache-2.0
"""Blocking calls of the agent's loop, on threads."""

import asyncio
import contextlib
import gc
import threading
import weakref

import anyio
import pytest

from tests.clocks import no_threads
from ucm.agent.calls import ThreadCalls
from ucm.testing.faults import Gate

pytestmark = pytest.mark.asyncio
LIMIT_S = 60.0


@pytest.fixture
def calls():
    """Return what calls on two threads at most; they end with the test."""
    with ThreadCalls(2) as calls:
        yield calls


async def reached(gate):
    """Wait until a thread stands at a gate, and let the loop go on meanwhile."""
    await asyncio.to_thread(gate.wait_reached)


class TestThreadCalls:
    async def test_call_that_has_begun_is_waited_for_when_cancelled(self, calls):
        """What a slab's verb returns is not lost with who asked for it: it may hold slots."""
        gate, told = Gate(), []

        async def ask():
            told.append(await calls(lambda: gate() or "done"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await reached(gate)
            tasks.cancel_scope.cancel()
            gate.open()
        assert ["done"] == told

    async def test_call_that_waits_for_a_thread_is_given_up_when_cancelled(self):
        """Nobody waits for all calls before its own, and it is never made."""
        gate, made = Gate(), []
        with ThreadCalls(1) as calls:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(calls, gate)
                await reached(gate)
                with anyio.move_on_after(0):
                    await calls(lambda: made.append(1))
                gate.open()
            await calls(lambda: None)
        assert not made

    @pytest.mark.parametrize("error", [OSError("no"), SystemExit(1)])
    async def test_error_is_raised_to_who_asked_and_keeps_nothing(self, calls, error):
        """Whatever a call raises; where the collector looks rarely, no frame stays with it."""
        left = []

        def fail():
            mine = Gate()
            left.append(weakref.ref(mine))
            raise error

        gc.disable()
        try:
            with pytest.raises(type(error)) as raised:
                await calls(fail)
            assert error is raised.value
            del raised
            error.__traceback__ = None
            await calls(lambda: None)
            assert left[0]() is None
        finally:
            gc.enable()

    async def test_error_takes_along_what_its_call_had(self, calls):
        """A slab that could not be opened kept descriptors until the collector came: each further
        try of an engine found fewer."""
        left = []

        def fail():
            mine = Gate()
            left.append(weakref.ref(mine))
            raise OSError("no")

        gc.disable()
        try:
            with contextlib.suppress(OSError):
                await calls(fail)
            await calls(lambda: None)
            assert left[0]() is None
        finally:
            gc.enable()

    async def test_system_without_threads_is_asked_again(self, calls):
        """A call behind one that had none was waited for for ever, and the agent's end with it."""
        with no_threads("ucm-calls"), pytest.raises(RuntimeError):
            await calls(lambda: None)
        assert "done" == await asyncio.wait_for(calls(lambda: "done"), LIMIT_S)

    async def test_calls_share_the_threads_that_the_system_starts(self, calls):
        """An agent goes on with fewer."""
        gate, told = Gate(), []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(calls, gate)
            await reached(gate)
            with no_threads("ucm-calls"):
                tasks.start_soon(calls, lambda: told.append(1))
                await anyio.wait_all_tasks_blocked()
            gate.open()
        assert [1] == told

    async def test_threads_are_as_many_as_are_needed_and_end_with_it(self):
        """One serves who asks one call after the other, and none is left behind an agent."""
        gates, seen = [Gate(), Gate()], set()
        with ThreadCalls(2) as calls:
            first = await calls(threading.current_thread)
            assert first is await calls(threading.current_thread)
            async with anyio.create_task_group() as tasks:
                for gate in gates:
                    tasks.start_soon(
                        calls,
                        lambda gate=gate: (
                            seen.add(threading.current_thread()) or gate()
                        ),
                    )
                    await reached(gate)
                tasks.start_soon(calls, lambda: seen.add(threading.current_thread()))
                for gate in gates:
                    gate.open()
        assert 2 == len(seen)
        assert not any(thread.is_alive() for thread in seen)
