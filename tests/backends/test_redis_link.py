# SPDX-License-Identifier: Apache-2.0
"""What comes over a connection to a server, as it comes: in any pieces, and with anything in it."""

import asyncio
import contextlib
import itertools
import socket
import threading

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from tests.backends.servers import LIMIT_S
from tests.native_kit import build
from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_link import (
    Link,
    Links,
    read_answers,
    seconds_for,
)
from ucm.backends._resp import Answers, Bulk, Command, encoded

SCRATCH = 64
ROOM = st.lists(st.integers(1, 100), max_size=3)


@st.composite
def exchanges(draw):
    """Return commands, what a server says to them, and what that means."""
    commands, said, told = [], b"", []
    for _ in range(draw(st.integers(1, 6))):
        into = tuple(memoryview(bytearray(size)) for size in draw(ROOM))
        commands.append(Command((b"GET",), into))
        match draw(st.integers(0, 5)):
            case 0:
                said, meant = said + b"$-1\r\n", None
            case 1:
                number = draw(st.integers(-(1 << 63), 1 << 63))
                said, meant = said + b":%d\r\n" % number, number
            case 2:
                said, meant = said + b"+OK\r\n", b"OK"
            case 3:
                said, meant = said + b"-OOM no room\r\n", "OOM no room"
            case _:
                value = draw(st.binary(max_size=400))
                said, meant = said + b"$%d\r\n%b\r\n" % (len(value), value), value
        told.append(meant)
    return commands, said, told


def read(commands, said, sizes):
    """Have it come, so many bytes at a time at most."""
    answers = Answers(commands, memoryview(bytearray(SCRATCH)))
    at = 0
    while at < len(said):
        memory = answers.memory()
        piece = said[at : at + min(len(memory), next(sizes))]
        memory[: len(piece)] = piece
        answers.come(len(piece))
        at += len(piece)
    return answers


@given(exchanges(), st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_answers_are_the_same_in_whatever_pieces_they_come(exchange, sizes):
    """Each has its own, and a value the beginning of its command's memory and nothing else."""
    commands, said, meant = exchange
    answers = read(
        commands, said, iter(lambda: sizes.append(sizes.pop(0)) or sizes[0], None)
    )
    assert answers.is_over
    for command, told, wanted in zip(commands, answers.told, meant, strict=True):
        memory = b"".join(command.into)
        value = wanted if isinstance(told, Bulk) else b""
        assert value[: len(memory)].ljust(len(memory), b"\0") == memory
        match told:
            case Bulk():
                assert told.nbytes == len(wanted)
            case ResponseError():
                assert wanted == str(told)
            case _:
                assert wanted == told


def read_all(commands, said, sizes, library):
    """Have it come over a connection, in such pieces; return what was told, and what memory has."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def say():
            at = 0
            with contextlib.suppress(OSError):  # nobody reads on
                while at < len(said):
                    piece = said[at : at + next(sizes)]
                    theirs.sendall(piece)
                    at += len(piece)
                theirs.shutdown(socket.SHUT_WR)

        server = threading.Thread(target=say)
        server.start()
        answers = Answers(commands, memoryview(bytearray(SCRATCH)))
        problem = None
        try:
            read_answers(ours, answers, library)
        except (OSError, ValueError) as exc:
            problem = exc
        ours.shutdown(socket.SHUT_RD)
        server.join()
    memory = [bytes(b"".join(command.into)) for command in commands]
    return list(map(str, answers.told)), memory, problem is None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return native code as its source is, whatever was built."""
    return build(tmp_path_factory.mktemp("native"))


@given(
    exchanges(), st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(0)
)
def test_one_call_reads_what_many_read(compiled, exchange, sizes, cut):
    """Answers and memory are the same, whatever is among the values, and however much of it comes."""
    commands, said, _ = exchange
    said = said[: len(said) - cut % (len(said) + 1) * (cut % 3 == 0)]
    told = []
    for library in (compiled, None):
        for command in commands:
            for memory in command.into:
                memory[:] = bytes(len(memory))
        told.append(read_all(commands, said, itertools.cycle(sizes), library))
    one, many = told
    assert one[0] == many[0]
    assert one[2] == many[2]
    if one[2]:
        assert one[1] == many[1]


@pytest.mark.parametrize("behind", [b"", b"xx", b"\rx", b"\n\r", b"e\r\n"])
def test_value_without_its_end_is_none(compiled, behind):
    """R-51: what comes in the place of its end may be any bytes, and so may the value be."""
    said = b"$4\r\nabcd" + behind + b"$4\r\nabcd\r\n"
    for library in (compiled, None):
        commands = [Command((b"GET",), (memoryview(bytearray(4)),)) for _ in range(2)]
        told, _, is_well = read_all(commands, said, itertools.cycle([7]), library)
        assert ([], False) == (told, is_well)


class Counted:
    """Native code that counts for how many values it is asked."""

    def __init__(self, library):
        self._library = library
        self.num_calls = self.num_asked = 0

    def receive(self, link, count, *how):
        """Read them."""
        self.num_calls += 1
        self.num_asked += count
        return self._library.receive(link, count, *how)


@pytest.mark.parametrize("every", [1, 2, 10, 1000])
def test_values_that_are_not_there_cost_no_more_the_more_are_asked_for(compiled, every):
    """Each has the rest asked for anew: of many blocks that are gone that took a request's time."""
    library = Counted(compiled)
    commands = [Command((b"GET",), (memoryview(bytearray(40)),)) for _ in range(1000)]
    value = b"$40\r\n" + bytes(40) + b"\r\n"
    said = b"".join(
        value if at % every or every == 1000 else b"$-1\r\n" for at in range(1000)
    )
    told, _, is_well = read_all(commands, said, itertools.cycle([500]), library)
    assert (1000, True) == (len(told), is_well)
    assert library.num_asked <= 10 * 1000
    assert every < 1000 or 1 == library.num_calls


@given(exchanges())
def test_redis_pys_answer_goes_where_ours_would(exchange):
    """A value that came by another way fills the same memory."""
    for command, value in zip(exchange[0], exchange[2], strict=True):
        if isinstance(value, bytes):
            memory_bytes = sum(map(len, command.into))
            assert Bulk(len(value)) == command.take(value)
            filled = b"".join(command.into)
            assert value[:memory_bytes].ljust(memory_bytes, b"\0") == filled


@pytest.mark.parametrize(
    "said",
    [
        b"*2\r\n",
        b">2\r\n",
        b"\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"$-5\r\n",
        b"$1_0\r\n",
        b"$1\r\nxx\r\n",
        b":\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"+" + b"x" * SCRATCH,
        b"+OK\r\n+OK\r\n",
    ],
)
def test_what_no_server_says_is_no_answer(said):
    """R-52: a list, a push, a line without an end, or one answer more than was asked for."""
    with pytest.raises(ValueError):  # noqa: PT011 - of no text of ours
        read([Command((b"GET",))], said, iter(lambda: 7, None))


@pytest.mark.parametrize("nbytes", [(1 << 20) + 2, 1 << 40])
def test_value_of_absurd_length_is_not_read(nbytes):
    """What was told before it holds, it is told by its length, and nothing is awaited any more."""
    memory = memoryview(bytearray(1))
    commands = [Command((b"GET",)), Command((b"GET",), (memory,)), Command((b"GET",))]
    answers = read(commands, b"+OK\r\n$%d\r\nxx" % nbytes, iter(lambda: 1000, None))
    assert answers.is_over
    assert answers.is_cut
    assert [b"OK", Bulk(nbytes)] == answers.told
    assert b"\0" == memory.tobytes()


def test_memory_is_sent_as_it_is():
    """A word of several pieces is one, and no copy is made of memory."""
    memory = memoryview(b"bytes")
    command = Command((b"SET", b"name", (b"head", memory), b"NX"))
    chunks = encoded([command, Command((b"GET", b"other"))])
    wanted = b"*4\r\n$3\r\nSET\r\n$4\r\nname\r\n$9\r\nheadbytes\r\n$2\r\nNX\r\n"
    assert wanted + b"*2\r\n$3\r\nGET\r\n$5\r\nother\r\n" == b"".join(chunks)
    assert memory is chunks[1]
    assert ["SET", b"name", b"headbytes", b"NX"] == command.plain()


_FULL = 8 << 20


@pytest.mark.parametrize(
    ("nbytes", "times"), [(0, 1), (_FULL, 1), (_FULL + (256 << 10), 1), (5 * _FULL, 5)]
)
def test_request_has_time_for_what_it_moves(nbytes, times):
    """R-52: a block of tens of megabytes has time on a slow network; a full request none for its headers."""
    value = memoryview(bytearray(nbytes))
    for command in (Command((b"SET", b"x", (value,))), Command((b"GET",), (value,))):
        assert 0.5 * times == seconds_for([command], 0.5)


class Later:
    """A connection of a redis-py to come, which keeps its socket elsewhere."""

    is_connected = False

    def connect(self):
        """Connect."""
        self.is_connected = True

    def disconnect(self):
        """End it."""
        self.is_connected = False


@pytest.mark.asyncio
async def test_redis_py_that_keeps_its_socket_is_asked_itself():
    """What cannot be had by a connection of ours is told as lost, for which redis-py is asked."""
    connection = Later()
    with pytest.raises(ConnectionError, match="does not hand its socket over"):
        await Links(lambda: connection, 60.0).ask([Command((b"GET",))], [])
    assert not connection.is_connected


@pytest.mark.asyncio
async def test_what_has_ended_is_not_asked():
    """R-52: who asks it is told at once that it has, and so is who waits for it to be opened."""
    server = socket.create_server(
        ("127.0.0.1", 0)
    )  # takes connections, and says nothing
    with server, anyio.fail_after(LIMIT_S / 2):
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        link = Link(Dialer(url, LIMIT_S).to_one())
        task = asyncio.create_task(link.connect())
        await asyncio.sleep(0)
        link.abort()
        for ask in (task, link.connect(), link.ask([Command((b"GET", b"x"))], [])):
            with pytest.raises(ConnectionError, match="has ended"):
                await ask


class Hung:
    """A connection to a name that nobody finds: to open it takes as long as it likes."""

    def __init__(self, may_end):
        self._may_end = may_end
        self.is_begun = False

    def connect(self):
        """Try to."""
        self.is_begun = True
        self._may_end.wait(LIMIT_S)
        raise OSError("no such name")


@pytest.mark.asyncio
async def test_connections_that_nobody_waits_for_are_few():
    """R-52: a name that is looked up for longer than a call's time costs no thread with each call,
    and who asks behind a few of them is told at once; when they have ended it is looked up anew."""
    may_end, made = threading.Event(), []

    def make():
        made.append(Hung(may_end))
        return made[-1]

    links, get = Links(make, LIMIT_S), [Command((b"GET", b"x"))]
    with anyio.fail_after(LIMIT_S / 2):
        for at in range(100):
            task = asyncio.create_task(links.ask(get, []))
            while not (task.done() or (len(made) > at and made[at].is_begun)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert 4 <= len(made) <= 32
        with pytest.raises(TimeoutError):
            await links.ask(get, [])
        num_made = len(made)
        may_end.set()
        while len(made) == num_made:
            with pytest.raises(OSError):  # noqa: PT011 - late, or not there
                await links.ask(get, [])
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_connection_without_a_thread_is_none():
    """R-52: a machine that starts no more threads ends no agent; redis-py is asked, which needs none."""
    links, told = Links(Later, LIMIT_S), []
    before = threading.stack_size(1 << 46)  # more than any machine has
    try:
        with pytest.raises(ConnectionError, match="no thread"):
            await links.ask([Command((b"GET",))], told)
    finally:
        threading.stack_size(before)
    assert not told
