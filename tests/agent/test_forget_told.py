# SPDX-License-Identifier: Apache-2.0
"""How an agent is told what is to be forgotten, and tells what became of it."""

import threading

import anyio.lowlevel
import pytest

from tests.agent.test_client import LIMIT_S, World
from tests.agent.test_connection import HELLO, ask_for, talk
from tests.agent.test_connection import KEYS as MANY
from ucm.agent import client as client_module
from ucm.agent import connection
from ucm.agent.client import Answer
from ucm.agent.protocol import MOST_KEYS, Done, Drop, Forget
from ucm.stores.abc import Change
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys
from ucm.tracing import AGENT_LOST

KEYS = make_keys(4)


@pytest.fixture
def world(tmp_path):
    """Return a client whose agent says what a test has it say."""
    made = World(tmp_path)
    made.join()
    yield made
    made.agent.close()
    made.client.close()


class TestClient:
    def test_nobody_waits_unless_it_has_a_name(self, world, monkeypatch) -> None:
        """R-63: an engine tells its agent and goes on; what is more than a message takes goes
        with several."""
        monkeypatch.setattr(client_module, "MOST_KEYS", 3)
        client = world.client
        assert client.forget(KEYS)
        assert Forget(0, KEYS[:3]) == world.agent.hear()
        assert Forget(0, KEYS[3:]) == world.agent.hear()
        assert {"wants": 0, "answers": 0, "tellers": 0} == client.counts()

    def test_who_waits_has_the_answer(self, world) -> None:
        """R-41: how many there were, and which tiers may have some yet."""
        client, told = world.client, threading.Event()
        assert client.forget(KEYS, "f", seconds=10.0, tell=told.set)
        assert Forget(1, KEYS, 9.0) == world.agent.hear()
        world.agent.say(Done(1, 3, "kept", b"\1"))
        assert told.wait(LIMIT_S)
        assert Answer(3, "kept", b"\1") == client.answer("f")
        client.drop("f")
        assert {"wants": 0, "answers": 0, "tellers": 0} == client.counts()

    def test_agent_that_dies_is_told_of(self, world) -> None:
        """R-63: nobody waits for it, and without one the answer is no at once."""
        client, told = world.client, threading.Event()
        assert client.forget(KEYS, "f", seconds=10.0, tell=told.set)
        world.agent.hang_up()
        assert told.wait(LIMIT_S)
        assert AGENT_LOST == world.told.wait()
        assert client.answer("f") is None
        assert not client.forget(KEYS)

    @pytest.mark.slow
    def test_more_keys_than_fit_cost_nobody_the_agent(self, world) -> None:
        """R-63: of two million keys at once the agent hears of as many as it forgets at a time, and who
        waits for the others is told no; the connection ended with all that was wanted."""
        client, told = world.client, threading.Event()
        keys = [b"k" * 85] * MOST_KEYS
        for number in range(32):
            client.forget(keys, f"f{number}", seconds=100.0, tell=told.set)
        assert told.wait(LIMIT_S)
        world.agent.say(Done(1, 3, ""))
        heard = [len(world.agent.hear().keys) for _ in range(16)]
        assert [MOST_KEYS] * 16 == heard
        assert client.is_up


class TestConnection:
    def test_who_has_blocks_forgotten_hears_what_became_of_that(self, tmp_path) -> None:
        """R-53, R-63: how many tiers had, and which may have some yet; who names no number hears
        nothing, and nobody is waited for longer than he waits."""

        async def talking(pipe, core):
            pipe.say(HELLO, Forget(0, MANY[:1]), Forget(3, MANY, 5.0))
            told = [await pipe.hear(), await pipe.hear()]
            core.spillers[0]._backend.inner.inner.does.delay = 9.0
            core.spillers[0].offer([Change(MANY[0], BLOCK_BYTES)])
            while not core.spillers[0].num_moving:
                await anyio.lowlevel.checkpoint()
            pipe.say(Forget(4, MANY, 0.0))
            return [*told[1:], await pipe.hear()]

        told, problem, _ = talk(tmp_path, talking)
        assert [Done(3, 7, ""), Done(4, 0, "kept", b"\1")] == told
        assert "" == problem

    def test_what_a_peer_wants_forgotten_is_forgotten_when_it_is_gone(
        self, tmp_path
    ) -> None:
        """R-63: an engine that ends right behind its word has it kept."""

        async def talking(pipe, core):
            pipe.say(HELLO, Forget(5, MANY, 5.0))
            await pipe.hear()
            pipe.is_broken = True
            pipe.hang_up()
            while core.spillers[0].counts.forgotten < len(MANY):
                await anyio.lowlevel.checkpoint()
            return core.spillers[0].counts.forgotten

        assert 8 == talk(tmp_path, talking)[0]

    def test_number_that_is_open_is_no_number(self, tmp_path) -> None:
        """R-63: of a want or of another such question: its sender is cut off."""

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7), Forget(7, MANY, 5.0))
            await pipe.hear()

        _, problem, _ = talk(tmp_path, talking)
        assert "want 7 is open already" == problem

    def test_question_beyond_a_bound_is_refused_and_begins_nothing(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: as a want is; who waits for nothing is served."""
        monkeypatch.setattr(connection, "_MOST_WANTS", 1)

        async def talking(pipe, core):
            pipe.say(HELLO, ask_for(7))
            await pipe.hear(), await pipe.hear()
            pipe.say(Forget(8, MANY, 5.0))
            told = [await pipe.hear(), core.is_idle]
            pipe.say(Drop(7), Forget(0, MANY[:2]))
            told.append(await pipe.hear())
            while not core.spillers[0].counts.forgotten:
                await anyio.lowlevel.checkpoint()
            pipe.say(Forget(9, MANY, 5.0))
            return [*told, await pipe.hear()]

        told, _, _ = talk(tmp_path, talking)
        assert [
            Done(8, 0, "queue_tickets"),
            True,
            Done(7, 0, "withdrawn"),
            Done(9, 6, ""),
        ] == told
