# SPDX-License-Identifier: Apache-2.0
"""
What a slab's index costs at 16 GiB, 100 GiB and 1 TiB, in slots of 64 KiB and 2 MiB.

There are no data: an index knows slots by their number only, so that one of a terabyte
is measured as it is on a machine that has none. It lies in memory of this process, which
no other one shares. Every slot holds a block before anything is measured.

Times are of this thread's CPU (others may compute beside it), in milliseconds. ``lock``
is the longest time that one call held the index lock; a rebuild, which is for who opens
the slab after a crash of the machine, is not among them. Run::

    python benchmarks/slab_scale.py --json benchmarks/results/slab_scale.json
"""

import argparse
import contextlib
import functools
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from ucm.blocks import PackedKey
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import FREE, MOST, IndexLayout
from ucm.stores.slab._locks import FileLock

GIB = 1 << 30
CAPACITIES = {"16 GiB": 16 * GIB, "100 GiB": 100 * GIB, "1 TiB": 1024 * GIB}
SLOTS = {"2 MiB": 2 << 20, "64 KiB": 64 << 10}
ASKED, OWNER = 1000, 1


def nobody(owners: Iterable[int]) -> list[int]:
    """Return which owners are dead."""
    return []


class TimedLock(FileLock):
    """A lock that remembers its longest hold."""

    longest = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock and take the time."""
        with super().held():
            start = time.thread_time()
            yield
            self.longest = max(self.longest, time.thread_time() - start)


class Scale:
    """One index, and what is measured of it."""

    def __init__(self, home: Path, num_slots: int) -> None:
        self.layout = IndexLayout(num_slots)
        self.num_slots = num_slots
        self.results: dict[str, float] = {"index_bytes": self.layout.nbytes}
        fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT)
        self.lock = TimedLock(fd, home / "lock", 10.0)
        self.memory = mmap.mmap(-1, self.layout.nbytes)
        self.index = self._map()
        self.num_keys = 0
        self.locks: dict[str, float] = {}

    def _map(self) -> SlotIndex:
        return SlotIndex(memoryview(self.memory), self.layout, self.lock, nobody)

    def keys(self, count: int, first: int | None = None) -> list[PackedKey]:
        """Return keys of 53 bytes, new ones or from a number on."""
        if first is None:
            first, self.num_keys = self.num_keys, self.num_keys + count
        data = np.arange(first, first + count, dtype=">u8").tobytes()
        head = bytes(45)
        return [PackedKey(head + data[8 * i : 8 * i + 8]) for i in range(count)]

    def save(self, keys: list[PackedKey]) -> None:
        """Reserve and publish."""
        index = self.index
        grant = index.reserve(index.batch(keys), 1, OWNER)
        index.publish(grant, np.zeros(len(grant.slots), dtype=np.uint64), OWNER)

    def measure(self, name: str, calls: list[Callable[[], object]]) -> None:
        """Call each; note the median and the 99th percentile, and the longest lock."""
        self.lock.longest, taken = 0.0, []
        for call in calls:
            start = time.thread_time()
            call()
            taken.append(time.thread_time() - start)
        self.results[f"{name}_ms"] = round(1e3 * float(np.median(taken)), 3)
        if len(taken) > 1:
            self.results[f"{name}_p99_ms"] = round(
                1e3 * float(np.quantile(taken, 0.99)), 3
            )
        self.locks[name] = round(1e3 * self.lock.longest, 3)

    def die_amid(self) -> None:
        """Leave what the death of a process leaves amid an eviction of many."""
        index = self.index
        slots = np.random.default_rng(3).choice(self.num_slots, MOST, replace=False)
        index.begin(slots, slots)
        index.state[slots[: MOST // 2]] = FREE

    def repair(self) -> None:
        """Do what the next one does."""
        with self.index.locked():
            pass

    def run(self) -> dict[str, object]:
        """Measure all."""
        every = np.arange(self.num_slots)
        self.measure("create", [lambda: (self.index.format(), self.index.admit(every))])
        for _ in range(-(-self.num_slots // MOST)):
            self.save(self.keys(MOST))
        self.measure("join", [lambda: (self._map(), self.repair())] * 5)
        self._measure_looks()
        self._measure_saves()
        if self.num_slots > 2 * MOST:
            self.die_amid()
            self.measure("repair", [self.repair])
        self.measure("list_own", [lambda: self.index.own.make(7)])
        moments = self.index.moment() + np.random.default_rng(4).permutation(every)
        for start in range(0, self.num_slots, ASKED):
            self.index.touch(
                every[start : start + ASKED], moments[start : start + ASKED]
            )
        self.measure("evict_after_all_were_touched", [lambda: self.save(self.keys(2))])
        self._measure_saves("_scattered")
        self.measure("rebuild", [lambda: self.index.rebuild(self.index.moment())])
        self.measure("clear", [lambda: self.index.clear(b"")])
        del self.locks["rebuild"], self.locks["join"]
        longest = max(self.locks, key=self.locks.__getitem__)
        return {
            **self.results,
            "longest_lock_ms": self.locks[longest],
            "longest_lock_of": longest,
            "locks_ms": self.locks,
        }

    def _measure_looks(self) -> None:
        pick = np.random.default_rng(2)
        index = self.index
        held = self.num_keys - self.num_slots
        batches = [
            [
                self.keys(1, held + int(at))[0]
                for at in pick.integers(0, self.num_slots, ASKED)
            ]
            for _ in range(50)
        ]
        looks = [lambda keys=keys: index.look_up(index.batch(keys)) for keys in batches]
        self.measure("look_up_1000", looks)
        ones = [lambda key=key: index.slot_of(key) for key in batches[0]]
        self.measure("look_up_1", ones)
        found = index.look_up(index.batch(batches[1]))
        moments = np.full(int(found.committed.sum()), index.moment())
        slots = found.slots[found.committed]
        self.measure("touch_1000", [lambda: index.touch(slots, moments)] * 20)

    def _measure_saves(self, how: str = "") -> None:
        for count, rounds in ((1, 300), (32, 300), (MOST, 10)):
            if count < self.num_slots:
                batches = [self.keys(count) for _ in range(rounds)]
                calls = [functools.partial(self.save, keys) for keys in batches]
                self.measure(f"evict_{count}{how}", calls)


def main() -> None:
    """Measure all and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--most", type=int, default=1 << 34, help="slots at most")
    arguments = parser.parse_args()
    results = []
    for slot_name, slot_bytes in SLOTS.items():
        for name, capacity in CAPACITIES.items():
            num_slots = capacity // slot_bytes
            if num_slots > arguments.most:
                continue
            with tempfile.TemporaryDirectory() as home:
                found = Scale(Path(home), num_slots).run()
            results.append(
                {"capacity": name, "slot": slot_name, "slots": num_slots, **found}
            )
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        machine = {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "data": "simulated: the index only",
        }
        arguments.json.write_text(
            json.dumps({**machine, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
