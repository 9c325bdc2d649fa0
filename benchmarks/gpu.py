# SPDX-License-Identifier: Apache-2.0
"""
Copies between an NVIDIA GPU and pinned host memory, and what they cost the engine.

Run ``python -m benchmarks.gpu --json results.json`` on a machine with a GPU; elsewhere it
says so and ends. ``docs/gpu.md`` has a command that also runs the tests.

The limit is one ``cudaMemcpyAsync`` of a span's bytes, from and to the same memory on the
same stream. A timed call moves 64 MB in spans of the case's size, submitted one behind
the other, and waits for the last.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.harness import (
    Figure,
    Note,
    Scale,
    Side,
    Told,
    compare,
    latencies,
    main,
    ratio,
    speed,
)
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cuda import CudaDriver
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch
from ucm.prefixes import paged_layout

KB, MB = 1 << 10, 1 << 20
PAGES = [4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB]
SPANS = [MB, 4 * MB, 16 * MB, 64 * MB]
MOVED = 64 * MB
"""Bytes of one timed call."""
POOL = 512 * MB
"""On either side: several times the caches of both."""
LEASES = 200
"""Of one round; they all pass at its end."""
SHARE, SUBMIT_US = ">= 0.95", "<= 0.3"
LARGE_PAGE = 64 * KB
"""From here up copies should reach the limit."""


class Span(NamedTuple):
    """One span: the batch of its pages, and the same bytes in one piece."""

    batch: CopyBatch
    device: torch.Tensor
    host: torch.Tensor


class Memory:
    """
    Pinned host memory and device memory, and a stream between them.

    Pages lie anywhere on the device and in order on the host, so that none continues
    another.
    """

    def __init__(self) -> None:
        self.batched = CudaDriver(0)
        self.single = CudaDriver(0, is_batched=False)
        self.batched.bind_thread()
        self.stream = self.batched.make_stream()
        self.device = torch.ones(POOL, dtype=torch.uint8, device="cuda")
        self._pool = np.ones(POOL, np.uint8)
        self.batched.pin(self._pool.ctypes.data, POOL)
        self.host = torch.from_numpy(self._pool)

    def spans(self, page: int, nbytes: int, direction: Direction) -> list[Span]:
        """Cut both sides into spans of *nbytes* in pages of *page*."""
        order = np.random.default_rng(page).permutation(POOL // page)
        pages = self.device.data_ptr() + order.astype(np.int64) * page
        slots = self.host.data_ptr() + np.arange(POOL // page) * page
        ends = (pages, slots) if direction is Direction.TO_HOST else (slots, pages)
        per = nbytes // page
        spans = []
        for at in range(0, POOL // page, per):
            part = slice(at, at + per)
            batch = CopyBatch.coalesce(ends[0][part], ends[1][part], np.full(per, page))
            piece = slice(at * page, at * page + nbytes)
            spans.append(Span(batch, self.device[piece], self.host[piece]))
        return spans

    def copy(self, span: Span, direction: Direction) -> None:
        """Submit a span's pages in batches."""
        self.batched.copy(span.batch, direction, self.stream, is_pinned=True)

    def copy_each(self, span: Span, direction: Direction) -> None:
        """Submit a span's pages one by one, as on old drivers."""
        self.single.copy(span.batch, direction, self.stream, is_pinned=True)

    def memcpy(self, span: Span, direction: Direction) -> None:
        """Submit a span's bytes in one piece."""
        source, target = span.device, span.host
        if direction is Direction.TO_DEVICE:
            source, target = target, source
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)


@functools.cache
def shared_memory() -> Memory:
    """Return what all cases use: half a gigabyte takes a while to pin."""
    return Memory()


def machine(scale: Scale) -> Told:
    """Say what is measured."""
    memory = shared_memory()
    facts = memory.batched.describe() | {"numa_node": memory.batched.numa_node()}
    yield Note("machine", ", ".join(f"{key} {value}" for key, value in facts.items()))


def copies(page: int, nbytes: int, direction: Direction, scale: Scale) -> Told:
    """Compare batches with single large copies."""
    case = f"{_size(page)} pages, {_size(nbytes)}, {_arrow(direction)}"
    memory = shared_memory()
    spans = memory.spans(page, nbytes, direction)
    count = MOVED // nbytes

    def side(submit: Callable[[Span, Direction], None]) -> Side:
        def prepare(number: int) -> Callable[[], object]:
            chosen = [spans[(number * count + at) % len(spans)] for at in range(count)]

            def call() -> None:
                for span in chosen:
                    submit(span, direction)
                memory.stream.synchronize()

            return call

        return prepare

    times = compare({"batch": side(memory.copy), "memcpy": side(memory.memcpy)}, scale)
    yield ratio(times, "batch", "memcpy", case, SHARE if page >= LARGE_PAGE else "")
    yield speed(times, "batch", case, MOVED)
    yield speed(times, "memcpy", case, MOVED)


def submission(page: int, scale: Scale) -> Told:
    """Measure the processor's time for the call that submits a span of 16 MB."""
    memory = shared_memory()
    hows = {"batch": memory.copy, "one by one": memory.copy_each}
    for direction, (how, submit) in itertools.product(Direction, hows.items()):
        spans = memory.spans(page, 16 * MB, direction)
        rounds = []
        for _ in range(scale.samples):
            spent = []
            for span in spans:
                before = time.thread_time_ns()
                submit(span, direction)
                spent.append((time.thread_time_ns() - before) / len(span.batch))
                memory.stream.synchronize()
            rounds.append(statistics.median(spent) / 1e3)
        target = SUBMIT_US if how == "batch" else ""
        case = f"submit {_size(page)} pages, {_arrow(direction)}"
        yield Figure.over(case, f"{how}, per page", "us", rounds, target)


class Load:
    """Stands for a forward pass: matrix products of tens of milliseconds."""

    def __init__(self) -> None:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        self._state = make(2048, 8192)
        # Of such size that the numbers neither grow nor vanish: zeros compute faster.
        self._weights = [make(8192, 8192) / 64 for _ in range(8)]

    def run(self) -> None:
        """Compute on the current stream and wait."""
        state = self._state
        for weight in itertools.chain(*[self._weights] * 8):
            state = torch.relu(state @ weight)
        torch.cuda.current_stream().synchronize()


def load(direction: Direction, scale: Scale) -> Told:
    """
    Compare a forward pass alone with one beside copies, submitted before it.

    A note tells in how many of the calls copies were still under way at its end.
    """
    case = f"forward pass, copies {_arrow(direction)}"
    memory, work = shared_memory(), Load()
    spans = memory.spans(64 * KB, 64 * MB, direction)
    # So many that they outlast the pass, although the first move before it begins.
    work.run()
    start = time.perf_counter()
    work.run()
    count = 1 + int((time.perf_counter() - start) * 3 * 70e9 / (64 * MB))
    unfinished: list[bool] = []

    def alone(number: int) -> Callable[[], object]:
        memory.stream.synchronize()
        return work.run

    def beside(
        submit: Callable[[Span, Direction], None], number: int
    ) -> Callable[[], object]:
        memory.stream.synchronize()
        for at in range(count):
            submit(spans[(number + at) % len(spans)], direction)

        def call() -> None:
            work.run()
            unfinished.append(not memory.stream.query())

        return call

    sides: dict[str, Side] = {
        "alone": alone,
        "with batch": functools.partial(beside, memory.copy),
        "with memcpy": functools.partial(beside, memory.memcpy),
    }
    times = compare(sides, scale)
    yield ratio(times, "with batch", "alone", case)
    yield ratio(times, "with memcpy", "alone", case)
    yield ratio(times, "with batch", "with memcpy", case)
    share = sum(unfinished) / len(unfinished)
    yield Note(case, f"copies outlasted the pass in {share:.0%} of the calls")


def lease(scale: Scale) -> Told:
    """Measure what the engine's thread pays for a fence, its work being under way."""
    pages = torch.zeros(64, 4 * KB, dtype=torch.uint8, device="cuda")
    layout = paged_layout({"layer": 4 * KB}, block_tokens=16)
    device = AcceleratorDevice(CudaDriver(0), len(pages))
    device.register(layout, {"layer": pages})
    steps = itertools.count(1)
    for what in ("current stream", "engine's event"):
        rounds: list[list[float]] = []
        for _ in range(scale.samples + 1):
            rounds.append([])
            torch.cuda._sleep(100_000_000)  # noqa: SLF001 - there is no other
            for _ in range(LEASES):
                device.begin_step(next(steps))
                event = torch.cuda.Event() if what == "engine's event" else None
                if event is not None:
                    event.record()
                start = time.perf_counter()
                fence = device.lease(event)
                rounds[-1].append(time.perf_counter() - start)
            fence.wait(60.0)
        yield from latencies("lease", what, rounds[1:])
    device.close()


def _size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def _arrow(direction: Direction) -> str:
    return "to host" if direction is Direction.TO_HOST else "to device"


CASES: dict[str, Callable[[Scale], Told]] = {"machine": machine}
CASES |= {
    f"copy {_size(page)} {_size(span)} {_arrow(direction)}": functools.partial(
        copies, page, span, direction
    )
    for direction, page, span in itertools.product(Direction, PAGES, SPANS)
    if page <= span
}
CASES |= {
    f"submit {_size(page)}": functools.partial(submission, page)
    for page in (4 * KB, 16 * KB, 64 * KB)
}
CASES["lease"] = lease
CASES |= {
    f"load {_arrow(direction)}": functools.partial(load, direction)
    for direction in Direction
}


if __name__ == "__main__":
    if torch.cuda.is_available():
        main("gpu", CASES)
    else:
        print("benchmarks.gpu: torch finds no NVIDIA GPU here; nothing was measured.")
