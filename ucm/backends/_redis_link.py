# SPDX-License-Identifier: Apache-2.0
"""
Connections to Valkey or Redis that read into memory of the caller, and write from it.

redis-py copies each value three times. It opens these connections, as it knows of addresses, users
and TLS; then the socket is ours, and carries pipelines of commands (``_resp``). Each has a thread of its
own, which waits for whole values in the kernel and lets the loop go on meanwhile: a loop that is woken for
each piece that comes takes three times as long. A call that comes to no good end ends its connection with
it: behind it nothing is read into its memory, and nothing is sent from there.

Threading: what is asked is asked on one loop; what says so runs on a connection's thread.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Final

import anyio
from redis.exceptions import ResponseError

from ucm import native
from ucm.backends._crew import Job
from ucm.backends._redis_answers import failures
from ucm.backends._resp import Answer, Answers, Command, encoded

__all__ = ["Link", "Links", "read_answers", "seconds_for"]

_SCRATCH_BYTES: Final = 4096
"""Read at a time where what comes next is not known; no line is longer."""
_MOST_CHUNKS: Final = 512
"""Handed to the kernel at a time; it takes no more than 1024."""
_FEW: Final = 8
"""Values read by one call behind another answer; twice as many by the next, and so on."""
_TIMED_BYTES: Final = 8 << 20
"""Moved within one timeout, as a full request is; a large block is one, and has more of them."""
_MOST_LEFT: Final = 16
"""Threads that still open connections nobody waits for: a name may be looked up for minutes."""
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT


class Link:
    """
    One connection, and its thread; made by ``Links``.

    Args:
        connection: Of redis-py's, not connected yet.

    Raises:
        ConnectionError: The machine starts no more threads.
    """

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - of any kind
        self._connection = connection
        self._socket: socket.socket | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._opening: Job[None] | None = None
        self._is_open, self._is_asked = True, False
        self._lock = threading.Lock()
        """So that what has ended gets no socket."""
        self._jobs: SimpleQueue[Job[None] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, name="ucm-redis", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            raise ConnectionError("there is no thread for it") from exc

    @property
    def is_idle(self) -> bool:
        """Whether it is open, nobody asks anything, and nothing has come that nobody asked for."""
        link = self._socket
        if link is None or self._is_asked or not self._is_open:
            return False
        if isinstance(link, ssl.SSLSocket) and link.pending():
            return False
        try:
            socket.socket.recv(link, 1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # an answer to nothing, or the end

    @property
    def is_left(self) -> bool:
        """Whether its thread still opens it, and nobody waits for that."""
        opening = self._opening
        return (
            not self._is_open and opening is not None and opening.batch.num_working > 0
        )

    async def connect(self) -> None:
        """
        Open it.

        Raises:
            ConnectionError: It was ended meanwhile, or this release of redis-py does not hand
                its socket over.
            RedisError: redis-py's, where it opens none.
        """
        self._opening = Job(self._connect)
        self._begin(self._opening)
        try:
            await self._opening.wait()
        except asyncio.CancelledError:
            self.abort()  # the thread may go on for as long as it takes
            raise
        if self._opening.error is not None:
            raise self._opening.error
        if not self._is_open:
            raise ConnectionError("it has ended")

    async def ask(self, commands: Sequence[Command], told: list[Answer]) -> None:
        """
        Send commands, and add their answers to *told*.

        These are fewer where one is cut, where the server ends the connection, or says what no
        server says, and where this is cancelled; then it is the connection's end.
        """
        answers = Answers(commands, self._scratch)
        job = Job(functools.partial(self._exchange, encoded(commands), answers))
        self._begin(job)
        self._is_asked = True
        try:
            await job.wait()
        finally:
            is_well = job.is_over and job.error is None and not answers.is_cut
            if not is_well:
                self.abort()
                with anyio.CancelScope(shield=True):
                    await job.wait()  # nobody uses the memory behind this
            self._is_asked = False
            told += answers.told
        if not isinstance(job.error, OSError | ValueError | None):
            raise job.error

    def abort(self) -> None:
        """End it at once, whatever its thread waits for. Idempotent."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._jobs.put(None)
            if self._opening is not None:
                self._opening.batch.over.set()  # it may last
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the server was faster
                    # Of TLS, too: a last word could take as long as the server likes.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _begin(self, job: Job[None]) -> None:
        with self._lock:
            if not self._is_open:
                raise ConnectionError("it has ended")
            self._jobs.put(job)

    # On the connection's thread.

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.batch.step()
        with self._lock:  # else its number may be another's when it is shut down
            if self._socket is not None:
                self._socket.close()

    def _connect(self) -> None:
        """Connect, and let redis-py forget what it has opened."""
        connection, is_wanted = self._connection, self._is_open
        if not is_wanted:
            raise ConnectionError("it has ended")
        connection.connect()
        # It has no other way to the socket; a release without it is asked itself, slowly.
        opened = getattr(connection, "_sock", None)
        if opened is None:
            connection.disconnect()
            raise ConnectionError(
                "this release of redis-py does not hand its socket over"
            )
        connection._sock = None  # noqa: SLF001
        opened.settimeout(None)  # whoever asks has a deadline, and ends it then
        with self._lock:
            if self._is_open:
                self._socket = opened
                return
        opened.close()

    def _exchange(self, chunks: list[bytes | memoryview], answers: Answers) -> None:
        """
        Send, then read.

        Raises:
            OSError: The connection has ended.
            ValueError: What came is no answer.
        """
        link = self._socket
        if link is None:
            raise ConnectionError("it was never opened")
        if _is_plain(link):
            _send(link, chunks)
        else:
            for chunk in chunks:
                link.sendall(chunk)
        read_answers(link, answers, native.LIBRARY)


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
        self._left: list[Link] = []
        """Whose threads may still open them."""
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
        if any(_is_demoted(told[at]) for at in failures(told)):
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
            self._drop(link)
        if self._is_closed:  # amid the answers of a call
            raise ConnectionError("all have ended")
        self._left = [link for link in self._left if link.is_left]
        if len(self._left) >= _MOST_LEFT:
            raise TimeoutError("others that were given up are still being opened")
        link = Link(self._connect())
        self._links.add(link)
        with contextlib.ExitStack() as undo:
            undo.callback(self._drop, link)
            undo.callback(self._left.append, link)
            await link.connect()
            undo.pop_all()
        return link

    def _give_back(self, link: Link) -> None:
        if link.is_idle:
            self._idle.append(link)
        else:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        link.abort()
        self._links.discard(link)

    def _end(self, links: Iterable[Link]) -> None:
        for link in list(links):
            link.abort()


def _send(link: socket.socket, chunks: list[bytes | memoryview]) -> None:
    """Send all, few pieces at a time."""
    at = 0
    while at < len(chunks):
        nbytes = link.sendmsg(chunks[at : at + _MOST_CHUNKS])
        while at < len(chunks) and nbytes >= len(chunks[at]):
            nbytes -= len(chunks[at])
            at += 1
        if nbytes:
            chunks[at] = chunks[at][nbytes:]


def read_answers(
    link: socket.socket, answers: Answers, library: native.Native | None
) -> None:
    """
    Read what is awaited.

    Args:
        link: It blocks.
        answers: What came goes there.
        library: Reads values that are as long as their memory, all of them by one call.

    Raises:
        OSError: The connection has ended.
        ValueError: What came is no answer.
    """
    is_plain, most = _is_plain(link), sys.maxsize
    while not answers.is_over:
        if is_plain and library is not None and (values := answers.values(most)):
            before = len(answers.told)
            _fill(library, link, answers, values)
            # Where many are not there, few are asked for in vain with each that is not.
            most = max(_FEW, 2 * (len(answers.told) - before))
            answers.come(0)  # what came in place of a value
            if len(answers.told) > before:
                continue
        # The kernel wakes nobody before all of a value is there, or of what will come.
        flags = socket.MSG_WAITALL if is_plain and answers.is_amid_value else 0
        nbytes = link.recv_into(answers.memory(), 0, flags)
        if not nbytes:
            raise ConnectionError("the server has ended the connection")
        answers.come(nbytes)


def _is_plain(link: socket.socket) -> bool:
    """Return whether its bytes are those that the kernel has."""
    return not isinstance(link, ssl.SSLSocket)


def _fill(
    library: native.Native,
    link: socket.socket,
    answers: Answers,
    values: Sequence[Command],
) -> None:
    """
    Read values until another answer comes.

    Raises:
        OSError: The connection has ended.
    """
    memory, nbytes = answers.held()
    parts = [part for command in values for part in command.into]
    prefixes = [b"$%d\r\n" % command.room for command in values]
    num_held, error = ctypes.c_size_t(nbytes), ctypes.c_int()
    count = library.receive(
        *(link.fileno(), len(values)),
        (ctypes.c_char_p * len(values))(*prefixes),
        _sizes(map(len, prefixes)),
        _sizes(len(command.into) for command in values),
        (ctypes.c_void_p * len(parts))(*map(_address, parts)),
        _sizes(map(len, parts)),
        *(b"\r\n", 2, _address(memory), len(memory)),
        *(ctypes.byref(num_held), ctypes.byref(error)),
    )
    answers.filled(count, num_held.value)
    if error.value:
        raise OSError(error.value, os.strerror(error.value))


def _sizes(numbers: Iterable[int]) -> "ctypes.Array[ctypes.c_size_t]":
    given = list(numbers)
    return (ctypes.c_size_t * len(given))(*given)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _is_demoted(answer: Answer) -> bool:
    """Return whether a server takes no writes, as it is a replica by now."""
    return isinstance(answer, ResponseError) and str(answer).startswith("READONLY")


def seconds_for(commands: Sequence[Command], timeout: float) -> float:
    """Return for how long at most a request goes on, by what it moves."""
    nbytes = sum(command.nbytes for command in commands)
    # Names and headers beside a full request's blocks are no reason to wait twice as long.
    return timeout * max(1, round(nbytes / _TIMED_BYTES))
