# SPDX-License-Identifier: Apache-2.0
"""What the backends stand on, without us, and the servers for both: ``benchmarks.tiers``."""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import obstore
from obstore.store import S3Store
from redis.asyncio import Redis

from benchmarks.tiers_folders import Folders
from benchmarks.tiers_moves import PAGE, Blocks, Medium, in_pieces, nothing
from benchmarks.tiers_peers import (
    lmcache_disk,
    lmcache_files,
    lmcache_remote,
    vllm_files,
)
from tests.backends.servers import ACCESS, BUCKET, object_server, redis_server

__all__ = ["disk", "files", "mooncake", "objects", "redis"]

Check = Callable[[memoryview], object]
"""What is done to the bytes of a block beside moving them."""
_CALL_BYTES = 8 << 20
"""Of one request to Redis: more is no faster."""
REQUESTS, CONNECTIONS, THREADS = 32, 4, 32
"""At a time, by default: of objects, of Redis, of a disk."""


def trust(_: memoryview) -> None:
    """Compute no checksum."""


def _on_threads(depth: int, count: int, move: Callable[[int], None]) -> Any:  # noqa: ANN401
    """Move blocks on so many threads."""
    left = iter(range(count))
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for at in left:
                move(at)
        except BaseException as exc:  # noqa: BLE001 - raised by whoever waits
            problems.append(exc)

    def all_threads() -> None:
        threads = [threading.Thread(target=work) for _ in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    return asyncio.to_thread(all_threads)


class BareDisk:
    """
    Plain direct I/O to places of a preallocated file.

    Args:
        folder: Where it is.
        blocks: What moves.
        depth: Threads.
        check: Called with each block's bytes, before they are written and when they were read.
    """

    def __init__(
        self, folder: Path, blocks: Blocks, depth: int, check: Check = trust
    ) -> None:
        self._blocks, self._depth, self._check = blocks, depth, check
        self._size = PAGE * -(-blocks.nbytes // PAGE)
        path, flags = folder / "bare", os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # memory, say: then ours does without it, too
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._size * len(blocks))

    async def _move(
        self, verb: Callable[..., int], views: Sequence[memoryview]
    ) -> None:
        def move(at: int) -> None:
            if verb(self._fd, [views[at]], at * self._size) != self._blocks.nbytes:
                raise OSError("cut short")

        await _on_threads(self._depth, len(views), move)

    def _write(self, fd: int, views: list[memoryview], place: int) -> int:
        self._check(views[0])
        return os.pwritev(fd, views, place)

    def _read(self, fd: int, views: list[memoryview], place: int) -> int:
        count = os.preadv(fd, views, place)
        self._check(views[0])
        return count

    async def put(self) -> None:
        """Write."""
        await self._move(self._write, self._blocks.data)

    async def get(self) -> None:
        """Read."""
        await self._move(self._read, self._blocks.targets)

    async def clear(self) -> None:
        """Places are written over."""


class BareFiles:
    """
    A plain file for each block, written under another name and renamed.

    Args:
        folders: Where they are.
        blocks: What moves.
        depth: Threads.
        check: As a disk's.
    """

    def __init__(
        self, folders: Folders, blocks: Blocks, depth: int, check: Check = trust
    ) -> None:
        self._folders, self._blocks, self._depth = folders, blocks, depth
        self._check = check
        self._side = "plain" if check is trust else "hashed"
        self._folder = folders.renew(self._side)

    def _put(self, at: int) -> None:
        self._check(self._blocks.data[at])
        temporary = self._folder / f"{at}.new"
        with temporary.open("xb", buffering=0) as file:
            file.write(self._blocks.data[at])
        temporary.rename(self._folder / f"{at}")

    def _get(self, at: int) -> None:
        with (self._folder / f"{at}").open("rb", buffering=0) as file:
            file.readinto(self._blocks.targets[at])
        self._check(self._blocks.targets[at])

    async def put(self) -> None:
        """Write."""
        await _on_threads(self._depth, len(self._blocks), self._put)

    async def get(self) -> None:
        """Read."""
        await _on_threads(self._depth, len(self._blocks), self._get)

    async def clear(self) -> None:
        """Go on in a new folder."""
        self._folder = self._folders.renew(self._side)


class BareObjects:
    """
    obstore's own calls.

    Args:
        url: Of the service.
        blocks: What moves.
        check: As a disk's.
    """

    def __init__(self, url: str, blocks: Blocks, check: Check = trust) -> None:
        self._blocks, self._check = blocks, check
        self._store = S3Store(
            BUCKET,
            prefix="bare",
            config=ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"},
            client_options={"allow_http": True},
        )

    async def _put(self, at: int) -> None:
        data = self._blocks.data[at]
        self._check(data)
        await obstore.put_async(self._store, f"{at}", data, use_multipart=False)

    async def _get(self, at: int) -> None:
        found = await obstore.get_async(self._store, f"{at}")
        self._blocks.targets[at][:] = memoryview(await found.bytes_async())
        self._check(self._blocks.targets[at])

    async def put(self) -> None:
        """Write."""
        await in_pieces(iter(range(len(self._blocks))), REQUESTS, self._put)

    async def get(self) -> None:
        """Read."""
        await in_pieces(iter(range(len(self._blocks))), REQUESTS, self._get)

    async def clear(self) -> None:
        """Delete them."""
        await obstore.delete_async(
            self._store, [f"{at}" for at in range(len(self._blocks))]
        )


class BareRedis:
    """
    A pipeline of ``SET`` and of ``GET``.

    Args:
        url: Of the server.
        blocks: What moves.
        check: As a disk's.
    """

    def __init__(self, url: str, blocks: Blocks, check: Check = trust) -> None:
        self._blocks, self._check = blocks, check
        self._client = Redis.from_url(url)
        self._size = max(1, _CALL_BYTES // blocks.nbytes)

    async def _put(self, piece: range) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for at in piece:
            self._check(self._blocks.data[at])
            pipeline.set(f"bare{at}", self._blocks.data[at])
        await pipeline.execute()

    async def _get(self, piece: range) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for at in piece:
            pipeline.get(f"bare{at}")
        for at, value in zip(piece, await pipeline.execute(), strict=True):
            self._blocks.targets[at][:] = value
            self._check(self._blocks.targets[at])

    async def put(self) -> None:
        """Write."""
        await in_pieces(self._blocks.pieces(self._size), CONNECTIONS, self._put)

    async def get(self) -> None:
        """Read."""
        await in_pieces(self._blocks.pieces(self._size), CONNECTIONS, self._get)

    async def clear(self) -> None:
        """Delete them."""
        await self._client.delete(*(f"bare{at}" for at in range(len(self._blocks))))


class BareMooncake:
    """
    The store's own client, eight blocks a call on four threads, from and to where they lie.

    Args:
        master: Its address.
        blocks: What moves.
        check: As a disk's.
    """

    def __init__(self, master: str, blocks: Blocks, check: Check = trust) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._blocks, self._check = blocks, check
        self._client = MooncakeDistributedStore()
        code = self._client.setup(
            *("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        )
        if code:
            raise OSError(f"joining the store: {code}")

    async def _move(
        self, verb: Callable[..., list[int]], views: Sequence[memoryview], want: int
    ) -> None:
        pieces = list(self._blocks.pieces(8))

        def move(number: int) -> None:
            some = pieces[number]
            where = [_address(views[at]) for at in some]
            names = [f"bare{at}" for at in some]
            sizes = [self._blocks.nbytes] * len(some)
            if set(verb(names, where, sizes)) != {want}:
                raise OSError("the store failed")
            for at in some:
                self._check(views[at])

        await _on_threads(4, len(pieces), move)

    async def put(self) -> None:
        """Write."""
        await self._move(self._client.batch_put_from, self._blocks.data, 0)

    async def get(self) -> None:
        """Read."""
        verb, size = self._client.batch_get_into, self._blocks.nbytes
        await self._move(verb, self._blocks.targets, size)

    async def clear(self) -> None:
        """Remove them."""
        names = [f"bare{at}" for at in range(len(self._blocks))]
        self._client.batch_remove(names, force=True)


def _address(view: memoryview) -> int:
    where: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return where


# -- media, each with its server -----------------------------------------------------


@contextlib.contextmanager
def disk(folder: Path, blocks: Blocks, depth: int = THREADS) -> Iterator[Medium]:
    """A directory on a drive; four times the room that the blocks need."""
    slot = PAGE * (1 + -(-blocks.nbytes // PAGE))
    settings = {
        "type": "disk",
        "path": str(folder / "disk"),
        "capacity": max(4 * len(blocks) * slot, 20 * slot),
        "threads": depth,
    }
    others = lmcache_disk(folder, depth)
    others |= vllm_files(Folders(folder), is_direct=True)
    if depth != THREADS:
        others = {}
    bare = functools.partial(BareDisk, folder, depth=depth)
    yield Medium("disk", settings, bare, others, target=">= 0.8")


def _forget(folders: Folders) -> None:
    """Have this machine keep nothing of what files have in memory."""
    for path in folders.files():
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@contextlib.contextmanager
def files(folder: Path, _: Blocks, *, is_remembered: bool = False) -> Iterator[Medium]:
    """
    A directory, as a mount would be.

    What is fetched from a mount was mostly put by another machine: it is not in this one's
    memory, unless it is to be remembered.
    """
    settings = {"type": "files", "path": str(folder / "share"), "capacity": 8 << 30}
    folders = Folders(folder)
    others = lmcache_files(folders) | vllm_files(folders, is_direct=False)
    bare = functools.partial(BareFiles, folders, depth=16)
    forget = functools.partial(_forget, folders)
    medium = Medium("files", settings, bare, others, forget, folders=folders)
    yield attrs.evolve(medium, forget=nothing) if is_remembered else medium


@contextlib.contextmanager
def objects(folder: Path, _: Blocks) -> Iterator[Medium]:
    """SeaweedFS."""
    with object_server(folder) as (_server, url):
        settings = {
            "type": "object",
            "url": f"s3://{BUCKET}/ours",
            "options": ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"},
            "client": {"allow_http": True},
            "requests": REQUESTS,
            "timeout": 60.0,
        }
        yield Medium("object", settings, functools.partial(BareObjects, url))


@contextlib.contextmanager
def redis(folder: Path, _: Blocks) -> Iterator[Medium]:
    """Valkey."""
    with redis_server(folder) as (_server, port):
        url = f"redis://127.0.0.1:{port}/0"
        settings = {"type": "redis", "url": url, "timeout": 60.0}
        others = lmcache_remote(f"resp://127.0.0.1:{port}")
        yield Medium("redis", settings, functools.partial(BareRedis, url), others)


@contextlib.contextmanager
def mooncake(folder: Path, _: Blocks) -> Iterator[Medium]:
    """A master and two nodes; in a network of its own only."""
    from tests.backends.mooncake_kit import cluster

    with cluster(folder, segments=(512 << 20, 512 << 20)) as running:
        master = running.master_address
        settings = {"type": "mooncake", "master": master, "timeout": 60.0}
        yield Medium("mooncake", settings, functools.partial(BareMooncake, master))
