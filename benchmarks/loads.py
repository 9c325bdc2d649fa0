# SPDX-License-Identifier: Apache-2.0
"""
Loads of a prompt to an accelerator, beside an engine's thread that wants the interpreter lock.

512 MB in blocks of 2 MB are loaded from a slab in DRAM, by tickets as the scheduler cuts
them: a prompt of 4096 tokens for a model of the shape of Llama 8B. The device is
``AcceleratorDevice`` over ``CudaDriver``'s own calls of libcuda, of which none does anything:
its link moves no bytes and takes their time at 50 GB/s, so that it has no core of this machine.
What is left is what ucm does itself. The engine's thread meanwhile

- ``idle``: waits for the end;
- ``stepping``: computes 1 ms in Python and waits 1 ms without the lock, in turns;
- ``busy``: computes in Python and never rests.

Told are milliseconds of a load and how often the threads of ucm went to sleep for it, as the
kernel counts (``hops``): each time some thread has to wake them, and they wait for the lock
again. Then the CPU time of each. Run ``python -m benchmarks.loads``.
"""

import collections
import contextlib
import ctypes
import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figure, Scale, Told, main, make_keys
from benchmarks.memory import ROWS, make_memory, make_order, running
from benchmarks.step import DIGEST
from benchmarks.stores import MEMORY
from ucm.blocks import GroupId, PackedKey
from ucm.config import UCMConfig
from ucm.devices._libcuda import CudaLibrary
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Direction, Driver, Event, Stream
from ucm.errors import StoreFullError
from ucm.layout import KVLayout
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import OutcomeKind
from ucm.plan import CopyBatch
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.transfers import OpenTransfers
from ucm.stores.slab import SlabStore

NUM_BLOCKS, PAGE_BYTES = 256, 64 << 10
BLOCK_BYTES = ROWS * PAGE_BYTES
LINK_BYTES_PER_S = 50e9
STEP_S = 1e-3
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class _Nothing:
    """A libcuda whose functions do nothing, by real calls that let go of the lock."""

    def __init__(self) -> None:
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

    def __init__(self) -> None:
        super().__init__(0)
        self._library = CudaLibrary(_Nothing())
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
        return [0.0]

    def record(self, event: Event, stream: Stream) -> None:
        """Let it pass when the link is free."""
        with self._library.apart_from_graphs():
            self._call()
        event[0] = 0.0 if stream == "engine" else self._until

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing waits here."""

    def is_done(self, event: Event) -> bool:
        """Return whether the time has come."""
        with self._library.apart_from_graphs():
            self._call()
        return time.monotonic() >= event[0]

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


# -- the engine's thread -------------------------------------------------------------


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _idle(runtime: Runtime) -> None:
    runtime.wait_for_notice(1.0)


def _step(_: Runtime) -> None:
    _compute(STEP_S)
    time.sleep(STEP_S)


def _busy(_: Runtime) -> None:
    _compute(STEP_S)


ENGINES: dict[str, Callable[[Runtime], None]] = {
    "idle": _idle,
    "stepping": _step,
    "busy": _busy,
}


# -- what is measured ------------------------------------------------------------------


def _threads() -> dict[str, tuple[int, float]]:
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


class Loads:
    """
    A runtime over a slab that has a prompt.

    Args:
        layout: Of the engine's blocks.
        runtime: What loads.
        device: The accelerator.
        span_blocks: Of one load.
    """

    def __init__(
        self, layout: KVLayout, runtime: Runtime, device: AcceleratorDevice
    ) -> None:
        self.runtime = runtime
        self._device = device
        queue = UCMConfig().queue
        spans = layout.span_blocks(queue.span_bytes, [BLOCK_BYTES])
        self._transfers = OpenTransfers(1, spans)
        keys = make_keys(0, NUM_BLOCKS)
        whole = make_order(0, TransferKind.LOAD, "r", range(NUM_BLOCKS), keys)
        self._hashes = list(whole.split_hashes())
        ids = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
        self._block_ids = tuple(ids)

    def orders(self) -> list[SpanOrder]:
        """Return the tickets of one load."""
        ids, hashes = self._block_ids, self._hashes
        return self._transfers.open_load(("r", 1), GroupId(0), ids, hashes)

    def load(self, engine: Callable[[Runtime], None]) -> float:
        """Load once; return the seconds."""
        orders = self.orders()
        began = time.perf_counter()
        self.runtime.submit(DIGEST, orders, self._device.lease(None))
        while self.runtime.num_open:
            engine(self.runtime)
            for notice in self.runtime.poll():
                outcome = notice.outcome
                if notice.kind is NoticeKind.SETTLED and (
                    outcome is None or outcome.kind is not OutcomeKind.COMMITTED
                ):
                    raise AssertionError(f"{outcome}")
        return time.perf_counter() - began


def _fill(store: SlabStore, keys: list[PackedKey]) -> None:
    """Save as many blocks as there is memory for by now."""
    with store.reserve(keys, BLOCK_BYTES) as lease:
        for at in range(len(lease.keys)):
            lease.slots.block(at)[:] = at % 251
        lease.seal(0, len(lease.keys))
        lease.commit()


@contextlib.contextmanager
def loading() -> Iterator[Loads]:
    """Fill a slab and run a runtime over it."""
    layout, caches = make_memory(NUM_BLOCKS, PAGE_BYTES)
    device = AcceleratorDevice(LinkDriver(), NUM_BLOCKS)
    device.register(layout, caches)
    keys = make_keys(0, NUM_BLOCKS)
    with tempfile.TemporaryDirectory(prefix="ucm-loads-", dir=MEMORY) as home:
        store = SlabStore(
            path=f"{home}/slab",
            capacity_bytes=NUM_BLOCKS * BLOCK_BYTES * 5 // 4,
            block_bytes=BLOCK_BYTES,
        )
        limit = time.monotonic() + 60
        while (stored := store.match(keys)) < NUM_BLOCKS:
            if time.monotonic() > limit:
                raise AssertionError("the slab has no memory")
            with contextlib.suppress(StoreFullError):  # there is no memory yet
                _fill(store, keys[stored:])
        with running(store, device, layout, Path(home)) as runtime:
            while not device._pinned and time.monotonic() < limit:  # noqa: SLF001
                time.sleep(0.01)
            yield Loads(layout, runtime, device)


def measure(name: str, scale: Scale) -> Told:
    """Measure loads beside one kind of engine."""
    engine, case = ENGINES[name], f"512 MB, engine {name}"
    count = scale.samples * scale.repeats
    with loading() as loads:
        loads.load(_idle)  # touches all
        before = _threads()
        spent = [1e3 * loads.load(engine) for _ in range(count)]
        after = _threads()
        num_tickets = len(loads.orders())
    yield Figure.over(case, "load", "ms", spent)
    yield Figure.over(case, "tickets", "", [num_tickets])
    hops, cpu = collections.Counter[str](), collections.Counter[str]()
    for thread, (slept, seconds) in after.items():
        began, begun = before.get(thread, (0, 0.0))
        hops[thread] = slept - began
        cpu[thread] = seconds - begun
    yield Figure.over(case, "hops of ours", "", [sum(hops.values()) / count])
    for thread in sorted(cpu):
        if hops[thread] > count / 2:
            yield Figure.over(case, f"hops of {thread}", "", [hops[thread] / count])
            spent_cpu = [1e3 * cpu[thread] / count]
            yield Figure.over(case, f"CPU of {thread}", "ms", spent_cpu)
    yield Figure.over(
        case,
        "GB/s",
        "GB/s",
        [NUM_BLOCKS * BLOCK_BYTES / statistics.median(spent) / 1e6],
    )


CASES = {name: functools.partial(measure, name) for name in ENGINES}


if __name__ == "__main__":
    main("loads", CASES)
