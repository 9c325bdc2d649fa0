# SPDX-License-Identifier: Apache-2.0
"""Calls of a row come one after the other, and each of them has an end."""

import anyio
import pytest

from tests.backends.test_crew import reached
from ucm.backends._crew import Crew
from ucm.testing.faults import Gate


@pytest.mark.asyncio
class TestRow:
    async def test_calls_of_a_row_come_one_after_the_other(self):
        """Both would end together else, and threads do nothing until what came of both is looked at;
        what is of no row, or another one, takes turns with them."""
        crew, gate, order = Crew(1, "crew"), Gate(), []

        def work(item):
            if not order:
                order.append("begun")
                gate()
            order.append(item)

        async def run(item, count, row):
            await crew.run([item] * count, work, [None] * count, row=row)

        async with anyio.create_task_group() as group:
            group.start_soon(run, "first", 5, "put")
            await reached(gate)
            group.start_soon(run, "second", 5, "put")
            group.start_soon(run, "read", 1, "get")
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert order.index("read") <= 3
        order.remove("read")
        assert ["begun", *["first"] * 5, *["second"] * 5] == order
        assert not crew._rows
        assert await crew.aclose()

    async def test_call_whose_forerunner_was_given_up_is_begun(self):
        """It has the turns that were its own, and those of who has gone."""
        crew, gate, results = Crew(1, "crew"), Gate(), [0] * 3
        async with anyio.create_task_group() as group:
            first = anyio.CancelScope()

            async def give_up():
                with first:
                    await crew.run(range(5), lambda item: gate(), [None] * 5, row="put")

            group.start_soon(give_up)
            await reached(gate)
            group.start_soon(
                lambda: crew.run([1, 2, 3], lambda item: item, results, row="put")
            )
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            gate.open()
        assert [1, 2, 3] == results
        assert await crew.aclose()

    async def test_thread_that_finds_all_of_the_call_before_taken_begins_its_own(self):
        """It comes to it once: nobody else would."""
        crew, gate, results = Crew(3, "crew", most_bytes=1), Gate(), [0]
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: crew.run(
                    [1, 2], lambda item: gate(), [0, 0], nbytes=1, row="put"
                )
            )
            await reached(gate)
            while not crew._room._turn.locked():  # the other thread waits for room
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(60):
                await crew.run([7], lambda item: item, results, row="put")
            gate.open()
        assert [7] == results
        assert await crew.aclose()

    async def test_more_calls_may_wait_than_there_are_calls_of_calls(self):
        """A host's own may be thousands, and a thread that fails goes, with all that waits."""
        crew, gate, told = Crew(1, "crew"), Gate(), [[0] * 8 for _ in range(1500)]

        async def run(results):
            await crew.run([1] * 8, lambda item: gate() or item, results, row="get")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for results in told:
                    group.start_soon(run, results)
                await reached(gate)
                await anyio.wait_all_tasks_blocked()
                gate.open()
        assert [[1] * 8] * 1500 == told
        assert await crew.aclose()

    @pytest.mark.parametrize("most_bytes", [0, 2])
    async def test_each_call_of_a_row_has_an_end(self, most_bytes):
        """However threads and items are numbered."""
        crew = Crew(3, "crew", most_bytes)
        told = [[0] * (1 + number % 7) for number in range(100)]

        async def run(results):
            items = range(1, 1 + len(results))
            await crew.run(items, lambda item: item, results, nbytes=1, row="get")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for results in told:
                    group.start_soon(run, results)
        assert all(list(range(1, 1 + len(each))) == each for each in told)
        assert await crew.aclose()
