# SPDX-License-Identifier: Apache-2.0
"""
Many processes on one slab for minutes, with eviction all the time.

Writers save more than the slab holds, in two sizes of slots; one is killed every second
and another one starts. Readers look up, load as a pipeline does, and compare every byte.
Prints what was done; exits with 1 if a byte was wrong or the slab is not in order in the
end.

Run ``python -m benchmarks.slab_soak --seconds 300``.
"""

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.slab_crash import LARGE, SMALL, audit, find_wrong, open_slab
from ucm.errors import BlockCorruptError, BlockNotFoundError, StoreError
from ucm.stores.slab import SlabStore
from ucm.testing.store_blocks import make_keys, payload, save

CAPACITY = 64 << 20
KEYS = make_keys(40_000)
SPAN = 32
_TELL_S = 0.5


def write(store: SlabStore, chance: random.Random, counts: Counter[str]) -> None:
    """Save a span at random; some are given up."""
    first = chance.randrange(len(KEYS) - SPAN)
    keys = KEYS[first : first + chance.randint(1, SPAN)]
    if chance.random() < 0.05:
        store.reserve(keys, 96).discard()
    else:
        counts["saved"] += save(store, keys, 96)


def read(store: SlabStore, chance: random.Random, counts: Counter[str]) -> None:
    """Load what is found of a span, and compare it."""
    first = chance.randrange(len(KEYS) - SPAN)
    keys = KEYS[first : first + SPAN]
    there = store.contains(keys)
    found = [key for key, is_there in zip(keys, there, strict=True) if is_there]
    store.touch(found)
    try:
        with store.read(found) as lease:
            try:
                lease.verify(0, len(found))
            except BlockCorruptError:
                lease.recheck()  # bytes of a slot that was recycled are not corrupt
                raise
            copies = [lease.slots.block(at).tobytes() for at in range(len(found))]
            lease.recheck()
    except BlockNotFoundError:
        counts["evicted while read"] += 1
    except BlockCorruptError:
        counts["corrupt"] += 1
    else:
        wrong = (one != payload(key) for one, key in zip(copies, found, strict=True))
        counts["wrong"] += sum(wrong)
        counts["loaded"] += len(found)


Act = Callable[[SlabStore, random.Random, Counter[str]], None]


def work(path: Path, slot_bytes: int, act: Act, seed: int, end: float, to: int) -> None:
    """Be one process: act until the end, and tell what was done now and then."""
    chance, counts = random.Random(seed), Counter[str]()
    tell_at = time.monotonic()
    with open_slab(path, slot_bytes, CAPACITY) as store:
        while (now := time.monotonic()) < end:
            try:
                act(store, chance, counts)
            except StoreError as exc:
                counts[type(exc).__name__] += 1
            if now >= tell_at:
                tell_at = now + _TELL_S
                _tell(to, counts)
    _tell(to, counts)


def _tell(to: int, counts: Counter[str]) -> None:
    os.write(to, (json.dumps(counts) + "\n").encode())  # whole: it is a short line
    counts.clear()


def start(act: Callable[[int], None], to: int) -> int:
    """Run something in a process of its own; return its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        act(to)
        status = 0
    finally:
        os._exit(status)


def soak(path: Path, seconds: float, writers: int, readers: int) -> Counter[str]:
    """Run all processes; return what they did."""
    chance, total = random.Random(2), Counter[str]()
    reader, writer = os.pipe()
    began = time.monotonic()
    end = began + seconds

    def begin(number: int, act: Act) -> int:
        size = LARGE if number % 2 else SMALL
        seed = chance.randrange(1 << 30)
        run = partial(work, path, size, act, seed, end)
        return start(run, writer)

    at_work = [begin(number, write) for number in range(writers)]
    looking = [begin(number, read) for number in range(readers)]
    kill_at = began + 1.0
    while (now := time.monotonic()) < end + 10.0:
        if select.select([reader], [], [], 0.1)[0]:
            for line in os.read(reader, 1 << 20).splitlines():
                total.update(json.loads(line))
        elif now > end + 2.0:
            break
        if kill_at <= now < end:
            kill_at = now + 1.0
            number = chance.randrange(writers)
            os.kill(at_work[number], signal.SIGKILL)
            os.waitpid(at_work[number], 0)
            at_work[number] = begin(number, write)
            total["killed"] += 1
    for child in (*at_work, *looking):
        total["failed"] += os.waitpid(child, 0)[1] != 0
    os.close(reader)
    os.close(writer)
    return total


def main() -> int:
    """Print what was done; return whether anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slab_soak")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file for the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ucm-soak-", dir="/dev/shm") as home:
        path = Path(home) / "slab"
        with open_slab(path, SMALL, CAPACITY) as first:
            total = soak(path, given.seconds, given.writers, given.readers)
            total["evicted"] = first.stats().evicted_blocks_total
        for size in (SMALL, LARGE):
            with open_slab(path, size, CAPACITY) as store:
                total["out of order"] += len(audit(store))
                total["left behind"] += store.stats().reserved_blocks
                total["wrong"] += find_wrong(store, KEYS)
    for name, count in sorted(total.items()):
        print(f"{name:24} {count:>12}")
    if given.json:
        asked = {
            name: getattr(given, name) for name in ("seconds", "writers", "readers")
        }
        given.json.write_text(json.dumps({**asked, **total}, indent=1) + "\n")
    bad = ("wrong", "corrupt", "failed", "out of order", "left behind")
    return int(any(total[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
