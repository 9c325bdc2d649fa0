# SPDX-License-Identifier: Apache-2.0
"""
Other caches' tiers on the same server, drive or mount, for ``benchmarks.tiers``.

A block begins and ends in their own memory for caches on the host, as ours does in a slab. None of
them keeps checksums. LMCache is asked through the back ends that its engine uses, with as many
threads as ours; vLLM's tier of files by its own pool and native calls, a request's load in one job,
as its manager makes them, and what is stored in jobs of sixteen blocks. Both use O_DIRECT on a drive.
"""

import asyncio
import functools
import importlib
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import has_lmcache
from benchmarks.tiers_folders import Folders
from benchmarks.tiers_moves import Bare, Blocks

__all__ = ["lmcache_disk", "lmcache_remote", "vllm_files"]

_LIMIT_S = 120.0
_LMCACHE = "lmcache"
"""Its side of folders."""
_STORED_PER_JOB = 16
_Maker = Callable[[Blocks], Bare]


class _LMCache:
    """
    A back end of LMCache below its memory on the host.

    Args:
        blocks: What moves.
        settings: Of its engine.
        extra: What it calls extra settings.
    """

    def __init__(
        self, blocks: Blocks, settings: dict[str, object], extra: dict[str, object]
    ) -> None:
        os.environ |= {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "LMCACHE_DISABLE_BANNER": "1",
        }
        torch = importlib.import_module("torch")
        name_key = importlib.import_module("lmcache.utils").CacheEngineKey
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        of_host = importlib.import_module(
            "lmcache.v1.storage_backend.local_cpu_backend"
        )
        room = 2.2 * len(blocks) * blocks.nbytes / 2**30 + 0.1
        self._config = config.from_defaults(
            local_cpu=False, max_local_cpu_size=room, extra_config=extra, **settings
        )
        self._metadata = metadata(
            model_name="benchmark",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, 16, 1, blocks.nbytes // 32),
            chunk_size=16,
        )
        self._host = of_host.LocalCPUBackend(
            self._config, self._metadata, dst_device="cpu"
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._keys = [
            name_key("benchmark", 1, 0, at, torch.uint8) for at in range(len(blocks))
        ]
        (shape,) = self._metadata.get_shapes()
        self._made = []
        for data in blocks.data:
            one = self._host.allocate(shape, torch.uint8, busy_loop=False)
            np.copyto(one.raw_data.numpy(), np.frombuffer(data, np.uint8))
            self._made.append(one)
        self._backend: Any = self._open()

    @abstractmethod
    def _open(self) -> Any:  # noqa: ANN401 - a class that may not be there
        """Make the back end."""

    async def put(self) -> None:
        """Store all, and wait until all are."""
        await asyncio.to_thread(self._put)

    def _put(self) -> None:
        left, is_over = len(self._keys), threading.Event()
        lock = threading.Lock()

        def stored(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    is_over.set()

        self._backend.batched_submit_put_task(
            self._keys, self._made, on_complete_callback=stored
        )
        if not is_over.wait(_LIMIT_S):
            raise TimeoutError("LMCache has not stored")

    async def get(self) -> None:
        """Load all into its memory, and let go of them."""
        found = await asyncio.to_thread(self._backend.batched_get_blocking, self._keys)
        for one in found:
            one.ref_count_down()  # None where one was not found: an error here

    async def clear(self) -> None:
        """What is stored again is written over."""


class _Disk(_LMCache):
    def _open(self) -> Any:  # noqa: ANN401
        of_disk = importlib.import_module(
            "lmcache.v1.storage_backend.local_disk_backend"
        )
        return of_disk.LocalDiskBackend(
            self._config, self._loop, self._host, "cpu", None, self._metadata
        )

    async def clear(self) -> None:
        """Remove all: what is there is not written again."""
        for key in self._keys:
            self._backend.remove(key)


class _Remote(_LMCache):
    def _open(self) -> Any:  # noqa: ANN401
        remote = importlib.import_module("lmcache.v1.storage_backend.remote_backend")
        return remote.RemoteBackend(
            self._config, self._metadata, self._loop, self._host, "cpu"
        )


class _Files(_Remote):
    def __init__(
        self,
        blocks: Blocks,
        settings: dict[str, object],
        extra: dict[str, object],
        folders: Folders,
    ) -> None:
        super().__init__(blocks, settings, extra)
        self._folders = folders

    async def clear(self) -> None:
        """Go on in a new folder."""
        self._folders.renew(_LMCACHE)


def lmcache_disk(folder: Path, threads: int) -> dict[str, _Maker]:
    """Return LMCache's disk, by name; nothing where it is not installed."""
    extra: dict[str, object] = {"use_odirect": True, "disk_io_threads": threads}
    home = folder / "lmcache"
    home.mkdir()
    settings: dict[str, object] = {"local_disk": str(home), "max_local_disk_size": 64}
    return _if_there(lambda blocks: _Disk(blocks, settings, extra))


def lmcache_remote(url: str) -> dict[str, _Maker]:
    """Return LMCache over a server or a directory, by name; nothing where it is not installed."""
    settings: dict[str, object] = {"remote_url": url, "remote_serde": "naive"}
    extra: dict[str, object] = {"save_chunk_meta": False}
    return _if_there(lambda blocks: _Remote(blocks, settings, extra))


def lmcache_files(folders: Folders) -> dict[str, _Maker]:
    """Return LMCache over folders, by name; nothing where it is not installed."""
    folders.renew(_LMCACHE)
    url = f"fs://host:0/{folders.link(_LMCACHE)}"
    extra: dict[str, object] = {"save_chunk_meta": False}
    settings: dict[str, object] = {"remote_url": url, "remote_serde": "naive"}
    return _if_there(lambda blocks: _Files(blocks, settings, extra, folders))


def _if_there(make: _Maker) -> dict[str, _Maker]:
    return {"LMCache": make} if has_lmcache() else {}


class _VllmFiles:
    """
    vLLM's tier of files.

    Args:
        folders: Where they are.
        is_direct: Whether the page cache is passed by.
        blocks: What moves.
    """

    def __init__(self, folders: Folders, is_direct: bool, blocks: Blocks) -> None:  # noqa: FBT001
        pools = importlib.import_module("vllm.v1.kv_offload.tiering.fs.thread_pool")
        self._pool = pools.DualQueueThreadPool(16, 16)
        self._native = importlib.import_module("vllm.fs_io_C")
        self._blocks, self._is_direct = blocks, is_direct
        self._folders = folders
        self._paths: list[str] = []
        self._renew()

    def _renew(self) -> None:
        folder, count = self._folders.renew("vllm"), len(self._blocks)
        for number in range(min(256, count)):  # those of a tier that is in use
            (folder / f"{number:03x}").mkdir()
        self._paths = [f"{folder}/{at % 256:03x}/{at:064x}.bin" for at in range(count)]

    async def put(self) -> None:
        """Write."""
        jobs = [
            functools.partial(self._store, piece)
            for piece in self._blocks.pieces(_STORED_PER_JOB)
        ]
        for number, job in enumerate(jobs):
            self._pool.enqueue_store(number, 1, [job])
        await asyncio.to_thread(self._finish, len(jobs))

    async def get(self) -> None:
        """Read, in one job."""
        self._pool.enqueue_load(0, 1, [self._load])
        await asyncio.to_thread(self._finish, 1)

    def _store(self, piece: range) -> None:
        paths = [self._paths[at] for at in piece]
        views = [self._blocks.data[at] for at in piece]
        written = [f"{path}.tmp" for path in paths]
        self._native.batch_store_block(written, paths, views, self._is_direct)

    def _load(self) -> None:
        self._native.batch_load_block(
            self._paths, self._blocks.targets, self._is_direct
        )

    def _finish(self, num_jobs: int) -> None:
        self._pool.wait_idle()
        ends = self._pool.get_finished()
        if [True] * num_jobs != [has_worked for _, has_worked, _ in ends]:
            raise OSError("vLLM's tier failed")

    async def clear(self) -> None:
        """Go on in a new folder: what is there is not written again."""
        self._renew()


def vllm_files(folders: Folders, *, is_direct: bool) -> dict[str, _Maker]:
    """Return vLLM's tier of files, by name."""
    return {"vLLM": functools.partial(_VllmFiles, folders, is_direct)}
