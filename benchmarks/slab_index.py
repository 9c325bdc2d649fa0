# SPDX-License-Identifier: Apache-2.0
"""
Compare three indexes for a slab: LMDB, SQLite and the hash chains it has.

Measures, with 10 000, 100 000 and 1 000 000 keys stored (``--keys`` takes others, such as
the 16777216 slots of a terabyte) and the index full:

- lookups per second of a prefix match over 1000 keys, asked by another process, and
- what reserving and committing 1, 32, 64, 512 and 4096 new blocks costs, in microseconds
  of this thread's CPU a block (others may compute beside it), while old ones are evicted.

Each index does the same work: find the keys, take victims, drop their keys, add the
new ones as reserved, then make them visible in one step. Victims are given, since the
order of use is kept outside the index in all three. Run, with lmdb installed::

    python benchmarks/slab_index.py --json benchmarks/results/slab_index.json
"""

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import sqlite3
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import numpy as np

from ucm.blocks import PackedKey
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._locks import FileLock

SIZES = (10_000, 100_000, 1_000_000)
BATCHES = (1, 32, 64, 512, 4096)
ASKED, ROUNDS = 1000, 15
_FILLED_AT_ONCE = 1 << 16
_VALUE = struct.Struct("<IQ")


def make_keys(numbers: Sequence[int]) -> list[PackedKey]:
    """Return random keys of 53 bytes, as long as those over SHA-256, by their numbers."""
    words = np.asarray(numbers, dtype=np.uint64)[:, None] * np.uint64(4)
    words = (words + np.arange(1, 5, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    data = (words ^ (words >> np.uint64(31))).tobytes()
    head = bytes(21)
    return [PackedKey(head + data[at : at + 32]) for at in range(0, len(data), 32)]


class ChainIndex:
    """The slab's index, without a slab: there are no data, whatever its size."""

    name = "chains"

    def __init__(self, path: Path, num_slots: int, *, create: bool) -> None:
        layout = IndexLayout(num_slots)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if create:
            os.ftruncate(fd, layout.nbytes)
        self._lock = FileLock(fd, path, 10.0)
        memory = memoryview(mmap.mmap(fd, layout.nbytes))
        self._index = SlotIndex(memory, layout, self._lock, lambda owners: [])
        if create:
            self._index.format()
            self._index.admit(np.arange(num_slots))

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed."""
        committed = self._index.look_up(self._index.batch(keys)).committed
        return len(keys) if committed.all() else int(committed.argmin())

    def replace(self, keys: Sequence[PackedKey], victims: Sequence[PackedKey]) -> None:
        """Reserve and publish; the index finds the victims itself."""
        index = self._index
        grant = index.reserve(index.batch(keys), 4096, 1)
        index.publish(grant, np.zeros(len(keys), dtype=np.uint64), 1)

    def fill(self, keys: Sequence[PackedKey]) -> None:
        """Store keys in an empty index."""
        for start in range(0, len(keys), 4096):
            self.replace(keys[start : start + 4096], ())

    def close(self) -> None:
        """Let go."""
        self._lock.close()


class LMDBIndex:
    """A B+tree of key to slot; committing is the deletion of one lease record."""

    name = "lmdb"

    def __init__(self, path: Path, num_slots: int, *, create: bool) -> None:
        self._env = lmdb.open(
            str(path), map_size=4 << 30, max_dbs=2, sync=False, readahead=False
        )
        self._keys = self._env.open_db(b"keys")
        self._leases = self._env.open_db(b"leases")

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are there."""
        with self._env.begin(db=self._keys) as txn:
            get = txn.get
            for position, key in enumerate(keys):
                if get(key) is None:
                    return position
        return len(keys)

    def replace(self, keys: Sequence[PackedKey], victims: Sequence[PackedKey]) -> None:
        """Two transactions: reserve, commit."""
        with self._env.begin(db=self._keys, write=True) as txn:
            cursor = txn.cursor()
            if cursor.getmulti(keys):
                raise AssertionError("the keys are new")
            slots = [value for _, value in cursor.getmulti(victims)]
            for key in victims:
                txn.delete(key)
            cursor.putmulti(zip(keys, slots, strict=True))
            txn.put(b"lease", b"".join(keys), db=self._leases)
        with self._env.begin(db=self._leases, write=True) as txn:
            txn.delete(b"lease")

    def fill(self, keys: Sequence[PackedKey]) -> None:
        """Store keys in an empty index."""
        with self._env.begin(db=self._keys, write=True) as txn:
            txn.cursor().putmulti(
                sorted((key, _VALUE.pack(i, i)) for i, key in enumerate(keys))
            )

    def close(self) -> None:
        """Let go."""
        self._env.close()


class SQLiteIndex:
    """A table without row ids, in WAL mode, never synced."""

    name = "sqlite"

    def __init__(self, path: Path, num_slots: int, *, create: bool) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=off")
        self._db.execute("pragma mmap_size=1073741824")
        if create:
            self._db.execute(
                "create table k (key blob primary key, slot int, lease int)"
                " without rowid"
            )

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed."""
        ask = self._db.execute
        ask("begin")
        try:
            for position, key in enumerate(keys):
                row = ask("select lease from k where key = ?", (key,)).fetchone()
                if row is None or row[0]:
                    return position
        finally:
            ask("commit")
        return len(keys)

    def replace(self, keys: Sequence[PackedKey], victims: Sequence[PackedKey]) -> None:
        """Two transactions: reserve, commit."""
        db = self._db
        db.execute("begin immediate")
        slots = [
            db.execute("delete from k where key = ? returning slot", (key,)).fetchone()
            for key in victims
        ]
        db.executemany(
            "insert into k values (?, ?, 1)",
            [(key, slot) for key, (slot,) in zip(keys, slots, strict=True)],
        )
        db.execute("commit")
        db.execute("begin immediate")
        db.executemany("update k set lease = 0 where key = ?", [(key,) for key in keys])
        db.execute("commit")

    def fill(self, keys: Sequence[PackedKey]) -> None:
        """Store keys in an empty index."""
        self._db.execute("begin")
        self._db.executemany(
            "insert into k values (?, ?, 0)",
            sorted((key, slot) for slot, key in enumerate(keys)),
        )
        self._db.execute("commit")

    def close(self) -> None:
        """Let go."""
        self._db.close()


INDEXES = {kind.name: kind for kind in (ChainIndex, LMDBIndex, SQLiteIndex)}


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the seconds of CPU that each call took."""
    taken = []
    for call in calls:
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return taken


def look_up(name: str, path: Path, num_keys: int, asked: list[list[PackedKey]]) -> list:
    """Ask from this process; return seconds."""
    index = INDEXES[name](path, num_keys, create=False)
    found = {index.match(keys) for keys in asked}  # also warms up
    if found != {ASKED}:
        raise AssertionError(found)
    taken = timed([lambda keys=keys: index.match(keys) for keys in asked])
    index.close()
    return taken


def measure(name: str, home: Path, num_keys: int) -> dict[str, float | int | str]:
    """Fill one index, ask it from another process, then replace blocks in it."""
    path = home / f"{name}-{num_keys}"
    index = INDEXES[name](path, num_keys, create=True)
    for start in range(0, num_keys, _FILLED_AT_ONCE):
        index.fill(make_keys(range(start, min(start + _FILLED_AT_ONCE, num_keys))))
    pick = np.random.default_rng(2)
    asked = [
        make_keys(pick.choice(num_keys, ASKED, replace=False)) for _ in range(ROUNDS)
    ]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        looked = pool.apply(look_up, (name, path, num_keys, asked))
    costs = {}
    first = 0
    for batch in BATCHES:
        if ROUNDS * batch + first > num_keys:
            continue  # what was just stored would be replaced
        steps = []
        for _ in range(ROUNDS):
            old = make_keys(range(first, first + batch))
            new = make_keys(range(num_keys + first, num_keys + first + batch))
            steps.append(lambda new=new, old=old: index.replace(new, old))
            first += batch
        cost = statistics.median(timed(steps)) / batch
        costs[f"replace_{batch}_us_per_block"] = round(cost * 1e6, 2)
    index.close()
    return {
        "index": name,
        "keys": num_keys,
        "lookups_per_s": round(ASKED / statistics.median(looked)),
        "lookup_p99_ms": round(float(np.quantile(looked, 0.99)) * 1e3, 3),
        **costs,
    }


def main() -> None:
    """Measure all and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--directory", help="where the indexes lie for the run")
    parser.add_argument("--keys", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", nargs="+", choices=INDEXES, default=list(INDEXES))
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as home:
        for num_keys in arguments.keys:
            for name in arguments.only:
                results.append(measure(name, Path(home), num_keys))
                print(results[-1])
    if arguments.json:
        machine = {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "lmdb": ".".join(map(str, lmdb.version())),
            "sqlite": sqlite3.sqlite_version,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({**machine, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
