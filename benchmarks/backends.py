# SPDX-License-Identifier: Apache-2.0
"""
Backends beside what they stand on: a disk beside plain direct I/O, servers beside their clients.

Each row writes and reads the same blocks of one size both ways, in turns, with as many requests
in flight, from and to memory that begins at a page; it tells the median rates of ours, of the
bare one, and of their ratios. Disk: plain ``pwritev`` and ``preadv`` of one buffer with
``O_DIRECT`` on as many threads, at places in a preallocated file that was written once. Object:
obstore's ``put_async`` and ``get_async``. Redis: a pipeline of ``SET`` and of ``GET``.

``python -m benchmarks.backends disk --depth 1 4 16 64`` sweeps depths; ``all`` runs servers of
its own on loopback, too. ``--json FILE`` keeps the rows.
"""

import argparse
import asyncio
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import obstore
from obstore.store import S3Store
from redis.asyncio import Redis

from tests.backends.servers import ACCESS, BUCKET, object_server, redis_server
from ucm.backends.abc import Backend, Sealed, Verdict, block_checksum
from ucm.backends.disk import DiskBackend
from ucm.backends.object import ObjectBackend
from ucm.backends.redis import RedisBackend
from ucm.testing.store_blocks import make_keys

__all__ = ["main"]

_PAGE = 4096
Way = tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]
"""Writes and reads all blocks once."""


class Blocks:
    """Keys, and page-aligned memory for each block: to be written, and to be read into."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.keys = make_keys(count)
        pages = _PAGE * -(-nbytes // _PAGE)
        memory = memoryview(mmap.mmap(-1, 2 * count * pages))
        memory[: count * pages] = os.urandom(1 << 20) * (count * pages >> 20) + bytes(
            count * pages % (1 << 20)
        )
        views = [memory[at * pages : at * pages + nbytes] for at in range(2 * count)]
        self.data, self.targets = views[:count], views[count:]
        self.sealed = [
            Sealed(key, data, block_checksum(key, data))
            for key, data in zip(self.keys, self.data, strict=True)
        ]

    def pieces(self, size: int) -> Iterator[range]:
        """Yield numbers of blocks, so many at a time."""
        for start in range(0, len(self.keys), size):
            yield range(start, min(start + size, len(self.keys)))


def ours(backend: Backend, blocks: Blocks, batch: int) -> Way:
    """Return how a backend writes and reads, two calls at a time."""

    async def in_twos(call: Callable[[range], Awaitable[None]]) -> None:
        pieces = blocks.pieces(batch)

        async def work() -> None:
            for piece in pieces:
                await call(piece)

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            group.create_task(work())

    async def put(piece: range) -> None:
        verdicts = await backend.put([blocks.sealed[at] for at in piece])
        assert set(verdicts) == {Verdict.DONE}, set(verdicts)

    async def get(piece: range) -> None:
        got = await backend.get(
            [blocks.keys[at] for at in piece], [blocks.targets[at] for at in piece]
        )
        sums = [blocks.sealed[at].checksum for at in piece]
        assert [one.checksum for one in got] == sums

    return (lambda: in_twos(put)), (lambda: in_twos(get))


def bare_disk(folder: Path, blocks: Blocks, depth: int) -> Way:
    """Return how plain direct I/O does it, on so many threads."""
    size = _PAGE * -(-blocks.nbytes // _PAGE)
    fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, size * len(blocks.keys))

    async def run(verb: Callable[..., int], views: list[memoryview]) -> None:
        left = iter(range(len(views)))

        def work() -> None:
            for at in left:
                assert verb(fd, [views[at]], at * size) == blocks.nbytes

        def all_threads() -> None:
            threads = [threading.Thread(target=work) for _ in range(depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        await asyncio.to_thread(all_threads)

    return (
        lambda: run(os.pwritev, blocks.data),
        lambda: run(os.preadv, blocks.targets),
    )


def bare_object(url: str, blocks: Blocks, depth: int) -> Way:
    """Return how obstore does it, with so many requests at a time."""
    store = S3Store(
        BUCKET,
        prefix="bare",
        config=ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"},
        client_options={"allow_http": True},
    )

    async def run(ask: Callable[[int], Awaitable[None]]) -> None:
        left = iter(range(len(blocks.keys)))

        async def work() -> None:
            for at in left:
                await ask(at)

        async with asyncio.TaskGroup() as group:
            for _ in range(depth):
                group.create_task(work())

    async def put(at: int) -> None:
        await obstore.put_async(store, f"{at}", blocks.data[at], use_multipart=False)

    async def get(at: int) -> None:
        found = await obstore.get_async(store, f"{at}")
        blocks.targets[at][:] = memoryview(await found.bytes_async())

    return (lambda: run(put)), (lambda: run(get))


def bare_redis(client: Redis, blocks: Blocks, depth: int) -> Way:
    """Return how redis-py does it, as many at a time as eight megabytes hold."""
    size = max(1, (8 << 20) // blocks.nbytes)

    async def run(ask: Callable[[range], Awaitable[None]]) -> None:
        pieces = blocks.pieces(size)

        async def work() -> None:
            for piece in pieces:
                await ask(piece)

        async with asyncio.TaskGroup() as group:
            for _ in range(depth):
                group.create_task(work())

    async def put(piece: range) -> None:
        pipeline = client.pipeline(transaction=False)
        for at in piece:
            pipeline.set(f"bare{at}", blocks.data[at])
        await pipeline.execute()

    async def get(piece: range) -> None:
        pipeline = client.pipeline(transaction=False)
        for at in piece:
            pipeline.get(f"bare{at}")
        for at, value in zip(piece, await pipeline.execute(), strict=True):
            blocks.targets[at][:] = value

    return (lambda: run(put)), (lambda: run(get))


async def compare(
    what: dict[str, object], blocks: Blocks, backend: Backend, batch: int, bare: Way
) -> dict[str, object]:
    """Return a row: rates in GB/s, and ratios of ours to the bare one's."""
    total = len(blocks.keys) * blocks.nbytes / 1e9
    mine = ours(backend, blocks, batch)
    rates: dict[str, list[float]] = {
        f"{who}_{verb}": [] for who in ("ours", "bare") for verb in ("put", "get")
    }
    for number in range(7):
        for who, way in (("ours", mine), ("bare", bare))[:: 1 if number % 2 else -1]:
            for verb, call in zip(("put", "get"), way, strict=True):
                started = time.perf_counter()
                await call()
                if number >= 2:  # the first ones allocate, and write each place once
                    seconds = time.perf_counter() - started
                    rates[f"{who}_{verb}"].append(total / seconds)
        await backend.delete(blocks.keys)
    row = what | {
        name: round(statistics.median(each), 3) for name, each in rates.items()
    }
    for verb in ("put", "get"):
        pairs = zip(rates[f"ours_{verb}"], rates[f"bare_{verb}"], strict=True)
        row[f"{verb}_ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    print(json.dumps(row), flush=True)
    return row


async def disk(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Return the rows of a disk."""
    rows = []
    for size in args.size:
        blocks = Blocks(max(64, args.total // size), size)
        for depth in args.depth:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                backend = await DiskBackend.open_configured(
                    {
                        "path": f"{name}/disk",
                        "capacity": len(blocks.keys) * (size + 4096) + (80 << 20),
                        "threads": depth,
                    },
                    "tiers.0",
                )
                bare = bare_disk(Path(name), blocks, depth)
                what = {"medium": "disk", "bytes": size, "depth": depth}
                rows.append(await compare(what, blocks, backend, 2 * depth, bare))
                await backend.aclose()
    return rows


async def objects(args: argparse.Namespace, url: str) -> list[dict[str, object]]:
    """Return the rows of an S3 server."""
    backend = await ObjectBackend.open_configured(
        {
            "url": f"s3://{BUCKET}/ours",
            "options": ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"},
            "client": {"allow_http": True},
            "requests": 16,
            "timeout": 60.0,
        },
        "tiers.0",
    )
    rows = []
    for size in args.size:
        blocks = Blocks(max(32, args.total // 8 // size), size)
        what = {"medium": "object", "bytes": size, "depth": 16}
        bare = bare_object(url, blocks, 16)
        rows.append(await compare(what, blocks, backend, 32, bare))
    return rows


async def values(args: argparse.Namespace, port: int) -> list[dict[str, object]]:
    """Return the rows of a Valkey server."""
    url = f"redis://127.0.0.1:{port}/0"
    backend = await RedisBackend.open_configured(
        {"url": url, "timeout": 60.0}, "tiers.0"
    )
    client, rows = Redis.from_url(url), []
    for size in args.size:
        blocks = Blocks(max(32, args.total // 4 // size), size)
        what = {"medium": "redis", "bytes": size, "depth": 4}
        bare = bare_redis(client, blocks, 4)
        rows.append(await compare(what, blocks, backend, len(blocks.keys) // 2, bare))
    await client.aclose()
    await backend.aclose()
    return rows


@contextmanager
def _servers(what: str, folder: Path) -> Iterator[tuple[str, int]]:
    url, port = "", 0
    with ExitStack() as stack:
        for name in ("object", "redis"):
            (folder / name).mkdir()
        if what in ("object", "all"):
            _, url = stack.enter_context(object_server(folder / "object"))
        if what in ("redis", "all"):
            _, port = stack.enter_context(redis_server(folder / "redis"))
        yield url, port


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["disk", "object", "redis", "all"])
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument(
        "--size", type=int, nargs="+", default=[65536, 262144, 1 << 20, 4 << 20]
    )
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--total", type=int, default=512 << 20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(dir=args.path) as name,
        _servers(args.what, Path(name)) as (url, port),
    ):
        if args.what in ("disk", "all"):
            rows += asyncio.run(disk(args, Path(name)))
        if url:
            rows += asyncio.run(objects(args, url))
        if port:
            rows += asyncio.run(values(args, port))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
