# SPDX-License-Identifier: Apache-2.0
"""
Connections to Valkey or Redis that read into memory of the caller, and write from it.

redis-py copies each value three times. It opens these connections, as it knows of addresses, users
and TLS; then the transport is ours, and carries pipelines of commands in RESP
(https://redis.io/docs/latest/develop/reference/protocol-spec/). A call that comes to no good end ends
its connection with it: behind it nothing is read into its memory, and nothing is sent from there.

Threading: all on one loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import anyio
import attrs
from redis.exceptions import ResponseError

__all__ = ["Answer", "Answers", "Bulk", "Command", "Link", "Links", "Word", "encoded"]

_SCRATCH_BYTES = 4096
"""Read at a time where what comes next is not known; no line is longer."""
_PIECE_BYTES = 256 << 10
"""Written at a time: what a socket does not take at once is copied."""
_MOST_SKIPPED = 1 << 20
"""Of a value too long for its memory; rather than reading more the connection is given up."""
_CRLF = b"\r\n"

Word: TypeAlias = "bytes | tuple[bytes | memoryview, ...]"
"""Of a command, in one piece or several."""


@attrs.frozen
class Bulk:
    """
    A value that has come, and is where its command wanted it.

    Args:
        nbytes: Its length, whatever of it had room.
    """

    nbytes: int


Answer: TypeAlias = "Bulk | bytes | int | ResponseError | None"
"""A value, a status, a number, an error, or that there is no such value."""


@attrs.frozen
class Command:
    """
    What is asked.

    Args:
        words: Name and arguments.
        into: What a value fills from its beginning, one memory after the other.
    """

    words: tuple[Word, ...]
    into: tuple[memoryview, ...] = ()

    def plain(self) -> list[str | bytes]:
        """Return the words as redis-py wants them, each in one piece."""
        name, *words = [
            word if isinstance(word, bytes) else b"".join(word) for word in self.words
        ]
        return [name.decode(), *words]

    def take(self, value: bytes) -> Bulk:
        """Put a value where it belongs that came by another way."""
        rest = memoryview(value)
        for part in self.parts(len(value)):
            part[:] = rest[: len(part)]
            rest = rest[len(part) :]
        return Bulk(len(value))

    def parts(self, nbytes: int) -> list[memoryview]:
        """Return the memory that a value of so many bytes fills."""
        found = []
        for memory in self.into:
            if part := memory[:nbytes]:
                found.append(part)
            nbytes -= len(part)
        return found


class Answers:
    """
    Reads the answers to a pipeline from bytes as they come. Pure.

    Args:
        commands: What was asked, in order.
        scratch: Memory of the connection; nothing is held in it.
    """

    def __init__(self, commands: Sequence[Command], scratch: memoryview) -> None:
        self._commands = commands
        self._scratch = scratch
        self._start = self._stop = 0
        """What is held in it."""
        self._parts: list[memoryview] = []
        """What the value that just comes goes to."""
        self._num_skipped = 0
        """Bytes behind them that go nowhere."""
        self._bulk: Bulk | None = None
        """The value whose end has not come."""
        self.told: list[Answer] = []
        self.is_cut = False
        """A value is not worth reading to its end."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is awaited."""
        return self.is_cut or len(self.told) == len(self._commands)

    def memory(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        if self._parts:
            return self._parts[0]
        held = self._stop - self._start
        self._scratch[:held] = bytes(self._scratch[self._start : self._stop])
        self._start, self._stop = 0, held
        return self._scratch[held:]

    def come(self, nbytes: int) -> None:
        """
        Note how many bytes have come to ``memory``.

        Raises:
            ValueError: They are no answers to what was asked.
        """
        if self._parts:
            self._filled(nbytes)
        else:
            self._stop += nbytes
        while self._start < self._stop and not self.is_cut:
            held = self._scratch[self._start : self._stop]
            if self._parts:
                part = self._parts[0][: len(held)]
                part[:] = held[: len(part)]
                self._start += len(part)
                self._filled(len(part))
            elif self._num_skipped:
                nbytes = min(len(held), self._num_skipped)
                self._start += nbytes
                self._num_skipped -= nbytes
            elif self.is_over:
                raise ValueError("an answer to nothing")
            else:
                line, found, _ = bytes(held).partition(_CRLF)
                if not found:
                    if len(held) == len(self._scratch):
                        raise ValueError("a line without an end")
                    break
                self._start += len(line) + len(_CRLF)
                self._read(line[:1], line[1:])

    def _filled(self, nbytes: int) -> None:
        self._parts[0] = self._parts[0][nbytes:]
        if not self._parts[0]:
            del self._parts[0]

    def _read(self, kind: bytes, text: bytes) -> None:
        """Read a line that is no value's."""
        if self._bulk is not None:
            if kind:
                raise ValueError("a value without an end")
            self.told.append(self._bulk)
            self._bulk = None
            return
        match kind:
            case b"_":
                self.told.append(None)
            case b"$" if text == b"-1":
                self.told.append(None)
            case b"$" if text.isdigit():
                self._begin(Bulk(int(text)))
            case b":":
                self.told.append(int(text))
            case b"+":
                self.told.append(text)
            case b"-":
                self.told.append(ResponseError(text.decode("latin-1")))
            case _:
                raise ValueError("an answer of an unknown kind")

    def _begin(self, bulk: Bulk) -> None:
        """Have room for a value; one that is much too long is told at once."""
        parts = self._commands[len(self.told)].parts(bulk.nbytes)
        over = bulk.nbytes - sum(map(len, parts))
        if over > _MOST_SKIPPED:
            self.told.append(bulk)
            self.is_cut = True
        else:
            self._bulk, self._parts, self._num_skipped = bulk, parts, over


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
        timeout: Seconds of a call.
    """

    def __init__(self, connect: Callable[[], Any], timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._links: set[Link] = set()
        self._idle: list[Link] = []
        self._is_closed = False
        self.is_silent = False
        """Somebody else is asked in its place; of a server that may be gone."""

    async def ask(self, commands: Sequence[Command], told: list[Answer]) -> None:
        """
        Add the answer to each command to *told*; those that came stay where this raises.

        Raises:
            TimeoutError: They took too long.
            ConnectionError: There is no connection, or it has ended.
            RedisError: redis-py's, where it opens none.
        """
        with anyio.fail_after(self._timeout):
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
    writer = connection._writer  # noqa: SLF001 - it has no other way to the transport
    connection._reader = connection._writer = None  # noqa: SLF001
    if writer.transport.is_closing():
        raise ConnectionError("the server has ended the connection")
    return Link(writer)


def _is_demoted(answer: Answer) -> bool:
    """Return whether a server takes no writes, as it is a replica by now."""
    return isinstance(answer, ResponseError) and str(answer).startswith("READONLY")


def encoded(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Return what is sent: small pieces joined, memory as it is."""
    chunks: list[bytes | memoryview] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command.words)
        for word in command.words:
            pieces = (word,) if isinstance(word, bytes) else word
            small += b"$%d\r\n" % sum(map(len, pieces))
            for piece in pieces:
                if isinstance(piece, memoryview):
                    chunks += [bytes(small), piece]
                    small.clear()
                else:
                    small += piece
            small += _CRLF
    return [*chunks, bytes(small)]
