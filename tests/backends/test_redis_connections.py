# SPDX-License-Identifier: Apache-2.0
"""The connections of the redis backend: what becomes of those that end, and of whose memory they use."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading

import anyio
import pytest
import redis

from tests.backends.servers import LIMIT_S, free_ports, redis_server
from ucm.backends._resp import Command
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.backends.redis import RedisBackend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(64)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""
HUGE = 32 << 20
"""Bytes of one that no socket takes at once."""


async def open_at(url, **settings):
    """Open a server."""
    given = {"url": url, "timeout": LIMIT_S}
    return await RedisBackend.open_configured(given | settings, "tiers.0")


class Sham:
    """A server that says OK to all that is no block's; to that it says what it is told to."""

    def __init__(self, say=b"", then=b""):
        self.say, self.then = say, then
        """To a block's command, at once and when it goes on."""
        self.asked = asyncio.Event()
        """A block's command has begun to come."""
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()
        self.got = bytearray()
        """From that command on, to the connection's end."""

    async def meet(self, reader, writer):
        """Serve a connection."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not any(verb in data for verb in (b"GET\r\n", b"\nSET\r\n")):
                    writer.write(b"+OK\r\n" * data.count(b"*"))
                    continue
                self.got += data
                writer.write(self.say)
                self.asked.set()
                await self.go_on.wait()
                try:
                    writer.write(self.then)
                    while data := await reader.read(1 << 16):
                        self.got += data
                finally:  # by a word, or at once where what it said was not read
                    self.ended.set()

    @contextlib.asynccontextmanager
    async def opened(self, **settings):
        """Serve, to a backend; in time."""
        (port,) = free_ports(1)
        with anyio.fail_after(LIMIT_S):
            async with await asyncio.start_server(self.meet, "127.0.0.1", port):
                backend = await open_at(f"redis://127.0.0.1:{port}/0", **settings)
                yield backend
                self.go_on.set()
                await backend.aclose()


def links_of(backend):
    """Return the connections of a backend of one server."""
    return backend._servers._servers[""].links._links


async def until(is_so):
    """Wait for what no event tells."""
    with anyio.fail_after(LIMIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def give_up(task):
    """Cancel a call."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_nothing_is_sent_behind_the_end_of_a_call():
    """R-52: a put that was given up ends its connection; what is in its memory by then, which is
    another block's, goes nowhere."""
    sham, memory = Sham(), bytearray(b"a" * HUGE)
    async with sham.opened() as backend:
        task = asyncio.create_task(
            backend.put([Sealed(KEYS[0], memoryview(memory), 7)])
        )
        await sham.asked.wait()
        await give_up(task)
        memory[:] = b"b" * HUGE
        sham.go_on.set()
        await sham.ended.wait()
    assert sham.got.count(b"a") > 1000
    assert not sham.got.count(b"bb")


async def test_large_request_outlives_a_small_one():
    """R-52: where both have no answer, the small one ends first, and the large one still comes."""
    sham = Sham(b"", b"$-1\r\n")
    async with sham.opened(timeout=1.0) as backend:
        large = Command((b"GET", b"large"), (memoryview(bytearray(HUGE)),))
        task = asyncio.create_task(backend._servers.ask([large]))
        (late,) = await backend._servers.ask([Command((b"GET", b"small"))])
        assert isinstance(late, TimeoutError)
        assert not task.done()
        sham.go_on.set()
        assert [None] == await task


async def test_answer_that_comes_too_early_is_the_connections_end():
    """R-52: of a put that is half written the rest is not sent behind its end, nor is the next
    call taken for it."""
    sham = Sham(b"-ERR no\r\n" * (HUGE >> 20))
    memory = bytearray(b"a" * HUGE)
    async with sham.opened() as backend:
        task = asyncio.create_task(
            backend.put([Sealed(KEYS[0], memoryview(memory), 7)])
        )
        await sham.asked.wait()
        (link,) = links_of(backend)
        await give_up(task)
        assert not link.is_idle
        memory[:] = b"b" * HUGE
        sham.go_on.set()
        await sham.ended.wait()
    assert not sham.got.count(b"bb")


async def test_nothing_is_read_behind_the_end_of_a_call():
    """R-52: what a server says too late does not reach memory that is another block's by then."""
    sham = Sham(b"$4224\r\n" + b"a" * 1000, b"b" * 3224 + b"\r\n")
    memory = bytearray(4096)
    async with sham.opened() as backend:
        task = asyncio.create_task(backend.get(KEYS[:1], [memoryview(memory)]))
        await sham.asked.wait()
        await until(lambda: memory.count(b"a") == 1000 - 128)
        await give_up(task)
        sham.go_on.set()
        await sham.ended.wait()
    assert not memory.count(b"b")


async def test_call_that_is_given_up_waits_for_its_thread():
    """R-52: it has ended when nothing can write to its memory any more, however late its thread is."""
    sham, began, may_end = Sham(), threading.Event(), threading.Event()

    def late(*_):
        began.set()
        may_end.wait(LIMIT_S)

    async with sham.opened() as backend:
        await backend.exists(KEYS[:1])
        (link,) = links_of(backend)
        link._exchange = late
        task = asyncio.create_task(backend.get(KEYS[:1], [memoryview(bytearray(4096))]))
        await until(began.is_set)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        await give_up(task)


async def test_rest_of_a_value_that_is_too_long_is_nobodys_answer():
    """R-51: a value of which nobody reads the rest ends its connection with it, whatever it says."""
    sham = Sham(b"$9000000\r\n", b"$-1\r\n" * 9)
    async with sham.opened() as backend:
        ((got),) = await backend.get(KEYS[:1], [memoryview(bytearray(4096))])
        assert Verdict.GARBAGE is got.verdict
        assert not links_of(backend)
        sham.go_on.set()
        await sham.ended.wait()


async def test_what_nobody_asked_for_ends_a_connection():
    """R-51: it would be the answer to what is asked next."""
    sham = Sham(b"$-1\r\n", b"$-1\r\n")
    async with sham.opened() as backend:
        (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(4096))])
        assert Verdict.ABSENT is got.verdict
        (link,) = links_of(backend)
        assert link.is_idle
        sham.go_on.set()
        await until(lambda: not link.is_idle)
        await backend.exists(KEYS[:1])
        await sham.ended.wait()
        assert link not in links_of(backend)


@pytest.mark.parametrize("said", [b"+QUEUED\r\n", b":1\r\n", b"$2\r\nno\r\n"])
async def test_answer_of_another_kind_is_no_answer(said):
    """R-51: a block is not there by it, and none is damaged."""
    sham = Sham(said)
    async with sham.opened() as backend:
        assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[0])])
    sham = Sham(b"+QUEUED\r\n")
    async with sham.opened() as backend:
        (got,) = await backend.get(KEYS[:1], [memoryview(bytearray(4096))])
        assert Verdict.UNAVAILABLE is got.verdict


async def test_connection_that_is_lost_while_it_is_written_is_told_at_once(tmp_path):
    """R-52: not at the deadline."""
    with redis_server(tmp_path) as (server, port):
        backend = await open_at(f"redis://127.0.0.1:{port}/0")
        await backend.put([seal(KEYS[0])])
        server.stop()
        blocks = [seal(key, 1 << 20) for key in KEYS[1:32]]
        task = asyncio.create_task(backend.put(blocks))
        await until(lambda: any(not link.is_idle for link in links_of(backend)))
        server.kill()
        with anyio.fail_after(LIMIT_S / 2):
            assert Verdict.UNAVAILABLE in await task  # it stops when it likes
        await backend.aclose()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_nothing_goes_on_behind_the_end_of_a_backend(tmp_path, turns):
    """R-52: calls that are under way end, however far they are, and no connection is left or made."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as bypass:
        before = len(bypass.client_list())
        backend = await open_at(f"redis://127.0.0.1:{port}/0")
        made = bypass.info("stats")["total_connections_received"]
        task = asyncio.create_task(backend.put([seal(key, 1 << 20) for key in KEYS]))
        for _ in range(turns):
            await asyncio.sleep(0)
        await backend.aclose()
        with anyio.fail_after(LIMIT_S):
            assert Verdict.UNAVAILABLE in await task
        await until(lambda: len(bypass.client_list()) == before)
        assert bypass.info("stats")["total_connections_received"] <= made + 4


async def test_what_redis_py_is_asked_ends_with_the_backend(tmp_path):
    """R-52: it would connect anew."""
    with redis_server(tmp_path) as (server, port), redis.Redis(port=port) as bypass:
        before = len(bypass.client_list())
        backend = await open_at(f"redis://127.0.0.1:{port}/0")
        await backend.put([seal(KEYS[0])])
        (link,) = links_of(backend)
        server.stop()
        task = asyncio.create_task(backend.exists(KEYS[:1]))
        await asyncio.sleep(0)
        link.abort()
        await until(lambda: backend._servers._asking)
        await backend.aclose()
        with anyio.fail_after(LIMIT_S / 2):
            assert [Presence.UNKNOWN] == await task
        server.go_on()
        await until(lambda: len(bypass.client_list()) == before)


async def test_connections_that_the_server_has_ended_are_replaced(tmp_path):
    """R-52: it ends those that are idle for long; nobody is told that it does not answer."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as bypass:
        backend = await open_at(f"redis://127.0.0.1:{port}/0")
        for _ in range(3):
            bypass.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            blocks = [seal(key) for key in KEYS]
            assert {*await backend.put(blocks)} <= {Verdict.DONE, Verdict.PRESENT}
            bypass.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert [True] * len(KEYS) == await fetch_sound(backend, KEYS)
        await backend.aclose()


async def test_connections_to_a_server_that_was_demoted_are_replaced(tmp_path):
    """What takes no writes any more is asked for by its name again, which may be another's."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as bypass:
        backend = await open_at(f"redis://127.0.0.1:{port}/0")
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
        bypass.execute_command("REPLICAOF", "127.0.0.1", *free_ports(1))
        before = bypass.info("stats")["total_connections_received"]
        for _ in range(3):
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[1])])
        assert 2 <= bypass.info("stats")["total_connections_received"] - before
        bypass.execute_command("REPLICAOF", "NO", "ONE")
        assert [Verdict.DONE] == await backend.put([seal(KEYS[1])])
        await backend.aclose()


async def test_connections_are_as_many_as_the_settings_say(tmp_path):
    """However much is asked for at once; and none is left when the backend is closed."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as bypass:
        before = len(bypass.client_list())
        backend = await open_at(f"redis://127.0.0.1:{port}/0", connections=3)
        blocks = [seal(key, LARGE) for key in KEYS[:16]]
        async with asyncio.TaskGroup() as tasks:
            for at in range(4):
                tasks.create_task(backend.put(blocks[4 * at : 4 * at + 4]))
            for _ in range(9):
                tasks.create_task(backend.exists(KEYS))
        assert [True] * 16 == await fetch_sound(backend, KEYS[:16], LARGE)
        assert 0 < len(bypass.client_list()) - before <= 2 * 3 + 1  # redis-py's
        await backend.aclose()
        await until(lambda: len(bypass.client_list()) == before)


async def test_socket_of_the_file_system_serves(tmp_path):
    """What redis-py can open serves: a socket, a number of a database."""
    path = tmp_path / "socket"
    with redis_server(tmp_path, "--unixsocket", str(path)) as (_, port):
        backend = await open_at(f"unix://{path}?db=3")
        assert [Verdict.DONE] * 2 == await backend.put(
            [seal(key, LARGE) for key in KEYS[:2]]
        )
        assert [True] * 2 == await fetch_sound(backend, KEYS[:2], LARGE)
        with redis.Redis(port=port, db=3) as bypass:
            assert 2 * 4 == bypass.dbsize()
        await backend.aclose()


@pytest.fixture
def certificate(tmp_path):
    """Return a certificate and its key, for this machine's loopback."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl, which is not installed")
    made = tmp_path / "certificate", tmp_path / "key"
    what = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run(
        ["openssl", *what, *names, *files], check=True, timeout=60, capture_output=True
    )
    return made


async def test_blocks_go_through_tls(tmp_path, certificate):
    """Large and small ones, and a server whose certificate nobody has signed serves none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    (tmp_path / "server").mkdir()
    with redis_server(tmp_path / "server") as (_, port):

        async def pump(reader, writer):
            with contextlib.suppress(OSError), contextlib.closing(writer):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()

        async def meet(reader, writer):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pump(reader, to_server))
                tasks.create_task(pump(from_server, writer))

        (at,) = free_ports(1)
        async with await asyncio.start_server(meet, "127.0.0.1", at, ssl=context):
            url = f"rediss://127.0.0.1:{at}/0"
            backend = await open_at(f"{url}?ssl_ca_certs={certificate[0]}")
            for nbytes, keys in ((4096, KEYS[:8]), (LARGE, KEYS[8:16])):
                put = await backend.put([seal(key, nbytes) for key in keys])
                assert [Verdict.DONE] * 8 == put
                assert [True] * 8 == await fetch_sound(backend, keys, nbytes)
            stranger = await open_at(url)
            assert [Verdict.UNAVAILABLE] == await stranger.put([seal(KEYS[0])])
            await stranger.aclose()
            await backend.aclose()
