# SPDX-License-Identifier: Apache-2.0
"""Whom redis-py asks whose slots are, by what it keeps of nodes, and no connection."""

import anyio
import pytest
from redis.exceptions import RedisClusterException

from ucm.backends._redis_slots import Slots

pytestmark = pytest.mark.asyncio


class Nodes:
    """What redis-py knows of three nodes and their cluster."""

    def __init__(self):
        self.startup_nodes = {name: object() for name in ("first", "second", "third")}
        self.known = dict(self.startup_nodes)
        self.asked = []
        self.error = None
        self.has_answer = anyio.Event()
        self.has_answer.set()
        self.is_asked = anyio.Event()

    @property
    def nodes_manager(self):
        """Be a client's."""
        return self

    async def initialize(self):
        """Ask those that are there to be asked, and know all that they tell of."""
        self.asked.append(sorted(self.startup_nodes))
        self.is_asked.set()
        await self.has_answer.wait()
        if self.error is not None:
            raise self.error
        for name in ("third", "fourth"):
            self.startup_nodes.setdefault(name, object())


async def test_those_alone_are_asked_that_are_well():
    """R-51: one that is cut off as well would name who has the slots no more; behind that redis-py has all that it
    had, the same ones, as it closes these, and who came to the cluster."""
    nodes = Nodes()
    await Slots(nodes, 60.0).learn(["second", "gone"])
    assert [["second"]] == nodes.asked
    assert nodes.known.items() <= nodes.startup_nodes.items()
    assert {"first", "second", "third", "fourth"} == nodes.startup_nodes.keys()


@pytest.mark.parametrize("names", [[], ["gone"]])
async def test_nobody_is_asked_where_nobody_is_well(names):
    """R-52: nor are all others asked in their place."""
    nodes = Nodes()
    await Slots(nodes, 60.0).learn(names)
    assert ([], nodes.known) == (nodes.asked, nodes.startup_nodes)


@pytest.mark.parametrize("error", [RedisClusterException("no node"), OSError()])
async def test_what_is_known_stays_where_nobody_answers(error):
    """R-52: and that is no bug of whoever asks."""
    nodes = Nodes()
    nodes.error = error
    await Slots(nodes, 60.0).learn(["first"])
    assert ([["first"]], nodes.known) == (nodes.asked, nodes.startup_nodes)


async def test_silence_has_an_end():
    """R-52: a call waits no longer than it was told."""
    nodes = Nodes()
    nodes.has_answer = anyio.Event()
    await Slots(nodes, 0.0).learn(["first"])
    assert nodes.known == nodes.startup_nodes


async def test_one_is_asked_at_a_time_and_nobody_behind_the_end():
    """R-52: what is under way at the end has no answer, nor has who waits for a turn."""
    nodes = Nodes()
    nodes.has_answer = anyio.Event()
    slots = Slots(nodes, 60.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slots.learn, ["first"])
        await nodes.is_asked.wait()
        tasks.start_soon(slots.learn, ["first"])
        await anyio.lowlevel.checkpoint()
        assert [["first"]] == nodes.asked
        slots.close()
        nodes.has_answer.set()
    await slots.learn(["third"])
    assert ([["first"]], nodes.known) == (nodes.asked, nodes.startup_nodes)
