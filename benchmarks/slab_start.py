# SPDX-License-Identifier: Apache-2.0
"""
How long ranks that start together wait for a slab, beside what the kernel needs alone.

Each rank is a process. It *serves* when its slab is open and a block can be reserved; all
memory is there when the last of it was populated. The kernel alone is one process that maps a
file of the same size in the same place and populates it in one call. Sides take turns. Page
tables are those of one rank, which maps the whole slab. Run ``python -m
benchmarks.slab_start``; it needs as much free memory as the slab has, and 2 GiB.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import attrs

from benchmarks.harness import make_keys
from ucm.config import StoreConfig
from ucm.stores.slab import SlabStore

__all__ = ["measure"]

GIB = 1 << 30
MEMORY = Path("/dev/shm")
_POPULATE_WRITE = 23
_LIMIT_S = 600.0


@attrs.frozen
class _Run:
    """One side once: seconds, and KiB of page tables of a rank."""

    serves_s: float
    all_s: float
    tables_kib: int


def _tables_kib() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmPTE"))
    return int(line.split()[1])


def _rank(
    path: Path, nbytes: int, slot: int, name: int, begin: Event, tell: Queue
) -> None:
    """Open the slab, reserve a block, wait for all memory."""
    begin.wait()
    started = time.monotonic()
    config = StoreConfig(path=str(path), capacity=nbytes)
    with SlabStore.open_configured(config, block_bytes=slot, index_only=False) as store:
        store.reserve(make_keys(name, 1), slot).discard()
        serves = time.monotonic() - started
        for thread in threading.enumerate():
            if thread.name == "ucm-populate":
                thread.join(_LIMIT_S)
        tell.put((serves, time.monotonic() - started, _tables_kib()))


def _kernel(path: Path, nbytes: int, tell: Queue) -> None:
    """Have the kernel populate a mapped file in one call."""
    descriptor = os.open(path / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, nbytes)
    started = time.monotonic()
    with mmap.mmap(descriptor, nbytes) as memory:
        memory.madvise(_POPULATE_WRITE)
        took = time.monotonic() - started
        tell.put((took, took, _tables_kib()))
    os.close(descriptor)


def _ours(nbytes: int, slot: int, ranks: int) -> _Run:
    context = multiprocessing.get_context("spawn")
    begin, tell = context.Event(), context.Queue()

    def start(path: Path) -> list[Any]:
        return [
            context.Process(
                target=_rank, args=(path / "slab", nbytes, slot, n, begin, tell)
            )
            for n in range(ranks)
        ]

    return _collect(start, tell, ranks, begin.set)


def _alone(nbytes: int) -> _Run:
    context = multiprocessing.get_context("spawn")
    tell = context.Queue()
    return _collect(
        lambda path: [context.Process(target=_kernel, args=(path, nbytes, tell))],
        tell,
        1,
    )


def _collect(
    start: Callable[[Path], Sequence[Any]],
    tell: Queue,
    number: int,
    begin: Callable[[], None] = lambda: None,
) -> _Run:
    directory = Path(tempfile.mkdtemp(prefix="ucm-start-", dir=MEMORY))
    try:
        children = start(directory)
        for child in children:
            child.start()
        time.sleep(3 if number > 1 else 0)  # until all have imported
        begin()
        told = [tell.get(timeout=_LIMIT_S) for _ in range(number)]
        for child in children:
            child.join(_LIMIT_S)
    finally:
        shutil.rmtree(directory)
    serves, everything, tables = zip(*told, strict=True)
    return _Run(max(serves), max(everything), max(tables))


def measure(nbytes: int, slot: int, ranks: int, pairs: int) -> Mapping[str, Any]:
    """Return medians of both sides, measured in turn, forwards and backwards."""
    ours: list[_Run] = []
    alone: list[_Run] = []
    for pair in range(pairs):
        sides = [lambda: ours.append(_ours(nbytes, slot, ranks))]
        sides.append(lambda: alone.append(_alone(nbytes)))
        for side in sides if pair % 2 else reversed(sides):
            side()
    return {
        "capacity_gib": nbytes // GIB,
        "ranks": ranks,
        "slot_kib": slot >> 10,
        "serves_s": [run.serves_s for run in ours],
        "all_memory_s": [run.all_s for run in ours],
        "kernel_alone_s": [run.all_s for run in alone],
        "ratio": statistics.median(run.all_s for run in ours)
        / statistics.median(run.all_s for run in alone),
        "page_tables_kib": max(run.tables_kib for run in ours),
        "page_tables_kernel_kib": max(run.tables_kib for run in alone),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slot-kib", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    found = measure(given.gib * GIB, given.slot_kib << 10, given.ranks, given.pairs)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
