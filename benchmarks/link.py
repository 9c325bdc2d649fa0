# SPDX-License-Identifier: Apache-2.0
"""An accelerator whose link takes its time and no core, for ``benchmarks.loads``."""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled import compiled
from ucm.devices._libcuda import CudaLibrary
from ucm.devices.driver import Direction, Driver, Event, News, Stream
from ucm.plan import CopyBatch

__all__ = ["LinkDriver", "own_threads"]

LINK_BYTES_PER_S = 50e9
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


class LinkDriver(Driver):
    """A device whose copies take their time and nothing else."""

    device_type = "cpu"
    captures_waits = True

    def __init__(self, forward_s: float = 0.0) -> None:
        super().__init__(0)
        self.forward_s = forward_s
        path = compiled("link.c")
        asked = ctypes.CDLL(path).link_query if path else None
        self._library = CudaLibrary(_Nothing(asked))
        self._can_wait = bool(path)
        self._call = ctypes.CDLL("libm.so.6")["fegetround"]
        self._until = 0.0

    def bind_thread(self) -> None:
        """Bind the thread as CUDA does."""
        self._library.bind_thread(0)

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
        lines = (task / "status").read_text().split("\n")
        slept = next(line for line in lines if line.startswith("voluntary"))
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        spent = (int(fields[11]) + int(fields[12])) * _TICK
        hops, seconds = found.get(thread.name, (0, 0.0))
        found[thread.name] = hops + int(slept.split()[1]), seconds + spent
    return found
