# SPDX-License-Identifier: Apache-2.0
"""Many blocks that come and go at once are told of in batches, and others come in between."""

from collections import Counter

import pytest
from vllm.distributed.kv_events import BlockRemoved

from tests.integration.vllm.test_kv_events import World, stored

BLOCKS = range(1, 41)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return one that makes events of two blocks at a time."""
    monkeypatch.setattr("ucm.integration.vllm.kv_events._MOST_NEWS", 2)
    made = World()
    made.client.sent.clear()
    return made


def taken(world: World) -> Counter[tuple[bool, int | bytes]]:
    """Return of which blocks the engine's steps tell, and whether they are gone."""
    told: Counter[tuple[bool, int | bytes]] = Counter()
    world.client.run()
    while events := world.teller.take():
        assert len(events) <= 16
        for event in events:
            is_gone = isinstance(event, BlockRemoved)
            told.update((is_gone, each) for each in event.block_hashes)
        world.client.run()
    return told


def test_listing_that_ends_without_many_blocks_keeps_nobody_waiting(
    world: World,
) -> None:
    """R-57: the client's thread, on which answers to wants come as well, makes events of some
    of the blocks that are gone at a time, as the engine takes them, and then asks for more."""
    world.tell(*map(stored, BLOCKS), begins=True, listed=True)
    assert 1 == len(world.teller._ready)
    assert len(BLOCKS) == taken(world).total()
    assert 1 == world.followed()
    world.tell(begins=True, listed=True)
    assert 1 == len(world.teller._ready)
    assert 0 == world.followed()
    told = taken(world)
    assert {True} == {is_gone for is_gone, _ in told}
    assert (len(BLOCKS), {1}) == (len(told), set(told.values()))
    assert 1 == world.followed()


def test_what_a_lost_agent_had_told_is_told_once(world: World) -> None:
    """R-57: the agent is lost while some of what it said is not made events of; its successor
    lists anew, and each block that came or went is told of once."""
    world.tell(begins=True, listed=True)  # with it all would be told again
    world.tell(*map(stored, BLOCKS), begins=True, listed=True)
    world.teller.joined(["disk"])
    world.tell(*map(stored, BLOCKS), number=2, begins=True, listed=True)
    told = taken(world)
    assert (len(BLOCKS), {1}) == (len(told), set(told.values()))
    world.tell(number=2, begins=True, listed=True)
    world.teller.joined(["disk"])
    world.tell(number=3, begins=True, listed=True)
    told = taken(world)
    assert {True} == {is_gone for is_gone, _ in told}
    assert (len(BLOCKS), {1}) == (len(told), set(told.values()))


def test_engine_that_takes_all_the_time_keeps_nobody_waiting(world: World) -> None:
    """R-57: each step of the engine asks for more; in one turn of its loop, before it hears the
    agent again, the client's thread makes events of some blocks all the same."""
    world.tell(*map(stored, BLOCKS), begins=True, listed=True)
    told = 0
    while world.client.waiting or world.teller._ready:
        turn, world.client.waiting = world.client.waiting, []
        for call in turn:
            call()
            told += sum(len(event.block_hashes) for event in world.teller.take())
        assert len(turn) <= 2
        told += sum(len(event.block_hashes) for event in world.teller.take())
    assert len(BLOCKS) == told
