# SPDX-License-Identifier: Apache-2.0
"""
Compare three indexes for a slab: LMDB, SQLite and the hash chains it has.

Measures, with 10 000, 100 000 and 1 000 000 keys stored and the index full:

- lookups per second of a prefix match over 1000 keys, asked by another process, and
- what reserving and committing 64 and 512 new blocks costs, in microseconds a block,
  while old ones are evicted.

Each index does the same work: find the keys, take victims, drop their keys, add the
new ones as reserved, then make them visible in one step. Victims are given, since the
order of use is kept outside the index in all three. Run, with lmdb installed::

    python benchmarks/slab_index.py --json benchmarks/results/slab_index.json
"""

import argparse
import json
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
from ucm.config import Durability
from ucm.stores.slab import SlabStore
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._opened import OpenedSlab

SIZES = (10_000, 100_000, 1_000_000)
BATCHES = (64, 512)
ASKED, ROUNDS = 1000, 15
_VALUE = struct.Struct("<IQ")


def make_keys(count: int) -> list[PackedKey]:
    """Return random keys of 53 bytes, as long as those over SHA-256."""
    data = np.random.default_rng(1).bytes(32 * count)
    head = bytes(21)
    return [PackedKey(head + data[32 * i : 32 * i + 32]) for i in range(count)]


class ChainIndex:
    """What the slab store does."""

    name = "chains"

    def __init__(self, path: Path, num_slots: int, *, create: bool) -> None:
        self._store = SlabStore(
            path=str(path),
            capacity_bytes=num_slots * 4096,
            block_bytes=4096,
            index_only=True,
        )
        self._slab = OpenedSlab(
            path,
            Geometry.fit(num_slots * 4096, 4096),
            Durability.PROCESS,
            index_only=True,
            open_timeout=10.0,
            lock_timeout=10.0,
        )
        self._slab.index.admit(np.arange(num_slots))  # without data

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed."""
        return self._store.match(keys)

    def replace(self, keys: Sequence[PackedKey], victims: Sequence[PackedKey]) -> None:
        """Reserve and publish; the index finds the victims itself."""
        index, owner = self._slab.index, self._slab.owner_id
        grant = index.reserve(index.batch(keys), 4096, owner)
        index.publish(grant, np.zeros(len(keys), dtype=np.uint64), owner)

    def fill(self, keys: Sequence[PackedKey]) -> None:
        """Store keys in an empty index."""
        for start in range(0, len(keys), 4096):
            self.replace(keys[start : start + 4096], ())

    def close(self) -> None:
        """Let go."""
        self._store.close()
        self._slab.close()


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
    """Return the seconds that each call took."""
    taken = []
    for call in calls:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
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
    keys = make_keys(num_keys + ROUNDS * sum(BATCHES))
    path = home / f"{name}-{num_keys}"
    index = INDEXES[name](path, num_keys, create=True)
    index.fill(keys[:num_keys])
    pick = np.random.default_rng(2)
    asked = [
        [keys[i] for i in pick.choice(num_keys, ASKED, replace=False)]
        for _ in range(ROUNDS)
    ]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        looked = pool.apply(look_up, (name, path, num_keys, asked))
    costs = {}
    first = 0
    for batch in BATCHES:
        steps = []
        for _ in range(ROUNDS):
            new, old = keys[num_keys + first :][:batch], keys[first:][:batch]
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
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as home:
        for num_keys in SIZES:
            for name in INDEXES:
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
