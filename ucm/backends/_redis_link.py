# SPDX-License-Identifier: Apache-2.0
"""
Connections to Valkey or Redis that read into memory of the caller, and write from it.

redis-py copies each value three times. It opens these connections, as it knows of addresses, users
and TLS; then the transport is ours, and carries pipelines of commands (``_resp``). A call that comes to
no good end ends its connection with it: behind it nothing is read into its memory, and nothing is sent
from there.

Threading: all on one loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
from redis.exceptions import ResponseError

from ucm.backends._resp import Answer, Answers, Command, encoded

__all__ = ["Link", "Links", "seconds_for"]

_SCRATCH_BYTES = 4096
"""Read at a time where what comes next is not known; no line is longer."""
_PIECE_BYTES = 256 << 10
"""Written at a time: what a socket does not take at once is copied."""
_TIMED_BYTES = 8 << 20
"""Moved within one timeout; a large block is one request, and has more of them."""


class Link(asyncio.BufferedProtocol):
    """
    One connection; made by ``Links``.

    Args:
        writer: Of redis-py's connection; kept, as the transport may end with it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._transport: Any = writer.transport
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._answers: Answers | None = None
        self._over = asyncio.Event()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_open = True
        # At 0 a transport of TLS is full as it is.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._transport.set_protocol(self)

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and nobody asks anything."""
        return self._is_open and self._answers is None

    async def ask(self, commands: Sequence[Command], told: list[Answer]) -> None:
        """
        Send commands, and add their answers to *told*.

        These are fewer where one is cut, where the server ends the connection, or says what no
        server says, and where this is cancelled; then it is the connection's end.
        """
        self._over.clear()
        self._answers = answers = Answers(commands, self._scratch)
        is_sent = False
        try:
            for chunk in encoded(commands):
                for start in range(0, len(chunk), _PIECE_BYTES):
                    if not self._transport.is_closing():
                        self._transport.write(chunk[start : start + _PIECE_BYTES])
                        await self._can_write.wait()
            is_sent = not answers.is_over  # nobody answers before
            await self._over.wait()
        finally:
            self._answers = None
            told += answers.told
            if answers.is_cut or not (is_sent and answers.is_over):
                self.abort()

    def abort(self) -> None:
        """End it at once. Idempotent."""
        if self._is_open:
            self.connection_lost(None)
            self._transport.abort()

    # -- asyncio's -----------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._scratch if self._answers is None else self._answers.memory()

    def buffer_updated(self, nbytes: int) -> None:
        """Read what has come."""
        if self._answers is None:
            self.abort()
            return
        try:
            self._answers.come(nbytes)
        except ValueError:
            self.abort()
            return
        if self._answers.is_over:
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let nobody wait any longer."""
        self._is_open = False
        self._over.set()
        self._can_write.set()

    def pause_writing(self) -> None:
        """Wait until the socket has taken what it was given."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Go on."""
        self._can_write.set()


class Links:
    """
    Connections to one server, as many as are asked at a time.

    Args:
        connect: Makes a connection of redis-py's, not connected yet.
        timeout: Seconds of a request; see ``seconds_for``.
    """

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._links: set[Link] = set()
        self._idle: list[Link] = []
        self._is_closed = False

    async def ask(self, commands: Sequence[Command], told: list[Answer]) -> None:
        """
        Add the answer to each command to *told*; those that came stay where this raises.

        Raises:
            TimeoutError: They took too long.
            ConnectionError: There is no connection, or it has ended.
            RedisError: redis-py's, where it opens none.
        """
        with anyio.fail_after(seconds_for(commands, self._timeout)):
            while len(told) < len(commands):
                link = await self._take()
                before = len(told)
                try:
                    await link.ask(commands[before:], told)
                finally:
                    self._give_back(link)
                if len(told) == before:
                    raise ConnectionError("the server has ended the connection")
        if any(map(_is_demoted, told)):
            self._end(self._idle)  # its name may be another's by now

    def close(self) -> None:
        """End all; calls that are under way have no answer."""
        self._is_closed = True
        self._end(self._links)

    async def _take(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if link.is_idle:
                return link
            self._links.discard(link)
        link = await _take_over(self._connect())
        self._links.add(link)
        if self._is_closed:
            self._end(self._links)
        return link

    def _give_back(self, link: Link) -> None:
        if link.is_idle:
            self._idle.append(link)
        else:
            self._links.discard(link)

    def _end(self, links: Iterable[Link]) -> None:
        for link in list(links):
            link.abort()


async def _take_over(connection: Any) -> Link:  # noqa: ANN401 - redis-py's, of any kind
    """Connect, and let redis-py forget what it has opened."""
    await connection.connect()
    # It has no other way to the transport; a release without it is asked itself, slowly.
    writer = getattr(connection, "_writer", None)
    if writer is None:
        await connection.disconnect()
        raise ConnectionError(
            "this release of redis-py does not hand its transport over"
        )
    connection._reader = connection._writer = None  # noqa: SLF001
    if writer.transport.is_closing():
        raise ConnectionError("the server has ended the connection")
    return Link(writer)


def _is_demoted(answer: Answer) -> bool:
    """Return whether a server takes no writes, as it is a replica by now."""
    return isinstance(answer, ResponseError) and str(answer).startswith("READONLY")


def seconds_for(commands: Sequence[Command], timeout: float) -> float:
    """Return for how long at most a request goes on, by what it moves."""
    nbytes = sum(command.nbytes for command in commands)
    return timeout * max(1, -(-nbytes // _TIMED_BYTES))
