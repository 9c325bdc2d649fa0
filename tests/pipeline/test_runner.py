# SPDX-License-Identifier: Apache-2.0
"""What runs the segments of lanes: results come back once, or never when given up."""

import asyncio
import contextlib

import anyio
import pytest

from tests.pipeline.kit import TIMEOUT, make_ticket
from ucm.devices.events import DoneFence
from ucm.pipeline.items import Item
from ucm.pipeline.runner import Runner
from ucm.pipeline.stage import Chain, CopyStage, LoopStage
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


class Copied(CopyStage):
    """Runs on a copy thread."""

    name = "copied"

    def run(self, given):
        """Do nothing."""
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

    def start(self, stage):
        """Start a run of one stage; return it."""
        item = Item(make_ticket(), (), DoneFence())
        (item.segment,) = Chain.start(stage).segments()
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
