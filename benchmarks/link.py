# SPDX-License-Identifier: Apache-2.0
"""An accelerator whose link takes its time and no core, for ``benchmarks.loads``."""

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from benchmarks.compiled import compiled
from ucm.devices._libcuda import CudaLibrary
from ucm.devices.driver import (
    Digester,
    Direction,
    Driver,
    Event,
    News,
    Placed,
    Stream,
    Table,
    Words,
)
from ucm.plan import CopyBatch

__all__ = ["LinkDriver", "own_threads"]

LINK_BYTES_PER_S = 50e9
_MOST_PROOFS = 4
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class _Nothing:
    """A libcuda whose functions do nothing, by real calls that let go of the lock."""

    def __init__(self, asked: object) -> None:
        self.cuEventQuery = asked
        self._libm = ctypes.CDLL("libm.so.6")
        kinds = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
        kinds = (*kinds, ctypes.c_uint64, ctypes.c_void_p)
        self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._find)

    def _find(self, _: bytes, address: int, *__: object) -> int:
        found = ctypes.cast(self._libm["fegetround"], ctypes.c_void_p).value
        ctypes.c_void_p.from_address(address).value = found
        return 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return what takes anything and returns 0."""
        function = self._libm["fegetround"]
        setattr(self, name, function)
        return function


class _Digester(Digester):
    """
    Launches what does nothing, and knows what it would tell.

    Args:
        library: Launches.
        known: Checksums by seed. Those of others are computed while there are none, and 0 then.
    """

    chunk_bytes = 1024

    def __init__(self, library: CudaLibrary, known: Mapping[int, int]) -> None:
        self._library = library
        self._known = known
        self._num_proofs = 0

    def place(self, words: npt.NDArray[np.int64]) -> Placed:
        """Keep a copy."""
        words = words.copy()
        return Placed(words.ctypes.data, words)

    def make_memory(self, num_words: int) -> Words:
        """Return some."""
        return np.zeros(num_words, np.uint64)

    def submit(self, table: Table, job: Words, count: int, stream: Stream) -> None:
        """Launch a kernel as ``CudaDigester`` does."""
        rows = (row.ctypes.data for row in job)
        arguments = (table.starts.address, table.strides.address, table.num_chunks)
        with self._library.apart_from_graphs():
            self._library.launch(1, 64, 288, (*arguments, *rows, count), 1)
        if self._known:
            told = [self._known.get(seed, 0) for seed in job[1, :count].tolist()]
            self._num_proofs += 1
            if not told[0] and self._num_proofs < _MOST_PROOFS:
                # No byte has moved: the host, which proves the first, finds zeros.
                zeros = bytes(1024 * table.num_chunks)
                told[0] = xxh3_64_intdigest(zeros, int(job[1, 0]))
            job[2, :count] = told
            return
        kind = ctypes.c_int64 * table.num_chunks
        starts = list(kind.from_address(table.starts.address))
        strides = list(kind.from_address(table.strides.address))
        for at in range(count):
            block, seed = map(int, job[:2, at])
            places = [a + block * b for a, b in zip(starts, strides, strict=True)]
            data = b"".join(ctypes.string_at(place, 1024) for place in places)
            job[2, at] = xxh3_64_intdigest(data, seed)


class LinkDriver(Driver):
    """
    A device whose copies take their time and nothing else.

    Args:
        forward_s: What the engine has submitted takes.
        digests: It computes checksums; their time is none of a link's.
    """

    device_type = "cpu"
    captures_waits = True

    def __init__(self, forward_s: float = 0.0, *, digests: bool = True) -> None:
        super().__init__(0)
        self.forward_s = forward_s
        self.known: dict[int, int] = {}
        """What it has got, by the seeds of its checksums."""
        self._digests = digests
        path = compiled("link.c")
        asked = ctypes.CDLL(path).link_query if path else None
        self._library = CudaLibrary(_Nothing(asked))
        self._can_wait = bool(path)
        self._call = ctypes.CDLL("libm.so.6")["fegetround"]
        self._until = 0.0

    def bind_thread(self) -> None:
        """Bind the thread as CUDA does."""
        self._library.bind_thread(0)

    def make_digester(self) -> Digester | None:
        """Return what knows them."""
        return _Digester(self._library, self.known) if self._digests else None

    def is_capturing(self) -> bool:
        """Record no graph."""
        return False

    def current_stream(self) -> Stream:
        """Return the engine's stream, on which there is nothing."""
        return "engine"

    def make_stream(self) -> Stream:
        """Return a stream."""
        return object()

    def make_event(self) -> Event:
        """Return an event: when it passes."""
        return (ctypes.c_double * 1)()

    def record(self, event: Event, stream: Stream) -> None:
        """Let it pass when the link is free."""
        with self._library.apart_from_graphs():
            self._call()
        passes = (
            time.monotonic() + self.forward_s if stream == "engine" else self._until
        )
        event[0] = passes

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing waits here."""

    def is_done(self, event: Event) -> bool:
        """Return whether the time has come."""
        with self._library.apart_from_graphs():
            self._call()
        return time.monotonic() >= event[0]

    def await_any(self, events: Sequence[Event], news: News) -> bool:
        """Wait in native code where there is any."""
        places = [ctypes.addressof(each) for each in events]
        return self._can_wait and self._library.await_any(places, news)

    def synchronize(self) -> None:
        """Wait for the link."""
        time.sleep(max(0.0, self._until - time.monotonic()))

    def handle(self, event: Event) -> int | None:
        """Know no event of others."""
        return None

    def device_index(self, event: Event) -> int | None:
        """Know no event of others."""
        return None

    def copy(
        self,
        batch: CopyBatch,
        direction: Direction,
        stream: Stream,
        *,
        is_pinned: bool,
    ) -> None:
        """Submit as ``CudaDriver`` does, and have the link busy for so long."""
        with self._library.apart_from_graphs():
            self._library.copy_batch(batch, direction, 1)
        spent = sum(batch.nbytes.tolist()) / LINK_BYTES_PER_S
        self._until = max(self._until, time.monotonic()) + spent

    def pin(self, address: int, nbytes: int) -> None:
        """Pin nothing."""

    def unpin(self, address: int) -> None:
        """Unpin nothing."""

    def numa_node(self) -> int | None:
        """Be nowhere."""
        return None

    def describe(self) -> dict[str, str]:
        """Return nothing."""
        return {}


def own_threads() -> dict[str, tuple[int, float]]:
    """Return by thread of ours how often it went to sleep, and its seconds of CPU."""
    found = dict[str, tuple[int, float]]()
    for thread in threading.enumerate():
        if not thread.name.startswith("ucm"):
            continue
        task = Path(f"/proc/self/task/{thread.native_id}")
        try:
            lines = (task / "status").read_text().split("\n")
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        slept = next(line for line in lines if line.startswith("voluntary"))
        spent = (int(fields[11]) + int(fields[12])) * _TICK
        hops, seconds = found.get(thread.name, (0, 0.0))
        found[thread.name] = hops + int(slept.split()[1]), seconds + spent
    return found
