# SPDX-License-Identifier: Apache-2.0
"""
Loads of a prompt to an accelerator, beside an engine's thread that wants the interpreter lock.

512 MB in blocks of 2 MB are loaded from a slab in DRAM, by tickets as the scheduler cuts
them: a prompt of 4096 tokens for a model of the shape of Llama 8B. The device is
``AcceleratorDevice`` over ``CudaDriver``'s own calls of libcuda, of which none does anything:
its link moves no bytes and takes their time at 50 GB/s, so that it has no core of this machine.
What is left is what ucm does itself. Where torch finds an NVIDIA GPU it is that one. The engine's thread meanwhile

- ``idle``: waits for the end;
- ``stepping``: computes 1 ms in Python and waits 1 ms without the lock, in turns;
- ``busy``: computes in Python and never rests.

Checksums are the device's, which costs a launch here, or the ``host``'s.

Told are milliseconds of a load and how often the threads of ucm went to sleep for it, as the
kernel counts (``hops``): each time some thread has to wake them, and they wait for the lock
again. Then the CPU time of each.

*Saves*: a step of 10 ms of Python, in which the lock is given up for a moment every few
microseconds as operations of torch do, orders one save of 48 MB behind a forward pass of 8 ms.
Told is how often and for how long the engine's thread waits for the lock in a step, on a
machine that is rarely quiet the best measure of what it loses. Run ``python -m benchmarks.loads``.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.compiled import compiled
from benchmarks.harness import Figure, Scale, Told, main, make_keys
from benchmarks.link import LinkDriver, own_threads
from benchmarks.memory import ROWS, make_memory, make_order, running
from benchmarks.step import DIGEST
from benchmarks.stores import MEMORY
from ucm.blocks import GroupId, PackedKey
from ucm.config import UCMConfig
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cuda import CudaDriver
from ucm.errors import StoreFullError
from ucm.layout import KVLayout
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import OutcomeKind
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.spans import TicketBytes
from ucm.scheduler.transfers import OpenTransfers
from ucm.seals import checksum_seeds
from ucm.stores.slab import SlabStore

NUM_BLOCKS, PAGE_BYTES = 256, 64 << 10
BLOCK_BYTES = ROWS * PAGE_BYTES
STEP_S = 1e-3


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
        span_bytes = UCMConfig().queue.span_bytes
        tickets = TicketBytes.of(span_bytes, is_synchronous=device.is_synchronous)
        spans = layout.span_blocks(tickets.save, [BLOCK_BYTES])
        self._transfers = OpenTransfers(1, spans, tickets.load // tickets.save)
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
def loading(*, digests: bool = True) -> Iterator[Loads]:
    """Fill a slab and run a runtime over it."""
    has_gpu = torch.cuda.is_available()
    where = "cuda" if has_gpu else "cpu"
    layout, caches = make_memory(NUM_BLOCKS, PAGE_BYTES, device=where)
    driver = CudaDriver(0) if has_gpu else LinkDriver(digests=digests)
    device = AcceleratorDevice(driver, NUM_BLOCKS)
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
        if isinstance(driver, LinkDriver):
            with store.read(keys) as lease:
                told = lease.seals(0, NUM_BLOCKS)
            driver.known.update(zip(checksum_seeds(keys), told, strict=True))
        with running(store, device, layout, Path(home)) as runtime:
            nbytes = NUM_BLOCKS * BLOCK_BYTES
            pinning = runtime._pinning  # noqa: SLF001
            while pinning._nbytes < nbytes and time.monotonic() < limit:  # noqa: SLF001
                time.sleep(0.01)
            yield Loads(layout, runtime, device)


def measure(name: str, who: str, scale: Scale) -> Told:
    """Measure loads beside one kind of engine."""
    engine, case = ENGINES[name], f"512 MB, engine {name}, checksums by the {who}"
    count = scale.samples * scale.repeats
    with loading(digests=who == "device") as loads:
        loads.load(_idle)  # touches all
        before = own_threads()
        spent = [1e3 * loads.load(engine) for _ in range(count)]
        after = own_threads()
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


# -- saves ---------------------------------------------------------------------------


SAVED_BLOCKS, STEPS = 24, 60
FORWARD_S, PYTHON_S, REST_S = 8e-3, 10e-3, 2e-3
_GIVE_UP = ctypes.CDLL("libm.so.6")["fegetround"]


def _launch(count: int) -> None:
    """Compute in Python, and give the lock up for a moment now and then."""
    for _ in range(count):
        for _ in range(400):
            pass
        _GIVE_UP()


class Steps:
    """
    Steps of an engine, with and without a save.

    Args:
        runtime: What saves.
        device: The accelerator.
    """

    def __init__(self, runtime: Runtime, device: AcceleratorDevice) -> None:
        self._runtime = runtime
        self._device = device
        self._numbers = itertools.count()
        began = time.perf_counter()
        _launch(100)
        self._launches = int(PYTHON_S * 100 / (time.perf_counter() - began))
        path = os.environ.get("LD_PRELOAD")
        self._waits = ctypes.PyDLL(path).ucm_waits if path else lambda _: 0
        self.told = collections.defaultdict[str, list[float]](list)

    def save(self) -> None:
        """Order a save, behind a forward pass."""
        number = next(self._numbers)
        first, request = number % 8 * SAVED_BLOCKS, f"r{number}"
        ids, key = range(first, first + SAVED_BLOCKS), number * SAVED_BLOCKS
        order = make_order(number, TransferKind.SAVE, request, ids, key)
        self._runtime.submit(DIGEST, [order], self._device.lease(None))

    def run(self, kind: str) -> None:
        """Make a step, and note what it took."""
        waited = ctypes.c_longlong()
        self._waits(ctypes.byref(waited))
        began = time.perf_counter()
        if kind == "saving":
            self.save()
        _launch(self._launches)
        self._runtime.poll()
        self.told[f"step, {kind}"].append(1e3 * (time.perf_counter() - began))
        count = self._waits(ctypes.byref(waited))
        self.told[f"waits for the lock, {kind}"].append(count)
        self.told[f"waited for the lock, {kind}"].append(waited.value / 1e6)
        time.sleep(REST_S)

    def settle(self) -> None:
        """Wait for the end of all saves."""
        limit = time.monotonic() + 5
        while self._runtime.num_open and time.monotonic() < limit:
            self._runtime.poll()
            time.sleep(0.01)


def _hops() -> int:
    return sum(slept for slept, _ in own_threads().values())


def measure_saves(scale: Scale) -> Told:
    """Measure what steps that order saves make the engine's thread wait."""
    num_blocks = 8 * SAVED_BLOCKS
    layout, caches = make_memory(num_blocks, PAGE_BYTES)
    driver = LinkDriver(FORWARD_S)
    device = AcceleratorDevice(driver, num_blocks)
    device.register(layout, caches)
    driver.known[0] = 0  # nobody looks at what is saved
    with tempfile.TemporaryDirectory(prefix="ucm-loads-", dir=MEMORY) as home:
        capacity = 4 * num_blocks * BLOCK_BYTES
        store = SlabStore(
            path=f"{home}/slab", capacity_bytes=capacity, block_bytes=BLOCK_BYTES
        )
        with running(store, device, layout, Path(home)) as runtime:
            time.sleep(3.0)  # until its memory is there
            steps, hops = Steps(runtime, device), 0
            for _ in range(scale.samples):
                for kind in ("plain", "saving"):
                    before = _hops()
                    for _ in range(STEPS):
                        steps.run(kind)
                    steps.settle()
                    hops += _hops() - before
    case, num_saves = "48 MB a step", scale.samples * STEPS
    for kind in ("plain", "saving"):
        name = f"step, {kind}"
        yield Figure.over(case, name, "ms", steps.told[name])
    for what, unit in (("waits for the lock", ""), ("waited for the lock", "ms")):
        mean = statistics.mean(steps.told[f"{what}, saving"])
        yield Figure.over(case, f"{what}, a step", unit, [mean])
    yield Figure.over(case, "hops of ours, a save", "", [hops / num_saves])


CASES = {
    f"{name}, {who}": functools.partial(measure, name, who)
    for name in ENGINES
    for who in ("device", "host")
} | {"saves": measure_saves}


if __name__ == "__main__":
    waits = compiled("gil_waits.c")
    if waits and "LD_PRELOAD" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.loads", *sys.argv[1:]]
        raise SystemExit(
            subprocess.run(
                command, check=False, env=os.environ | {"LD_PRELOAD": waits}
            ).returncode
        )
    main("loads", CASES)
