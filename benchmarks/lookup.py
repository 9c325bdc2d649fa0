# SPDX-License-Identifier: Apache-2.0
"""
Prefix match over 1000 keys, asked by a process that did not store them.

Slabs with 10 000, 100 000 and 1 000 000 keys stored are asked in turn, each time for
other keys. Beside them a dict of all keys in the asking process itself: what could be
had without sharing anything. Slots are as small as they can be; nothing is stored in
them. Run ``python -m benchmarks.lookup``.
"""

import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Figure, Scale, Times, compare, main, make_keys, ratio
from benchmarks.stores import MEMORY
from ucm.blocks import PackedKey
from ucm.stores.slab import SlabStore
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._opened import OpenedSlab

ASKED = 1000
SLOT_BYTES = 4096
_STEP = 4096


def name_of(num_keys: int) -> str:
    """Return how a slab is called in the results."""
    return f"{num_keys} keys"


def fill(path: Path, num_keys: int) -> None:
    """Make a slab whose index is full."""
    slab = OpenedSlab(
        path,
        Geometry.fit(num_keys * SLOT_BYTES, SLOT_BYTES),
        index_only=True,
        open_timeout=10.0,
        lock_timeout=10.0,
    )
    index, owner = slab.index, slab.owner_id
    index.admit(np.arange(num_keys))  # without data
    for first in range(0, num_keys, _STEP):
        count = min(_STEP, num_keys - first)
        grant = index.reserve(index.batch(make_keys(first, count)), SLOT_BYTES, owner)
        index.publish(grant, np.zeros(count, dtype=np.uint64), owner)
    slab.close()


class Asker:
    """Asks for a random thousand of the stored keys."""

    def __init__(self, path: Path, num_keys: int) -> None:
        self._rng = np.random.default_rng(1)
        self._keys = make_keys(0, num_keys)
        self._slots = {key: slot for slot, key in enumerate(self._keys)}
        self._store = SlabStore(
            path=str(path),
            capacity_bytes=num_keys * SLOT_BYTES,
            block_bytes=SLOT_BYTES,
            index_only=True,
        )
        if self._store.match(self._keys) != num_keys:  # also touches every page
            raise AssertionError("a key is missing")

    def _pick(self) -> list[PackedKey]:
        picked = self._rng.choice(len(self._keys), ASKED, replace=False)
        return [self._keys[at] for at in picked]

    def ask_slab(self, _: int) -> Callable[[], object]:
        """Match in the slab."""
        return functools.partial(self._store.match, self._pick())

    def ask_dict(self, _: int) -> Callable[[], object]:
        """Match in the dict."""
        keys, slots = self._pick(), self._slots

        def call() -> int:
            for position, key in enumerate(keys):
                if key not in slots:
                    return position
            return len(keys)

        return call

    def latencies(self, count: int) -> list[float]:
        """Return the seconds of *count* calls."""
        taken = []
        for number in range(count):
            call = self.ask_slab(number)
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return taken

    def close(self) -> None:
        """Let go of the slab."""
        self._store.close()


def ask(home: Path, sizes: list[int], scale: Scale) -> tuple[Times, dict[int, list]]:
    """Measure in this process: sides in turn, then latencies of single calls."""
    askers = {num_keys: Asker(home / str(num_keys), num_keys) for num_keys in sizes}
    sides = {name_of(num_keys): asker.ask_slab for num_keys, asker in askers.items()}
    sides["dict"] = askers[sizes[-1]].ask_dict
    times = compare(sides, scale._replace(repeats=5 * scale.repeats))
    rounds, calls = (2, 100) if scale.is_quick else (5, 400)
    p99 = {
        num_keys: [
            float(np.quantile(asker.latencies(calls), 0.99)) for _ in range(rounds)
        ]
        for num_keys, asker in askers.items()
    }
    for asker in askers.values():
        asker.close()
    return times, p99


def measure(sizes: list[int], scale: Scale) -> Iterator[Figure]:
    """Fill here, ask from another process."""
    with tempfile.TemporaryDirectory(prefix="ucm-lookup-", dir=MEMORY) as home:
        for num_keys in sizes:
            fill(Path(home) / str(num_keys), num_keys)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            times, p99 = pool.apply(ask, (Path(home), sizes, scale))
            pool.close()
            pool.join()
    last = sizes[-1]
    for num_keys in sizes:
        name = name_of(num_keys)
        values = [ASKED / spent / 1e3 for spent in times[name]]
        is_last = num_keys == last
        yield Figure.over(name, "matched", "k/s", values, ">= 500" if is_last else "")
        yield Figure.over(
            name,
            "p99 of a call",
            "ms",
            [1e3 * spent for spent in p99[num_keys]],
            "<= 5" if is_last else "",
        )
        if num_keys != sizes[0]:
            flat = ">= 0.8" if is_last else ""
            yield ratio(times, name, name_of(sizes[0]), name, flat)
    yield ratio(times, name_of(last), "dict", name_of(last))


CASES = {
    "small": functools.partial(measure, [10_000]),
    "sizes": functools.partial(measure, [10_000, 100_000, 1_000_000]),
}


if __name__ == "__main__":
    main("lookup", CASES)
