# SPDX-License-Identifier: Apache-2.0
"""What runs the segments of lanes: results come back once, or never when given up."""

import asyncio
import contextlib

import anyio
import pytest

from tests.pipeline.kit import TIMEOUT, HandFence, make_ticket
from ucm.devices.events import DoneFence
from ucm.errors import DeviceError
from ucm.pipeline.items import Item
from ucm.pipeline.runner import Runner
from ucm.pipeline.stage import Chain, CopyStage, FenceStage, LoopStage
from ucm.pipeline.tickets import Direction

pytestmark = pytest.mark.asyncio


class Held(LoopStage):
    """Waits until the test lets it pass."""

    name = "held"

    def __init__(self):
        self.gate = anyio.Event()

    async def run(self, given):
        """Wait."""
        await self.gate.wait()
        return given


class Passing(LoopStage):
    """Has nothing to wait for."""

    name = "passing"

    def try_now(self, given):
        """Let it pass."""
        return given

    async def run(self, given):
        """Fail the test."""
        raise AssertionError("it was waited for")


class Fenced(FenceStage):
    """Waits for the item's fence."""

    name = "fenced"
    awaits_copy = True

    def awaited(self, given):
        """Return the fence."""
        return given.fence

    def passed(self, given):
        """Let it pass."""
        return given


class Mute(HandFence):
    """A fence that calls nobody."""

    def call_when_over(self, callback):
        """Refuse."""
        return False


class Broken(HandFence):
    """A fence that raises what no fence may."""

    def call_when_over(self, callback):
        """Raise."""
        raise ZeroDivisionError

    def is_done(self):
        """Raise."""
        raise ZeroDivisionError


class Copied(CopyStage):
    """Runs on a copy thread."""

    name = "copied"

    def __init__(self, copy=None):
        self.copy = copy

    def run(self, given):
        """Have a copy under way, if there is one."""
        given.copy = self.copy
        return given


class HandThread:
    """A copy thread whose jobs end when the test says so."""

    def __init__(self):
        self.jobs = []

    def put(self, function, argument, died):
        """Keep a job."""
        self.jobs.append((function, argument))

    def work(self):
        """Run the jobs."""
        for function, argument in self.jobs:
            function(argument)


class Rig:
    """A runner, and what it told."""

    def __init__(self, group):
        self.thread = HandThread()
        self.woken, self.handed = [], []
        copy = {Direction.SAVE: {"copy": self.thread}}
        self.runner = Runner(copy, group, lambda: self.woken.append(True))

    def over(self, item):
        """Take an item back, as its lane."""
        self.handed.append(item)

    def start(self, stage, fence=None, then=None, clock=None, ticket=None):
        """Start a run of one stage, perhaps in front of another; return it."""
        ticket = ticket or make_ticket()
        if clock is not None:
            ticket.clock = clock
        item = Item(ticket, (), fence or DoneFence())
        chain = Chain.start(stage)
        item.segment = (chain.then(then) if then else chain).segments()[0]
        item.lane = self
        self.at_once = self.runner.start(item)
        return item


@contextlib.asynccontextmanager
async def rigged():
    """Yield a rig; then all its waits have to end."""
    with anyio.fail_after(TIMEOUT):
        async with asyncio.TaskGroup() as group:
            yield Rig(group)


class TestRunner:
    async def test_run_that_is_over_wakes_and_is_handed_back_once(self):
        """What ends wakes whoever serves the lanes, and is told to its lane once, there."""
        async with rigged() as rig:
            held = Held()
            waited, copied = rig.start(held), rig.start(Copied())
            rig.thread.work()
            held.gate.set()
            await anyio.wait_all_tasks_blocked()
            assert [True] == rig.woken  # once for both
            assert [] == rig.handed
            for _ in range(2):
                rig.runner.hand_back()
                assert [copied, waited] == rig.handed
            assert waited.is_over
            assert copied.is_over

    async def test_each_burst_wakes_once(self):
        """What ends before anybody looks wakes once; what ends behind that, once more."""
        async with rigged() as rig:
            for burst in (1, 2):
                runs = [rig.start(Copied()) for _ in range(3)]
                rig.thread.work()
                assert burst == len(rig.woken)
                rig.thread.jobs.clear()
                rig.runner.hand_back()
                assert runs == rig.handed[-3:]

    async def test_copy_that_is_quicker_than_the_loop_is_handed_back(self):
        """A copy thread may be through before the loop goes on: the lane hears of it
        once, as of any other."""
        async with rigged() as rig:
            rig.thread.put = lambda function, item, _: function(item)
            run = rig.start(Copied())
            assert not rig.at_once
            rig.runner.hand_back()
            assert [run] == rig.handed

    async def test_run_that_is_over_at_once_is_not_handed_back(self):
        """A lane that goes on with a run itself must not hear of it again."""
        async with rigged() as rig:
            rig.start(Passing())
            assert rig.at_once
            await anyio.wait_all_tasks_blocked()
            rig.runner.hand_back()
            assert [] == rig.handed
            assert [] == rig.woken

    async def test_run_that_was_given_up_is_not_heard_of(self):
        """A copy that ends after all, and a wait that was ended, count for nothing."""
        async with rigged() as rig:
            runs = [rig.start(stage) for stage in (Copied(), Held())]
            await anyio.wait_all_tasks_blocked()
            for run in runs:
                run.give_up()
            rig.thread.work()
            await anyio.wait_all_tasks_blocked()
            rig.runner.hand_back()
            assert [] == rig.handed

    @pytest.mark.parametrize("has_begun", [True, False])
    async def test_wait_that_was_given_up_ends(self, has_begun):
        """Nothing stays behind of a wait, nor of one that has not begun yet."""
        stage = Held()
        async with rigged() as rig:
            before = len(anyio.get_running_tasks())
            run = rig.start(stage)
            if has_begun:
                await anyio.wait_all_tasks_blocked()
            run.give_up()
            await anyio.wait_all_tasks_blocked()
            after = len(anyio.get_running_tasks())
            stage.gate.set()
        assert before == after


class TestFences:
    async def test_wait_for_a_fence_is_no_task_and_ends_on_the_loop(self):
        """The fence's own thread wakes the loop, which lets the item go on: one hop, and
        nothing that is made for the wait."""
        async with rigged() as rig:
            before, fence = len(anyio.get_running_tasks()), HandFence()
            run = rig.start(Fenced(), fence)
            assert not rig.at_once
            assert before == len(anyio.get_running_tasks())
            fence.open()
            assert [True] == rig.woken
            assert not run.is_over  # that is the loop's to say
            rig.runner.hand_back()
            assert [run] == rig.handed
            assert run.is_over

    @pytest.mark.parametrize("kind", [HandFence, Mute])
    async def test_fence_that_fails_ends_its_ticket(self, kind):
        """Nobody waits for ever for what never passes, whether or not it calls."""
        async with rigged() as rig:
            fence = kind()
            run = rig.start(Fenced(), fence)
            fence.fail(DeviceError("gone"))
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
                rig.runner.hand_back()
            assert [run] == rig.handed
            assert run.has_failed
            assert "gone" in run.ticket.outcome.error

    async def test_fence_that_calls_nobody_is_looked_at(self):
        """A fence of another's making may not call back: its item goes on even so."""
        async with rigged() as rig:
            fence = Mute()
            run = rig.start(Fenced(), fence)
            fence.open()
            while not rig.woken:
                await anyio.lowlevel.checkpoint()
            rig.runner.hand_back()
            assert [run] == rig.handed

    async def test_fence_of_a_run_that_was_given_up_is_not_heard_of(self):
        """An event that passes after all lets nothing go on that has left its lane."""
        async with rigged() as rig:
            fence = HandFence()
            rig.start(Fenced(), fence).give_up()
            fence.open()
            rig.runner.hand_back()
            assert [] == rig.handed

    async def test_loop_sleeps_while_a_copy_is_under_way(self):
        """What comes next waits for the copy: the loop is woken by its end, once, and not
        by the return of the call that has begun it."""
        async with rigged() as rig:
            copy = HandFence()
            run = rig.start(Copied(copy), then=Fenced())
            rig.thread.work()
            assert [] == rig.woken
            copy.open()
            assert [True] == rig.woken
            rig.runner.hand_back()
            assert [run] == rig.handed

    async def test_loop_that_is_awake_goes_on_with_a_copy_under_way(self):
        """A wake-up for something else takes the item along: its wait is the next stage's."""
        async with rigged() as rig:
            copy = HandFence()
            run = rig.start(Copied(copy), then=Fenced())
            rig.thread.work()
            rig.runner.hand_back()
            assert [run] == rig.handed
            copy.open()
            rig.runner.hand_back()
            assert [run] == rig.handed

    @pytest.mark.parametrize("copy", [None, Mute(), DoneFence()])
    async def test_loop_is_woken_where_no_copy_will_wake_it(self, copy):
        """No copy, one that calls nobody, one that is over: the loop hears at once."""
        async with rigged() as rig:
            rig.start(Copied(copy), then=Fenced())
            rig.thread.work()
            assert [True] == rig.woken

    async def test_wait_for_a_fence_is_told_with_its_time(self):
        """The log says how long an item has waited, though nothing of it ran meanwhile."""
        async with rigged() as rig:
            fence, now = HandFence(), [10.0]
            run = rig.start(Fenced(), fence, clock=lambda: now[0])
            now[0] = 13.0
            fence.open()
            rig.runner.hand_back()
            assert (10.0, 13.0, 3.0) == run.ticket.stage_times["fenced"]

    async def test_wait_for_a_copy_begins_with_it(self):
        """What the device takes is the wait's time, though the loop looks behind it only."""
        async with rigged() as rig:
            copy, now = HandFence(), [10.0]
            run = rig.start(Copied(copy), then=Fenced(), clock=lambda: now[0])
            rig.thread.work()
            now[0] = 12.0
            assert 10.0 == run.ticket.stage_times["fenced"][0]

    async def test_rows_that_wait_beside_each_other_wait_once(self):
        """A stage's seconds are those in which a ticket was in it, however many rows were."""
        async with rigged() as rig:
            fences, now, ticket = [HandFence() for _ in range(3)], [10.0], None
            for fence in fences:
                run = rig.start(Fenced(), fence, clock=lambda: now[0], ticket=ticket)
                ticket = run.ticket
            for fence in fences:
                now[0] += 1.0
                fence.open()
                rig.runner.hand_back()
            assert (10.0, 13.0, 3.0) == ticket.stage_times["fenced"]

    @pytest.mark.parametrize("stage", [Fenced, Copied])
    async def test_fence_that_breaks_its_word_ends_its_ticket(self, stage):
        """A fence of a host's own may raise what it must not: that ends its ticket, and
        neither the copy thread nor the loop."""
        async with rigged() as rig:
            fence = Broken()
            if stage is Fenced:
                run = rig.start(Fenced(), fence)
            else:
                run = rig.start(Copied(fence), fence, then=Fenced())
                rig.thread.work()
                rig.runner.hand_back()
                assert [run] == rig.handed
                (_, run.segment) = Chain.start(Copied()).then(Fenced()).segments()
                rig.runner.start(run)
            assert run.has_failed
            assert "ZeroDivisionError" in run.ticket.outcome.error

    @pytest.mark.parametrize("is_late", [True, False])
    async def test_step_that_fails_is_not_made_again(self, is_late):
        """What half a step has done, such as the end of a copy, is not done twice."""

        class Failing(Fenced):
            steps = 0

            def passed(self, given):
                self.steps += 1
                raise ZeroDivisionError

        async with rigged() as rig:
            fence, stage = HandFence(), Failing()
            if not is_late:
                fence.open()
            run = rig.start(stage, fence)
            assert is_late is not rig.at_once
            fence.open()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
                rig.runner.hand_back()
            assert 1 == stage.steps
            assert run.has_failed
            assert "ZeroDivisionError" in run.ticket.outcome.error
            assert is_late is (rig.handed == [run])
