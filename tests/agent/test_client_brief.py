# SPDX-License-Identifier: Apache-2.0
"""What is said of an agent: nothing by wants of hardly any time, or of much; in words when it is lost, or never there."""

import queue
import threading

import pytest
from structlog.testing import CapturingLogger

from tests.agent.test_client import KEYS, LIMIT_S, World, wait_for_end, want
from ucm.agent.client import AgentClient
from ucm.agent.protocol import Done, GetStatus
from ucm.tracing import AGENT_LOST


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


def test_stopped_agent_costs_one_deadline_whatever_it_has_more_time_for(world) -> None:
    """R-63: behind a deletion, for which the agent has a minute, requests wait no more often for
    one that is stopped than else."""
    client = world.join()
    client.forget(KEYS, "forget", seconds=60.0)
    want(client)
    world.threads.advance(1.1)
    assert not client.is_up
    assert not want(client, "b")


@pytest.mark.parametrize("said", [b"", b"\0\0"])
def test_agent_that_has_gone_is_told_in_words(world, said) -> None:
    """R-63: who reads the log hears what has happened; how many bytes are missing of a word
    of the agent's stands behind that."""
    lines: queue.Queue = queue.Queue()
    world.told.warning = lambda event, **told: lines.put((event, told["error"]))
    world.join()
    world.agent.say(said)
    world.agent.hang_up()
    event, error = lines.get(timeout=LIMIT_S)
    words = "it has ended, or closed the connection ("
    assert (AGENT_LOST, True) == (event, error.startswith(words))


def test_nothing_is_sent_to_one_that_is_seen_to_be_gone(world, caplog) -> None:
    """R-63: many questions that come as an agent dies wrote as many lines of asyncio's into
    the engine's output, before the loop had heard of the death."""
    client = world.join()

    def ask_the_dead() -> None:
        world.agent.hang_up()
        for _ in range(20):
            client.send(GetStatus())

    client.call(ask_the_dead)
    assert AGENT_LOST == world.told.wait()
    assert [] == [line for line in caplog.records if line.name == "asyncio"]


def test_agent_that_takes_who_comes_and_says_nothing_is_told_of(
    world, monkeypatch
) -> None:
    """R-63: an engine that came while it was stopped had no tiers, and its log no word of them."""
    monkeypatch.setattr("ucm.agent.client._CONNECT_S", 0.0)
    lines: queue.Queue = queue.Queue()
    world.told.warning = lambda event, **told: lines.put((event, told["error"]))
    world.start(has_agent=True)
    told = AGENT_LOST, "it does not answer in time"
    assert told == lines.get(timeout=LIMIT_S)


def test_engine_that_gets_no_thread_for_an_agent_goes_on(tmp_path, monkeypatch) -> None:
    """R-63: its start failed; it has no tiers instead, says so, and forgets nothing of theirs."""

    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    log = CapturingLogger()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        client = AgentClient(tmp_path, 4096, log)
    assert (False, False) == (want(client), client.forget(KEYS, "forget"))
    client.close()
    (call,) = log.calls
    assert AGENT_LOST == call.args[0]
    assert "can't start new thread" in call.kwargs["error"]
