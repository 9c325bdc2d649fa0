# SPDX-License-Identifier: Apache-2.0
"""What the redis backend asks for with one request, and that it begins nothing where there is nothing to ask."""

import asyncio
import contextlib

import anyio
import pytest

from tests.backends.servers import LIMIT_S, free_ports
from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_servers import Servers
from ucm.backends._redis_settings import RedisSettings
from ucm.backends._resp import Bulk, Command
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.backends.envelope import HEADER_BYTES, Envelope
from ucm.backends.redis import RedisBackend
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
URL = "redis://127.0.0.1"
KEYS = make_keys(130)
MB = 1 << 20
MEMORY = memoryview(bytearray(9 * MB))
"""Of all blocks."""


class Noting:
    """A server that has one answer for each verb; what it is asked for with one request is noted."""

    def __init__(self, num_there=0):
        self.says = {
            b"EXISTS": num_there,
            b"SET": b"OK",
            b"GET": None,
            b"GETRANGE": Bulk(0),
            b"UNLINK": 1,
        }
        self.requests = []
        self.go_on = anyio.Event()
        self.go_on.set()

    async def ask(self, commands, *, are_writes=False):
        """Answer."""
        if commands:
            self.requests.append(commands)
            await self.go_on.wait()
        return list(map(self._answer, commands))

    def _answer(self, command):
        if command.words[0] != b"GETRANGE":
            return self.says[command.words[0]]
        command.into[0][:] = Envelope(KEYS[0], 9 * MB, 7).encode()
        return Bulk(HEADER_BYTES)

    def shares(self):
        """Return how many blocks each request moved that moved any."""
        moving = [
            [each for each in request if each.nbytes > HEADER_BYTES]
            for request in self.requests
        ]
        keys = [{each.words[1].partition(b"/")[2] for each in some} for some in moving]
        return [len(some) for some in keys if some]


def noting(server, connections=1):
    """Return a backend that asks this server, by one request at a time."""
    given = RedisSettings(url=URL, connections=connections)
    backend = RedisBackend(None, given)
    backend._servers = server
    return backend


CUTS = [
    ([4 * MB] * 5, [2, 2, 1]),
    ([4 * MB, 4 * MB + 1], [1, 1]),
    ([3 * MB] * 5, [2, 2, 1]),
    ([MB // 16] * 130, [128, 2]),
    ([8 * MB], [1]),
    ([1000, 9 * MB, 1000, 1000], [1, 1, 2]),
]


@pytest.mark.parametrize(("sizes", "shares"), CUTS)
async def test_request_puts_no_more_than_eight_megabytes(sizes, shares):
    """R-52: unless one block has more; less would cost the loop as much for a half."""
    server = Noting()
    blocks = [
        Sealed(key, MEMORY[:size], 7) for key, size in zip(KEYS, sizes, strict=False)
    ]
    assert [Verdict.DONE] * len(sizes) == await noting(server).put(blocks)
    assert shares == server.shares()


@pytest.mark.parametrize(("sizes", "shares"), CUTS)
async def test_request_gets_no_more_than_eight_megabytes(sizes, shares):
    """R-52: as what it puts."""
    server = Noting()
    targets = [MEMORY[:size] for size in sizes]
    told = await noting(server).get(KEYS[: len(sizes)], targets)
    assert [Verdict.ABSENT] * len(sizes) == [one.verdict for one in told]
    assert shares == server.shares()


async def test_looks_are_one_request():
    """R-52: however many blocks are looked for, as none is moved."""
    server = Noting(1)
    assert [Presence.PRESENT] * 130 == await noting(server).exists(KEYS)
    assert [130] == [len(request) for request in server.requests]


async def test_block_that_is_there_is_looked_for_and_no_more():
    """R-52: there are no parts to write, and no head."""
    server = Noting(1)
    block = Sealed(KEYS[0], MEMORY[: 2 * MB], 7)
    assert [Verdict.PRESENT] == await noting(server).put([block])
    assert [[b"EXISTS"]] == [[each.words[0] for each in one] for one in server.requests]


async def test_deletion_is_two_commands_for_a_block():
    """R-52: however many parts it has; its head goes first, whose answer counts."""
    server = Noting()
    assert [Verdict.DONE] * 3 == await noting(server).delete(KEYS[:3])
    assert [3, 6] == [len(request) for request in server.requests]
    words = [len(each.words) for each in server.requests[1]]
    assert [2] * 3 + [1 + 2 * 9] * 3 == words


async def ask_for_nothing(backend):
    """Call each verb for no blocks."""
    assert [[], [], [], []] == [
        await backend.exists([]),
        await backend.get([], []),
        await backend.put([]),
        await backend.delete([]),
    ]


async def test_call_for_no_blocks_waits_for_no_turn():
    """R-52: it is over at once while other calls have all of them."""
    server = Noting()
    server.go_on = anyio.Event()
    backend = noting(server)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(backend.exists, KEYS)
        tasks.start_soon(backend.put, [Sealed(KEYS[0], MEMORY[:1000], 7)])
        while len(server.requests) < 2:  # no event tells of the second
            await anyio.lowlevel.checkpoint()
        is_over = anyio.Event()

        async def ask():
            await ask_for_nothing(backend)
            is_over.set()

        tasks.start_soon(ask)
        for _ in range(100):  # turns of the loop; no server has to come to it
            await anyio.lowlevel.checkpoint()
        assert (True, 2) == (is_over.is_set(), len(server.requests))
        server.go_on.set()


class Listener:
    """A server that answers all with one word; what came by each connection is noted."""

    def __init__(self):
        self.got = []

    async def meet(self, reader, writer):
        """Serve a connection."""
        mine = bytearray()
        self.got.append(mine)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                mine += data
                words = b":1\r\n" if b"EXISTS" in data else b"+OK\r\n"
                writer.write(words * data.count(b"*"))


async def test_call_for_no_blocks_makes_no_connection_and_sends_nothing():
    """R-52: behind calls for none of them the first for one has the first connection, and its bytes are the first."""
    (port,) = free_ports(1)
    listener = Listener()
    async with await asyncio.start_server(listener.meet, "127.0.0.1", port):
        given = {"url": f"{URL}:{port}/0", "timeout": LIMIT_S}
        backend = await RedisBackend.open_configured(given, "tiers.0")
        before = list(map(bytes, listener.got))
        await ask_for_nothing(backend)
        assert [Presence.PRESENT] == await backend.exists(KEYS[:1])
        *others, last = map(bytes, listener.got)
        assert before == others
        assert 1 == last.count(b"EXISTS")
        await backend.aclose()


class Client:
    """redis-py's, which begins nothing here."""

    def pipeline(self, **_):
        """Tell that it was asked."""
        raise AssertionError("nothing was to be asked")


class Links:
    """Connections that have all answers."""

    async def ask(self, commands, told):
        """Answer."""
        told += [b"OK"] * len(commands)


class Direct(Servers):
    """A server whose connections have all answers."""

    def _links_to(self, node):
        return Links()


async def test_redis_py_is_asked_nothing_where_connections_of_ours_have_all():
    """R-52: it would encode no commands, for each request, on the loop."""
    servers = Direct(Client(), Dialer(URL, 1.0), 1.0, is_cluster=False)
    assert [b"OK"] == await servers.ask([Command((b"SET", b"a", (b"",)))])
    assert [] == await servers.ask([])
