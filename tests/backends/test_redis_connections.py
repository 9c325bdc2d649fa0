# SPDX-License-Identifier: Apache-2.0
"""The connections of the redis backend: what becomes of those that end, and of whose memory they use."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess

import anyio
import pytest
import redis

from tests.backends.servers import LIMIT_S, free_ports, redis_server
from ucm.backends.abc import Sealed, Verdict
from ucm.backends.redis import RedisBackend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(64)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""
WAIT_S = 0.2


async def open_at(url, **settings):
    """Open a server."""
    given = {"url": url, "timeout": LIMIT_S}
    return await RedisBackend.open_configured(given | settings, "tiers.0")


class Sham:
    """A server that says OK to all that is no block's, and keeps blocks waiting."""

    def __init__(self):
        self.asked = asyncio.Event()
        """A block's command has begun to come."""
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()
        self.got = bytearray()
        """Of that command, from its beginning to the connection's end."""

    async def meet(self, reader, writer):
        """Serve a connection."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not any(verb in data for verb in (b"GET\r\n", b"\nSET\r\n")):
                    writer.write(b"+OK\r\n" * data.count(b"*"))
                    continue
                self.got += data
                self.asked.set()
                if b"GET\r\n" in data:
                    writer.write(b"$%d\r\n" % (4096 + 128) + b"a" * 1000)
                await self.go_on.wait()
                if b"GET\r\n" in data:
                    writer.write(b"b" * 3224 + b"\r\n")
                while data := await reader.read(1 << 16):
                    self.got += data
                self.ended.set()

    @contextlib.asynccontextmanager
    async def opened(self):
        """Serve, to a backend."""
        (port,) = free_ports(1)
        async with await asyncio.start_server(self.meet, "127.0.0.1", port):
            backend = await open_at(f"redis://127.0.0.1:{port}/0")
            yield backend
            self.go_on.set()
            await backend.aclose()


async def test_nothing_is_sent_behind_the_end_of_a_call():
    """R-52: a put that was given up ends its connection; what is in its memory by then, which is
    another block's, goes nowhere."""
    sham, nbytes = Sham(), 1 << 20
    memory = bytearray(b"a" * nbytes)
    blocks = [Sealed(key, memoryview(memory), 7) for key in KEYS]
    with anyio.fail_after(LIMIT_S):
        async with sham.opened() as backend:
            with anyio.move_on_after(WAIT_S):
                await backend.put(blocks)
            assert sham.asked.is_set()
            memory[:] = b"b" * nbytes
            sham.go_on.set()
            await sham.ended.wait()
    assert sham.got.count(b"a") > 1000
    assert not sham.got.count(b"bb")


async def test_nothing_is_read_behind_the_end_of_a_call():
    """R-52: what a server says too late does not reach memory that is another block's by then."""
    sham, memory = Sham(), bytearray(4096)
    with anyio.fail_after(LIMIT_S):
        async with sham.opened() as backend:
            with anyio.move_on_after(WAIT_S):
                await backend.get(KEYS[:1], [memoryview(memory)])
            assert sham.asked.is_set()
            assert memory.count(b"a") == 1000 - 128
            sham.go_on.set()
            await sham.ended.wait()
    assert not memory.count(b"b")


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
        with anyio.fail_after(LIMIT_S):
            while len(bypass.client_list()) > before:  # noqa: ASYNC110 - of the server
                await anyio.sleep(0.01)


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


@contextlib.contextmanager
def cluster(folder):
    """Run two servers that share the slots; yields their ports and clients."""
    with contextlib.ExitStack() as stack:
        ports, clients = [], []
        for name in ("a", "b"):
            (folder / name).mkdir()
            server, port = stack.enter_context(
                redis_server(folder / name, "--cluster-enabled", "yes")
            )
            ports.append(port)
            clients.append(stack.enter_context(redis.Redis(port=port)))
        for client, slots in zip(clients, ((0, 8191), (8192, 16383)), strict=True):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1])
        server.await_ready(lambda: all(map(_is_whole, clients)))
        yield ports, clients


def _is_whole(client):
    told = client.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in told and b"cluster_size:2" in told


async def test_blocks_of_a_cluster_lie_with_both_servers(tmp_path):
    """Parts of a block are asked of whose they are, and what moves to the other is found there."""
    with cluster(tmp_path) as (ports, clients):
        backend = await open_at(f"redis://127.0.0.1:{ports[0]}/0", cluster=True)
        blocks = [seal(key, LARGE) for key in KEYS[:8]]
        assert [Verdict.DONE] * 8 == await backend.put(blocks)
        assert [True] * 8 == await fetch_sound(backend, KEYS[:8], LARGE)
        assert all(client.dbsize() for client in clients)
        assert 8 * 4 == sum(client.dbsize() for client in clients)
        # A slot that nobody uses yet goes to the other, and the backend is not told.
        name = b"ucm:0/" + KEYS[9]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        to = clients[slot < 8192]
        number = to.execute_command("CLUSTER", "MYID")
        for client in clients:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", number)
        for _ in range(2):
            told = await backend.put([seal(KEYS[9])])
            assert told[0] in {Verdict.DONE, Verdict.PRESENT}
            assert [True] == await fetch_sound(backend, KEYS[9:10])
        assert to.exists(name)
        await backend.aclose()
