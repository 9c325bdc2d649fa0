# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the socket: it asks, and is never kept waiting."""

import queue
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from tests.clocks import AdvancingThreads
from ucm.agent.client import AgentClient, Answer
from ucm.agent.protocol import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    SOCKET_NAME,
    Ask,
    Done,
    Drop,
    Entry,
    Follow,
    Hello,
    Refused,
    ToAgent,
    Welcome,
    encode_frame,
)
from ucm.agent.protocol import Told as LedgerTold
from ucm.testing.store_blocks import make_keys
from ucm.tracing import AGENT_JOINED, AGENT_LOST

KEYS = make_keys(4)
SIZES = [96] * 4
LIMIT_S = 120.0
WELCOME = Welcome(PROTOCOL_VERSION, ["memory"])
DECODER = msgspec.msgpack.Decoder(ToAgent)


class Agent:
    """An agent that says what a test has it say."""

    def __init__(self, directory: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(LIMIT_S)
        self._listener.bind(str(directory / SOCKET_NAME))
        self._listener.listen()
        self._peer = self._listener
        self._read = b""

    def accept(self) -> Hello:
        """Wait for the engine and return its first word."""
        peer, _ = self._listener.accept()
        if self._peer is not self._listener:
            self._peer.close()
        self._peer = peer
        self._peer.settimeout(LIMIT_S)
        return self.hear()

    def hear(self):
        """Return what the engine says next."""
        nbytes = FRAME_HEADER.unpack(self._exactly(FRAME_HEADER.size))[0]
        return DECODER.decode(self._exactly(nbytes))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._peer.recv(count - len(data))
            assert piece
            data += piece
        return data

    def say(self, *messages) -> None:
        """Say messages, or bytes."""
        for message in messages:
            is_raw = isinstance(message, bytes)
            self._peer.sendall(message if is_raw else encode_frame(message))

    def hang_up(self) -> None:
        """Die, for the engine."""
        self._peer.close()

    def close(self) -> None:
        """Be gone."""
        self._peer.close()
        self._listener.close()


class Told:
    """A log that a test waits for."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue()

    def info(self, event: str, **_: object) -> None:
        """Take a line."""
        self._lines.put(event)

    warning = info

    @property
    def is_read(self) -> bool:
        """Whether nothing more was said."""
        return self._lines.empty()

    def wait(self) -> str:
        """Return the next line."""
        return self._lines.get(timeout=LIMIT_S)


class World:
    """A client, and an agent if there is one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.threads = AdvancingThreads()
        self.told = Told()
        self.launched = threading.Event()
        self.agent: Agent | None = None
        self.client: AgentClient | None = None

    def start(self, *, has_agent: bool) -> AgentClient:
        """Start both."""
        if has_agent:
            self.agent = Agent(self.directory)
        self.client = AgentClient(
            *(self.directory, 4096, self.told),
            launch=self.launched.set,
            threads=self.threads,
        )
        return self.client

    def join(self) -> AgentClient:
        """Start both and have them say hello."""
        client = self.start(has_agent=True)
        assert Hello(PROTOCOL_VERSION, 4096) == self.agent.accept()
        self.agent.say(WELCOME)
        assert AGENT_JOINED == self.told.wait()
        return client


@pytest.fixture
def world(tmp_path):
    """Return a world in which nobody is yet."""
    made = World(tmp_path)
    yield made
    if made.agent is not None:
        made.agent.close()
    if made.client is not None:
        made.client.close()


def want(client: AgentClient, name: str = "a", seconds: float = 1.0, **more) -> bool:
    """Ask for the blocks of a request."""
    return client.want(name, KEYS, SIZES, seconds=seconds, hold_s=10.0, **more)


def wait_for_end(client: AgentClient, name: str = "a") -> None:
    """Ask again until there is an answer, as an engine does."""
    while client.is_pending(name):
        pass


class TestAsk:
    def test_answer_comes_while_the_engine_asks_again(self, world) -> None:
        """R-54: a want is pending until its answer is there, and then it is known."""
        client = world.join()
        assert want(client)
        asked = world.agent.hear()
        assert Ask(1, KEYS, SIZES, 0.9, pytest.approx(10.1)) == asked
        assert client.is_pending("a")
        assert client.answer("a") is None
        world.agent.say(Done(asked.number, 3, "absent"))
        wait_for_end(client)
        assert Answer(3, "absent") == client.answer("a")

    def test_want_is_pending_until_its_deadline_at_most(self, world) -> None:
        """R-54: the deadline runs from the question, whatever the agent does."""
        client = world.join()
        want(client)
        world.threads.advance(0.9)
        assert client.is_pending("a")
        world.threads.advance(0.2)
        assert not client.is_pending("a")

    def test_dropped_want_is_told_and_forgotten(self, world) -> None:
        """R-53: what a request needs no more is the agent's to give away."""
        client = world.join()
        want(client)
        world.agent.hear()
        client.drop("a")
        client.drop("a")
        assert not client.is_pending("a")
        assert {"wants": 0, "answers": 0, "tellers": 0} == client.counts()
        want(client, "b")
        assert Drop(1) == world.agent.hear()

    def test_answer_amid_a_drop_leaves_nothing(self, world) -> None:
        """R-53: a request may be over while its answer is being put down."""
        client = world.join()

        class Racing(dict):
            def __setitem__(self, number, answer):
                client.drop("a")
                super().__setitem__(number, answer)

        client._answers = Racing()
        want(client)
        want(client, "b")
        world.agent.say(Done(world.agent.hear().number, 3, "absent"))
        world.agent.say(Done(world.agent.hear().number, 3, "absent"))
        wait_for_end(client, "b")
        assert {"wants": 1, "answers": 1, "tellers": 0} == client.counts()

    def test_answer_to_an_earlier_want_is_not_taken(self, world) -> None:
        """R-54: a request that asks anew is answered by its own number only."""
        client = world.join()
        want(client)
        want(client)
        world.agent.say(Done(1, 4, ""))
        want(client, "b")
        world.agent.say(Done(3, 4, ""))
        wait_for_end(client, "b")
        assert client.is_pending("a")
        world.agent.say(Done(2, 1, "absent"))
        wait_for_end(client)
        assert Answer(1, "absent") == client.answer("a")


class TestHangUp:
    def test_engine_that_hangs_up_still_pauses(self, world) -> None:
        """R-63: whoever hung up once does not ask for an agent without a pause for ever."""
        client = world.join()
        client.call(client._hang_up)
        assert AGENT_LOST == world.told.wait()
        assert not client._waker.is_set()


class TestNobody:
    def test_without_an_agent_the_answer_is_no_at_once(self, world) -> None:
        """R-63: an engine whose agent was never started goes on, and has one started."""
        client = world.start(has_agent=False)
        assert world.launched.wait(LIMIT_S)
        assert not client.is_up
        assert not want(client)
        assert not client.is_pending("a")

    def test_agent_that_dies_leaves_nothing_pending(self, world) -> None:
        """R-63: what was asked of an agent that died is not waited for, and the next
        question is no at once."""
        client = world.join()
        want(client, seconds=LIMIT_S)
        world.agent.hang_up()
        assert AGENT_LOST == world.told.wait()
        assert not client.is_pending("a")
        assert not want(client)
        assert client.answer("a") is None
        assert world.launched.wait(LIMIT_S)

    def test_agent_that_is_back_is_used_again(self, world) -> None:
        """R-63: the client comes back by itself."""
        client = world.join()
        world.agent.hang_up()
        assert AGENT_LOST == world.told.wait()
        world.agent.accept()
        world.agent.say(WELCOME)
        assert AGENT_JOINED == world.told.wait()
        assert want(client)

    def test_question_amid_a_loss_does_not_silence_the_next_agent(self, world) -> None:
        """R-63: a want amid the loss of its agent has its end, and the next agent is asked."""
        client, told = world.join(), threading.Event()
        clock = client._clock

        def amid_want() -> float:
            client._clock = clock
            world.agent.hang_up()
            assert AGENT_LOST == world.told.wait()
            return clock()

        client._clock = amid_want
        want(client, tell=told.set)
        world.agent.accept()
        world.agent.say(WELCOME)
        assert AGENT_JOINED == world.told.wait()
        assert told.is_set()
        assert not client.is_pending("a")
        world.threads.advance(1.1)
        assert want(client, "b")

    def test_agent_that_is_stopped_costs_one_deadline(self, world) -> None:
        """R-63: one that says nothing to a want in its time is no longer asked, until it
        says something."""
        client = world.join()
        want(client)
        world.agent.hear()
        world.threads.advance(1.1)
        assert not client.is_up
        assert not want(client, "b")
        world.agent.say(Done(1, 0, "deadline"))
        while not client.is_up:
            pass
        assert want(client, "b")

    def test_agent_of_another_release_is_left_alone(self, world) -> None:
        """R-63: one that refuses is not asked, and no other is started; the log says so, once."""
        client = world.start(has_agent=True)
        world.agent.accept()
        world.agent.say(Refused("version"))
        assert AGENT_LOST == world.told.wait()
        world.agent.accept()
        world.agent.say(Refused("version"))
        world.agent.accept()
        world.agent.say(Refused("slab"))
        assert AGENT_LOST == world.told.wait()
        assert world.told.is_read
        assert not client.is_up
        assert not world.launched.is_set()

    @pytest.mark.parametrize(
        "said",
        [
            FRAME_HEADER.pack(MAX_FRAME_BYTES + 1),
            FRAME_HEADER.pack(2) + b"\xc1\xc1",
            encode_frame(Drop(1)),
            encode_frame(Done(1, 0, "a word of another release")),
            encode_frame(Done(1, 1, "", b"\2")),
            encode_frame(LedgerTold(1, [Entry(2, True, KEYS[0])], True, True)),
            encode_frame(LedgerTold(1, [Entry(-1, True, KEYS[0])], True, True)),
        ],
    )
    def test_garbage_from_an_agent_ends_the_connection(self, world, said) -> None:
        """R-63: an engine does not believe what it cannot read, and takes no harm."""
        client = world.join()
        want(client, seconds=LIMIT_S)
        world.agent.say(said)
        assert AGENT_LOST == world.told.wait()
        assert not client.is_pending("a")
        assert not world.launched.is_set()

    def test_close_ends_the_thread(self, world) -> None:
        """R-63: a client that was closed is nowhere any more, and warns of no agent that it has
        left itself."""
        client = world.join()
        client.close()
        assert (False, True) == (client._thread.is_alive(), world.told.is_read)
        assert not want(client)


class Follower:
    """Asks for one batch whenever an agent is there."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self.heard: queue.Queue[object] = queue.Queue()

    def joined(self, media) -> None:
        """Ask."""
        self._client.send(Follow(1, b"space", alone=False))
        self.heard.put(media)

    def told(self, told: LedgerTold) -> None:
        """Take it."""
        self.heard.put(told)

    def hear(self) -> object:
        """Return what came."""
        return self.heard.get(timeout=LIMIT_S)


class TestFollow:
    def test_follower_hears_of_each_agent_and_of_what_it_tells(self, world) -> None:
        """R-57: one that comes late is told that the agent is there, and again with the next
        one, which knows nothing of what the last one told."""
        client = world.join()
        follower = Follower(client)
        client.follow(follower)
        assert ("memory",) == follower.hear()
        for _ in range(2):
            assert Follow(1, b"space", alone=False) == world.agent.hear()
            told = LedgerTold(1, [], begins=True, listed=True)
            world.agent.say(told)
            assert told == follower.hear()
            world.agent.hang_up()
            assert AGENT_LOST == world.told.wait()
            world.agent.accept()
            world.agent.say(WELCOME)
            assert AGENT_JOINED == world.told.wait()
            assert ("memory",) == follower.hear()

    def test_nobody_follows_unless_asked(self, world) -> None:
        """R-57: what an agent tells of its ledger, though nobody follows, is passed over."""
        client = world.join()
        world.agent.say(LedgerTold(1, [], begins=True, listed=True))
        want(client)
        world.agent.hear()
        world.agent.say(Done(1, 4, "", b"\1\1\0\1"))
        wait_for_end(client)
        assert Answer(4, "", b"\1\1\0\1") == client.answer("a")
