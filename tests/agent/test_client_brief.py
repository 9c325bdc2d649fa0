# SPDX-License-Identifier: Apache-2.0
"""Wants of hardly any time: whether they are answered says nothing of the agent."""

import pytest

from tests.agent.test_client import World, wait_for_end, want
from ucm.agent.protocol import Done


@pytest.fixture
def world(tmp_path):
    """Return a world in which nobody is yet."""
    made = World(tmp_path)
    yield made
    made.agent.close()
    made.client.close()


def test_brief_want_does_not_silence_an_agent_that_has_just_spoken(world) -> None:
    """R-63: what others ask is not refused for one that gave the agent no time to answer."""
    client = world.join()
    now = [client._clock()]
    client._clock = lambda: now[0]
    want(client)
    want(client, "brief", seconds=0.01)
    world.agent.say(Done(world.agent.hear().number, 4, ""))
    wait_for_end(client)
    now[0] += 0.05
    assert not client.is_pending("brief")
    assert client.is_up
    assert want(client, "b")
    now[0] += 0.1
    assert not client.is_up
