# SPDX-License-Identifier: Apache-2.0
"""
Speed of ``CPUDevice.gather`` and ``scatter``, spans of 16 MB, against memcpy.

Run ``python -m benchmarks.gather``; with ``--only busy`` beside a thread that runs
Python all the time.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.harness import Figure, Scale, Side, compare, main, ratio, speed
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.cpu import CPUDevice
from ucm.plan import HostSlots
from ucm.prefixes import paged_layout

ROWS, ROUNDS = 32, 6
GROUP = GroupId(0)


class Case(NamedTuple):
    """One shape of memory and spans."""

    name: str
    page_bytes: int
    num_blocks: int
    memory: str
    ids: str
    slot_padding: int


SHAPES = [
    Case("2 KB", 2048, 256, "layers", "random", 0),
    Case("4 KB", 4096, 128, "layers", "random", 0),
    Case("16 KB", 16384, 32, "layers", "random", 0),
    Case("64 KB", 65536, 8, "layers", "random", 0),
    Case("4 KB, ids in order", 4096, 128, "layers", "ordered", 0),
    Case("2 KB, block-contiguous", 2048, 256, "blocks", "random", 0),
    Case("16 KB, block-contiguous", 16384, 32, "blocks", "random", 0),
    Case("4 KB, one tensor per layer", 4096, 128, "separate", "random", 0),
    Case("16 KB, one tensor per layer", 16384, 32, "separate", "random", 0),
    Case("64 KB, one tensor per layer", 65536, 8, "separate", "random", 0),
    Case("4 KB, padded slots", 4096, 128, "layers", "random", 4096),
    Case("16 KB, padded slots", 16384, 32, "layers", "random", 4096),
    Case("64 KB, padded slots", 65536, 8, "layers", "random", 4096),
]


def make_tensors(memory: str, num_blocks: int, page: int) -> list[torch.Tensor]:
    """Return one ``[num_blocks, page]`` view per row."""
    if memory == "separate":
        return [
            torch.ones(num_blocks, page, dtype=torch.uint8).clone() for _ in range(ROWS)
        ]
    flat = torch.ones(num_blocks * ROWS * page, dtype=torch.uint8)
    if memory == "layers":
        return list(flat.view(ROWS, num_blocks, page))
    return list(flat.view(num_blocks, ROWS, page).unbind(1))


@contextlib.contextmanager
def spinning(busy: bool) -> Iterator[None]:  # noqa: FBT001 - which of two cases
    """Run Python on another thread meanwhile, as a busy engine thread does."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if busy:
            thread.join()


class Copies:
    """The sides of one case; a number picks the span."""

    def __init__(self, case: Case) -> None:
        page, count = case.page_bytes, case.num_blocks
        num_blocks = count * ROUNDS
        names = [f"layer{number}" for number in range(ROWS)]
        layout = paged_layout(dict.fromkeys(names, page), block_tokens=16)
        tensors = make_tensors(case.memory, num_blocks, page)
        self._device = CPUDevice(num_blocks)
        self._device.register(layout, dict(zip(names, tensors, strict=True)))
        block = layout.max_block_bytes
        pool = torch.ones(count, block + case.slot_padding, dtype=torch.uint8).numpy()
        self._slots = HostSlots(pool, np.arange(count), block)
        order = np.arange(num_blocks)
        if case.ids == "random":
            order = np.random.default_rng(0).permutation(num_blocks)
        spans = order.reshape(ROUNDS, count).tolist()
        self._spans = [list(map(BlockId, span)) for span in spans]
        self._row_ids = [RowId(number) for number in range(ROWS)]
        self.nbytes = count * block
        self._source = torch.ones(ROUNDS, self.nbytes, dtype=torch.uint8).numpy()
        self._target = torch.ones(self.nbytes, dtype=torch.uint8).numpy()

    def gather(self, number: int) -> Callable[[], object]:
        """Copy pages into slots."""
        span = self._spans[number % ROUNDS]
        return lambda: self._device.gather(GROUP, self._row_ids, span, self._slots)

    def scatter(self, number: int) -> Callable[[], object]:
        """Copy slots into pages."""
        span = self._spans[number % ROUNDS]
        return lambda: self._device.scatter(GROUP, self._row_ids, self._slots, span)

    def memcpy(self, number: int) -> Callable[[], object]:
        """Copy as many bytes in one piece."""
        return lambda: np.copyto(self._target, self._source[number % ROUNDS])


def measure(case: Case, busy: bool, scale: Scale) -> Iterator[Figure]:  # noqa: FBT001
    """Measure one case."""
    copies = Copies(case)
    name = f"{case.name}, beside Python" if busy else case.name
    with spinning(busy):
        sides: dict[str, Side] = {
            "gather": copies.gather,
            "scatter": copies.scatter,
            "memcpy": copies.memcpy,
        }
        times = compare(sides, scale)
    for verb in ("gather", "scatter"):
        yield ratio(times, verb, "memcpy", name)
        yield speed(times, verb, name, copies.nbytes)


CASES = {
    f"{'busy' if busy else 'alone'} {case.name}": functools.partial(measure, case, busy)
    for busy in (False, True)
    for case in SHAPES
}


if __name__ == "__main__":
    main("gather", CASES)
