# SPDX-License-Identifier: Apache-2.0
"""
The stores that the slab is held against, in an environment of their own.

The environment lies below ``.cache/peers`` of the checkout. It sees all packages of this
one and adds what LMCache needs beside them, without their dependencies, which would change
ours. It is made once. Where that fails there are no figures of peers.

Run ``python -m benchmarks.peers`` to make it: it tells the interpreter by which every
other benchmark runs with LMCache beside it.
"""

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["LocalCPU", "PeersError", "enter", "has_lmcache", "interpreter"]

_HOME = Path(__file__).resolve().parents[1] / ".cache" / "peers"
_PACKAGES = (
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "blake3==1.0.11",
    "caio==0.12.10",
    "cffi",
    "cryptography",
    "h11",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "llvmlite==0.50.0",
    "numba==0.68.1",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.61b0",
    "redis==8.1.0",
    "sortedcontainers",
)
_BACKEND = "lmcache.v1.storage_backend.local_cpu_backend"
_READY = "ready"

_Blocks = npt.NDArray[np.uint8]


class PeersError(Exception):
    """The peers cannot be installed here."""


def has_lmcache() -> bool:
    """Return whether LMCache is installed."""
    return importlib.util.find_spec("lmcache") is not None


def interpreter() -> Path:
    """
    Return the interpreter that sees our packages and the peers; made if need be.

    Raises:
        PeersError: It cannot be made; says why.
    """
    ours = [path for path in sys.path if path.endswith("site-packages")]
    made_of = "\n".join((sys.executable, *ours, *_PACKAGES))
    home = _HOME / hashlib.sha256(made_of.encode()).hexdigest()[:12]
    python = home / "bin" / "python"
    if (home / _READY).exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    try:
        _run(sys.executable, "-m", "venv", str(home))
        (site,) = home.glob("lib/*/site-packages")
        (site / "ours.pth").write_text("\n".join(ours) + "\n")
        _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", *_PACKAGES)
        _run(str(python), "-c", f"import {_BACKEND}")
    except (OSError, subprocess.SubprocessError) as exc:
        detail = getattr(exc, "stderr", None) or str(exc)
        raise PeersError(detail.strip().splitlines()[-1]) from exc
    (home / _READY).touch()
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)


def enter(module: str) -> None:
    """Go on as *module*, with the same arguments, where the peers can be imported."""
    if has_lmcache():
        return
    try:
        python = str(interpreter())
    except PeersError as exc:
        print(f"no peers: {exc}", file=sys.stderr)
        return
    os.execv(python, [python, "-m", module, *sys.argv[1:]])


class LocalCPU:
    """
    LMCache's local CPU back end, with room for as many blocks as are saved from.

    Called as its own engine does: a save allocates objects one by one, which evicts, fills
    them, puts them together and lets go of them; a load gets each, and lets go of it when
    it is copied. Its memory is this process's alone, and it keeps no checksums.

    Args:
        source: ``[n, block_bytes]`` what is saved.
        target: Where to load to, as large.
        batch: Blocks of one call.
    """

    def __init__(self, source: _Blocks, target: _Blocks, batch: int) -> None:
        os.environ |= {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "LMCACHE_DISABLE_BANNER": "1",
        }
        self._torch = importlib.import_module("torch")
        self._key = importlib.import_module("lmcache.utils").CacheEngineKey
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        backend = importlib.import_module(_BACKEND)
        self._backend = backend.LocalCPUBackend(
            config.from_defaults(
                local_cpu=True, max_local_cpu_size=source.nbytes / 2**30
            ),
            metadata(
                model_name="benchmark",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=self._torch.uint8,
                kv_shape=(32, 2, 16, 8, 128),
            ),
            dst_device="cpu",
        )
        self._source, self._target = source, target
        self._batch = batch
        self._num_saved = 0
        for _ in range(-(-len(source) // batch) + 1):  # touches every page, and is full
            self.save(0)()

    def _keys(self, first: int) -> list[object]:
        numbers = range(first, first + self._batch)
        return [self._key("benchmark", 1, 0, at, self._torch.uint8) for at in numbers]

    def _part(self, blocks: _Blocks, number: int) -> _Blocks:
        at = number * self._batch % (len(blocks) - self._batch + 1)
        return blocks[at : at + self._batch]

    def save(self, number: int) -> Callable[[], object]:
        """Store new keys."""
        keys, source = self._keys(self._num_saved), self._part(self._source, number)
        self._num_saved += self._batch
        shape, kind = self._torch.Size(source.shape[1:]), self._torch.uint8
        backend = self._backend

        def call() -> None:
            made = []
            for block in source:
                one = backend.allocate(shape, kind, busy_loop=False)
                np.copyto(one.raw_data.numpy(), block)
                made.append(one)
            backend.batched_submit_put_task(keys, made)
            for one in made:
                one.ref_count_down()

        return call

    def load(self, number: int) -> Callable[[], object]:
        """Get what was stored last but some."""
        held = len(self._source) // self._batch - 1
        keys = self._keys(self._num_saved - (1 + number % held) * self._batch)
        target, backend = self._part(self._target, number), self._backend

        def call() -> None:
            for key, block in zip(keys, target, strict=True):
                one = backend.get_blocking(key)
                np.copyto(block, one.raw_data.numpy())
                one.ref_count_down()

        return call

    def close(self) -> None:
        """Let go of its memory."""
        self._backend.memory_allocator.close()  # all else of its ``close`` counts tokens


if __name__ == "__main__":
    print(interpreter())
