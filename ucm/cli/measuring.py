# SPDX-License-Identifier: Apache-2.0
"""
What ``ucm bench`` measures: our store in memory, and reads and writes of a disk.

Everything is in a directory of its own that is made for it, and removed. Rows are plain
JSON: what was done, at which depth, bytes and operations per second, and seconds of the
median operation and of the slowest hundredth.
"""

import contextlib
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ucm.blocks import BlockHash, BlockKey, GroupId, PackedKey, ShardId
from ucm.cli.tidying import tidily
from ucm.errors import ConfigError, StoreError, StoreUnavailableError
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore

__all__ = ["Plan", "Row", "measure_disk", "measure_store", "workplace"]

_BATCH = 16
_TARGETS = 8
_LOOKED_UP = 512
_DEPTHS = (1, 4, 16, 32)
_MOST_WRITING_S = 5.0
_SPARE = 64 << 20


@attrs.frozen
class Plan:
    """
    How much is done.

    Args:
        block_bytes: Of one operation; a multiple of 4096.
        size: Bytes that are there to be read.
        seconds: For each row.
    """

    block_bytes: int
    size: int
    seconds: float

    @property
    def num_blocks(self) -> int:
        """That there are to be read; at least one batch."""
        return max(_BATCH, self.size // self.block_bytes)


@attrs.frozen(kw_only=True)
class Row:
    """One measurement."""

    what: str
    depth: int = 1
    bytes_per_s: float
    operations_per_s: float
    median_s: float
    slowest_s: float
    """Ninety-nine of a hundred were faster."""


@contextlib.contextmanager
def workplace(path: Path, nbytes: int) -> Iterator[Path]:
    """
    Make a directory to measure in, and remove it.

    Raises:
        StoreError: A store is there, or too little room.
        OSError: It cannot be made.
    """
    if (path / "slab.json").exists():
        raise StoreError(f"{path} is a store: name the directory that it is in")
    system = os.statvfs(path)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < nbytes + _SPARE:  # none: a tmpfs without a limit
        raise StoreError(
            f"{path} has {free} bytes left, and {nbytes + _SPARE} are needed: see --size"
        )
    with (
        tidily(),
        tempfile.TemporaryDirectory(
            prefix="ucm-bench-", dir=path, ignore_cleanup_errors=True
        ) as made,
    ):
        yield Path(made)


def _repeat(
    what: str, plan: Plan, nbytes: int, act: Callable[[int], None], count: int = 1
) -> Row:
    """Do something until its time is over; each time *count* operations of *nbytes*."""
    took: list[float] = []
    began = now = time.monotonic()
    while now < began + plan.seconds or not took:
        act(len(took))
        before, now = now, time.monotonic()
        took.append((now - before) / count)
    return _row(what, 1, nbytes, count * len(took), now - began, took)


def _row(
    what: str, depth: int, nbytes: int, done: int, seconds: float, took: list[float]
) -> Row:
    seconds = max(seconds, 1e-9)
    median, slowest = np.percentile(took, (50, 99)).tolist()
    return Row(
        what=what,
        depth=depth,
        bytes_per_s=nbytes * done / seconds,
        operations_per_s=done / seconds,
        median_s=median,
        slowest_s=slowest,
    )


# -- our store ---------------------------------------------------------------------


def _keys(first: int, count: int) -> list[PackedKey]:
    return [
        BlockKey(
            bytes(16), GroupId(0), ShardId(0), BlockHash(number.to_bytes(32, "big"))
        ).pack()
        for number in range(first, first + count)
    ]


def measure_store(folder: Path, plan: Plan) -> Iterator[Row]:
    """
    Yield what copies alone reach, then saves, loads and look-ups of a new slab.

    Args:
        folder: Where it is made.
        plan: How much.

    Raises:
        StoreUnavailableError: There is no room for it.
    """
    source = np.random.default_rng(1).integers(
        0, 255, (_BATCH, plan.block_bytes), np.uint8
    )
    targets = np.zeros((_TARGETS, *source.shape), np.uint8)  # more than caches hold
    target = targets[0]

    def copy(number: int) -> None:
        targets[number % _TARGETS] = source

    yield _repeat("copy", plan, plan.block_bytes, copy, _BATCH)
    try:
        store = SlabStore(
            path=str(folder / "slab"),
            capacity_bytes=plan.num_blocks * plan.block_bytes,
            block_bytes=plan.block_bytes,
        )
    except ConfigError as exc:
        raise StoreUnavailableError(str(exc)) from exc
    with store:
        _grow(store)
        yield from _measure_verbs(store, plan, source, target)


def _grow(store: SlabStore) -> None:
    deadline = time.monotonic() + _MOST_WRITING_S
    while store.is_growing and time.monotonic() < deadline:
        time.sleep(0.01)


def _measure_verbs(store: Store, plan: Plan, source: Any, target: Any) -> Iterator[Row]:  # noqa: ANN401 - numpy's
    def save(number: int) -> None:
        with store.reserve(_keys(number * _BATCH, _BATCH), plan.block_bytes) as lease:
            for at in range(len(lease.keys)):
                lease.slots.block(at)[:] = source[at]
            lease.seal(0, len(lease.keys))
            lease.commit()

    row = _repeat("save", plan, plan.block_bytes, save, _BATCH)
    yield row
    for number in range(plan.num_blocks // _BATCH):
        save(number)
    there = [key for key in _keys(0, plan.num_blocks) if store.contains([key])[0]]
    batches = [
        there[start : start + _BATCH]
        for start in range(0, len(there) - _BATCH + 1, _BATCH)
    ]

    def load(number: int) -> None:
        with store.read(batches[number % len(batches)]) as lease:
            lease.verify(0, _BATCH)
            for at in range(_BATCH):
                target[at] = lease.slots.block(at)
            lease.recheck()

    yield _repeat("load", plan, plan.block_bytes, load, _BATCH)
    asked = (there * _LOOKED_UP)[:_LOOKED_UP]

    def look_up(_: int) -> None:
        store.match(asked)

    yield _repeat("look-up", plan, 0, look_up, _LOOKED_UP)


# -- a disk ------------------------------------------------------------------------


def measure_disk(folder: Path, plan: Plan) -> tuple[list[Row], bool]:
    """
    Write a file and read it at random, at several depths.

    Args:
        folder: Where it is made.
        plan: How much.

    Returns:
        The rows, and whether the kernel's cache was passed by.
    """
    file = folder / "file"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    is_direct = True
    try:
        fd = os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        is_direct, fd = False, os.open(file, flags, 0o600)
    try:
        written, row = _write(fd, plan)
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return [row, *(_read(fd, plan, written, depth) for depth in _DEPTHS)], is_direct
    finally:
        os.close(fd)


def _aligned(plan: Plan) -> mmap.mmap:
    return mmap.mmap(-1, plan.block_bytes)


def _write(fd: int, plan: Plan) -> tuple[int, Row]:
    """Write all, or as much as a few seconds allow; return how many blocks."""
    with _aligned(plan) as data:
        data.write(random.Random(1).randbytes(plan.block_bytes))
        took: list[float] = []
        began = now = time.monotonic()
        while len(took) < plan.num_blocks and now < began + _MOST_WRITING_S:
            os.pwrite(fd, data, len(took) * plan.block_bytes)
            before, now = now, time.monotonic()
            took.append(now - before)
        os.fsync(fd)
        seconds = time.monotonic() - began
    done = len(took)
    return done, _row("write, then sync", 1, plan.block_bytes, done, seconds, took)


def _read(fd: int, plan: Plan, num_blocks: int, depth: int) -> Row:
    took: list[list[float]] = [[] for _ in range(depth)]
    problems: list[OSError] = []
    end = time.monotonic() + plan.seconds

    def work(number: int) -> None:
        chance, mine = random.Random(number), took[number]
        with _aligned(plan) as into:
            now = time.monotonic()
            while (now < end or not mine) and not problems:
                try:
                    at = chance.randrange(num_blocks) * plan.block_bytes
                    os.preadv(fd, [into], at)
                except OSError as exc:
                    problems.append(exc)
                before, now = now, time.monotonic()
                mine.append(now - before)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(each,)) for each in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    seconds, each = time.monotonic() - began, [one for mine in took for one in mine]
    return _row("read at random", depth, plan.block_bytes, len(each), seconds, each)
