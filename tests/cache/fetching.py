# SPDX-License-Identifier: Apache-2.0
"""An agent at a socket that says what a test has it say, for caches of the kit."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.cache.kit import LIMIT_S, Host, leaving_nothing
from ucm.agent.client import AgentClient
from ucm.agent.protocol import (
    FRAME_HEADER,
    PROTOCOL_VERSION,
    SOCKET_NAME,
    Ask,
    Done,
    Drop,
    Forget,
    GetStatus,
    Hello,
    Status,
    ToAgent,
    Welcome,
    encode_frame,
)
from ucm.cache.sync import Cache

__all__ = [
    "GONE",
    "SILENT",
    "Say",
    "ScriptedAgent",
    "beside_agent",
    "blocking",
    "served",
]

_DECODER = msgspec.msgpack.Decoder(ToAgent)
SILENT, GONE = "silent", "gone"
Say = Callable[[Ask | Forget], "Done | str"]
"""What the agent answers to a want, or to who has blocks forgotten; or that it says nothing, or dies."""


class ScriptedAgent:
    """
    Serves whoever comes until it is closed or dies.

    Args:
        directory: Where its socket is.
        say: Answers wants.
    """

    def __init__(self, directory: Path, say: Say) -> None:
        self.say = say
        self.heard: queue.Queue[Ask | Drop | Forget] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / SOCKET_NAME))
        self._listener.listen()
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def hear(self) -> Ask | Drop | Forget:
        """Return what it was told next."""
        return self.heard.get(timeout=LIMIT_S)

    def close(self) -> None:
        """Be gone."""
        for each in (self._listener, self._peer):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._peer, _ = self._listener.accept()
                with self._peer, contextlib.suppress(EOFError, ConnectionError):
                    self._converse(self._peer)

    def _converse(self, peer: socket.socket) -> None:
        assert isinstance(self._hear(peer), Hello)
        peer.sendall(encode_frame(Welcome(PROTOCOL_VERSION, ["memory"])))
        while True:
            told = self._hear(peer)
            if isinstance(told, GetStatus):
                peer.sendall(encode_frame(Status({"pid": 7, "tiers": [], "slots": {}})))
                continue
            assert isinstance(told, Ask | Drop | Forget)
            self.heard.put(told)
            said = SILENT if isinstance(told, Drop) else self.say(told)
            if said is GONE:
                raise EOFError
            if isinstance(said, Done):
                peer.sendall(encode_frame(said))

    def _hear(self, peer: socket.socket) -> ToAgent:
        (nbytes,) = FRAME_HEADER.unpack(self._exactly(peer, FRAME_HEADER.size))
        return _DECODER.decode(self._exactly(peer, nbytes))

    def _exactly(self, peer: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (piece := peer.recv(count - len(data))):
                raise EOFError
            data += piece
        return data


@contextlib.contextmanager
def beside_agent(host: Host, directory: Path, say: Say) -> Iterator[ScriptedAgent]:
    """Have a host's cache opened beside an agent, which is up by then."""
    agent = ScriptedAgent(directory, say)

    def make_client() -> AgentClient:
        client = AgentClient(directory, 4096, host.tracer.log, threads=host.threads)
        pause = threading.Event()
        for _ in range(int(LIMIT_S / 0.005)):
            if client.is_up:
                return client
            pause.wait(0.005)
        raise AssertionError("the agent was not there in time")

    host.make_client = make_client
    try:
        yield agent
    finally:
        agent.close()


def blocking(host: Host) -> Cache:
    """Open the face that blocks."""
    return Cache(*host.open_core())


@contextlib.contextmanager
def served(
    host: Host, directory: Path, say: Say
) -> Iterator[tuple[ScriptedAgent, Cache]]:
    """Have an agent, and a cache that blocks beside it; nothing of that is left."""
    with (
        beside_agent(host, directory, say) as agent,
        leaving_nothing(host),
        blocking(host) as cache,
    ):
        yield agent, cache
