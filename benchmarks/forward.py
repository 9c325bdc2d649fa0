# SPDX-License-Identifier: Apache-2.0
"""
What copies cost a forward pass that computes beside them.

Matrix products stand for the forward pass, on one thread of the two cores or on both,
while each step of 20 ms sets 64 MB going: through the pipeline, on one plain thread
that copies the same bytes, and on one that makes the same calls of store and device.
Part of ``benchmarks.pipeline``.
"""

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Self

import torch

from benchmarks.bench import KB, Bench, on_slab
from benchmarks.harness import Figure, Scale, Side, compare
from ucm.scheduler.messages import TransferKind

__all__ = ["measure_forward"]

STEP_S = 0.02
STEP_SPANS = 8
SIZE = 512

_Start = Callable[[int], Callable[[], object]]
"""Given the number of a step, prepares what the step sets going."""


class PlainThread:
    """One thread that makes calls in order."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._is_over = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.put(lambda: None)
        self._thread.join()

    def put(self, call: Callable[[], object]) -> None:
        """Have a call made."""
        self._calls.put(call)

    def settle(self) -> None:
        """Wait until all calls are over."""
        over = threading.Event()
        self.put(over.set)
        over.wait()

    def _main(self) -> None:
        while not self._is_over:
            self._calls.get()()


class Beside:
    """
    What a forward pass is measured beside; each step sets 64 MB going.

    Args:
        bench: Where the bytes are.
        plain: Moves them where the pipeline does not.
    """

    def __init__(self, bench: Bench, plain: PlainThread) -> None:
        self._bench = bench
        self._plain = plain

    def settle(self) -> None:
        """Wait until nothing moves."""
        self._bench.settle()
        self._plain.settle()

    def nothing(self, _: int) -> Callable[[], object]:
        """Leave the forward pass alone."""
        return lambda: None

    def pipeline(self, step: int) -> Callable[[], object]:
        """Save through the pipeline."""
        bench = self._bench
        keys = [bench.new_keys() for _ in range(STEP_SPANS)]
        orders = bench.orders(
            TransferKind.SAVE, keys, STEP_SPANS, first=step * STEP_SPANS
        )
        return lambda: bench.submit(orders)

    def memcpy(self, step: int) -> Callable[[], object]:
        """Copy on a plain thread."""

        def copy() -> None:
            for at in range(STEP_SPANS):
                self._bench.memcpy_span(step * STEP_SPANS + at)

        return lambda: self._plain.put(copy)

    def calls(self, step: int) -> Callable[[], object]:
        """Save on a plain thread."""
        keys = [self._bench.new_keys() for _ in range(STEP_SPANS)]

        def save() -> None:
            for at, span_keys in enumerate(keys):
                self._bench.save_span(step * STEP_SPANS + at, span_keys)

        return lambda: self._plain.put(save)


def forward(products: int) -> None:
    """Compute as a forward pass does."""
    one = torch.ones(SIZE, SIZE)
    for _ in range(products):
        torch.mm(one, one)


def measure_forward(threads: int, scale: Scale) -> Iterator[Figure]:
    """Measure the time of forward passes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with on_slab(64 * KB) as bench, PlainThread() as plain:
            beside = Beside(bench, plain)
            sides = forward_sides(beside, 10 if scale.is_quick else 30)
            times = compare(sides, scale._replace(repeats=1))
            beside.settle()
    finally:
        torch.set_num_threads(before)
    case = f"forward on {threads} of 2 cores"
    target = "<= 1.1" if threads == 1 else ""
    for one, other, bound in (
        ("pipeline", "alone", ""),
        ("plain memcpy", "alone", ""),
        ("pipeline", "plain memcpy", target),
        ("pipeline", "plain calls", ""),
    ):
        values = [a / b for a, b in zip(times[one], times[other], strict=True)]
        yield Figure.over(case, f"time, {one} / {other}", "ratio", values, bound)


def forward_sides(beside: Beside, steps: int) -> dict[str, Side]:
    """Return the same forward passes beside different things."""
    forward(20)
    start = time.perf_counter()
    forward(20)
    products = max(1, round(20 * STEP_S / (time.perf_counter() - start)))

    def side(begin: _Start) -> Side:
        def prepare(_: int) -> Callable[[], object]:
            beside.settle()
            starts = [begin(step) for step in range(steps)]

            def call() -> None:
                for start in starts:
                    start()
                    forward(products)

            return call

        return prepare

    return {
        "alone": side(beside.nothing),
        "pipeline": side(beside.pipeline),
        "plain memcpy": side(beside.memcpy),
        "plain calls": side(beside.calls),
    }
