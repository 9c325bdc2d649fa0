# SPDX-License-Identifier: Apache-2.0
"""
Kill -9 of a slab's users at every line, and at random while its files are damaged.

*Lines.* Each life (making a slab, joining, saving with eviction, a second size of slots,
another capacity, forgetting) is run in a process that is killed before its N-th line
within the slab's modules, for N spread over all of its lines. *Damages.* Processes save,
load and forget; meanwhile the directory is removed, moved, replaced or one of its files
shortened, and they are killed at random.

After each kill those who live and whoever comes next read every block that is found, as a
pipeline does, and compare every byte; what was committed and had not to go is there,
nothing stays reserved, no two sizes of slots use one extent.

Run ``python -m benchmarks.slab_crash --kills 1000``; exits with 1 if anything was wrong.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np

from ucm.blocks import PackedKey
from ucm.errors import ConfigError, StoreError
from ucm.stores import slab as slab_package
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import SlotState
from ucm.stores.slab._opened import OpenedSlab
from ucm.testing.store_blocks import load, make_keys, payload, save

__all__ = ["LARGE", "SMALL", "audit", "find_wrong", "open_slab"]

SMALL, LARGE = 4096, 16_384
CAPACITY = 16 * 49_152
_SLAB = str(Path(slab_package.__file__).parent)
_ONLY_LOOK = {
    *("_check", "_check_owner", "_find_loss", "check", "check_index", "fit"),
    *(
        "is_in_memory",
        "mount_of",
        "require_memory",
        "open",
        "_cgroups",
        "memory_rooms",
        "_number_of",
    ),
}
KEYS = make_keys(400)
KEPT = KEYS[:24]
"""Saved first by whoever is not killed, in extents that no life has to take."""
_WRONG, _REFUSED = 3, 4


def open_slab(
    path: Path, slot_bytes: int = SMALL, capacity: int = CAPACITY
) -> SlabStore:
    """Open a slab for blocks of that size."""
    return SlabStore(path=str(path), capacity_bytes=capacity, block_bytes=slot_bytes)


def find_wrong(store: SlabStore, keys: Sequence[PackedKey]) -> int:
    """Read what is found of *keys*; return how many have a byte that is wrong."""
    there = store.contains(keys)
    found = [key for key, is_there in zip(keys, there, strict=True) if is_there]
    wrong = 0
    for key in found:
        with contextlib.suppress(StoreError):  # evicted meanwhile, or lost
            wrong += load(store, [key]) != [payload(key)]
    return wrong


def inside(store: SlabStore) -> OpenedSlab:
    """Return what a store has opened."""
    return store._slab  # noqa: SLF001 - a store shows no files


def audit(store: SlabStore) -> list[str]:
    """Return what is not in order, but for the bytes."""
    problems = store.audit()
    geometry, index = inside(store).geometry, inside(store).index
    there = np.flatnonzero(index.state != SlotState.ABSENT) // geometry.slots_per_extent
    if set(inside(store).arena.owners[there].tolist()) - {geometry.slot_bytes}:
        problems.append("an extent of another class is used")
    return problems


# -- lives -----------------------------------------------------------------------


def prepare(path: Path) -> None:
    """Make a slab that is full, with blocks of both sizes."""
    with open_slab(path) as one, open_slab(path, LARGE) as two:
        save(two, KEYS[200:218])
        save(one, KEYS[24:120])
        save(one, KEPT)


def make(path: Path) -> None:
    """Make a slab and use it."""
    with open_slab(path) as store:
        save(store, KEYS[300:304])


def evict(path: Path) -> None:
    """Save what needs room, give a reservation back, forget."""
    with open_slab(path) as store:
        store.reserve(KEYS[320:322], 96).discard()
        save(store, KEYS[300:316])
        store.forget(KEYS[300:303])
        store.clear(b"\1")


def take(path: Path) -> None:
    """Save blocks of the other size, which takes extents from those that are there."""
    with open_slab(path, LARGE) as store:
        save(store, KEYS[330:340])


def shrink(path: Path) -> None:
    """Make it smaller."""
    open_slab(path, SMALL, CAPACITY // 2).close()


def grow(path: Path) -> None:
    """Make it larger, and use what came."""
    with open_slab(path, LARGE, 2 * CAPACITY) as store:
        save(store, KEYS[340:350])


LIVES: dict[str, tuple[Callable[[Path], None], bool, bool]] = {
    "make a slab": (make, False, False),
    "save and evict, alone": (evict, True, False),
    "save and evict, beside others": (evict, True, True),
    "take from another size, alone": (take, True, False),
    "take from another size, beside it": (take, True, True),
    "make it smaller": (shrink, True, False),
    "make it larger": (grow, True, False),
}
"""What is run, whether a slab is there before, and whether somebody lives beside it."""


def run_until(line: int, life: Callable[[Path], None], path: Path) -> int:
    """Fork and kill the child before a line of the slab's; return how many it had run."""
    reader, writer = os.pipe()
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal executed
        code = frame.f_code
        if not code.co_filename.startswith(_SLAB) or code.co_name in _ONLY_LOOK:
            return None
        if event == "line":
            executed += 1
            if executed == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    if not (child := os.fork()):
        try:
            sys.settrace(trace)
            life(path)
            sys.settrace(None)
            os.write(writer, str(executed).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as told:
        return int(told.read() or line)


def kill_at_lines(home: Path, kills: int) -> Iterator[dict[str, object]]:
    """Kill each life at lines spread over all of it; yield a row of the table each."""
    for name, (life, is_there, beside) in LIVES.items():
        outcomes: Counter[str] = Counter()
        path = home / "slab"
        who = {"is_there": is_there, "beside": beside}
        total = _one_life(path, sys.maxsize, life, Counter(), **who)
        step = max(1, total * len(LIVES) // kills)
        for line in range(1, total + 1, step):
            _one_life(path, line, life, outcomes, **who)
        yield {"case": f"line: {name}", "lines": total, **outcomes}


def _one_life(
    path: Path,
    line: int,
    life: Callable[[Path], None],
    outcomes: Counter[str],
    *,
    is_there: bool,
    beside: bool,
) -> int:
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        if is_there:
            prepare(path)
        witnesses = [stack.enter_context(open_slab(path))] if beside else []
        executed = run_until(line, life, path)
        outcomes["kills"] += 1
        for number, store in enumerate([*witnesses, None, None]):
            if store is None:
                size = SMALL if number == len(witnesses) else LARGE
                capacity = {shrink: CAPACITY // 2, grow: 2 * CAPACITY}.get(
                    life, CAPACITY
                )
                store = stack.enter_context(open_slab(path, size, capacity))
            outcomes["wrong bytes"] += find_wrong(store, KEYS)
            outcomes["out of order"] += len(audit(store))
            if inside(store).geometry.slot_bytes == SMALL:
                if is_there:
                    lost = store.contains(KEPT).count(False)
                    outcomes["lost"] += lost if life is not take else 0
                outcomes["left behind"] += store.stats().reserved_blocks * (not beside)
            with contextlib.suppress(StoreError):
                outcomes["cannot save"] += save(store, KEYS[390:391]) not in (0, 1)
    return executed


# -- damages ---------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "removed": lambda path: shutil.rmtree(path, ignore_errors=True),
    "moved": lambda path: path.rename(path.with_name("moved")),
    "replaced": lambda path: (
        path.rename(path.with_name("moved")),
        open_slab(path).close(),
    ),
    "data shortened": lambda path: os.truncate(path / "data", 49_152),
    "index shortened": lambda path: os.truncate(next(path.glob("index-4096*")), 8192),
    "arena shortened": lambda path: os.truncate(path / "arena", 0),
}


def churn(path: Path, seed: int) -> int:
    """Save, load and forget until killed, or until the slab is lost."""
    chance = random.Random(seed)
    try:
        with open_slab(path, chance.choice((SMALL, SMALL, LARGE))) as store:
            while True:
                first = chance.randrange(380)
                keys = KEYS[first : first + chance.randint(1, 20)]
                with contextlib.suppress(StoreError):
                    save(store, keys)
                if find_wrong(store, keys):
                    return _WRONG
                inside(store).check()
                if chance.random() < 0.1:
                    store.forget(keys)
    except (StoreError, ConfigError):
        return _REFUSED


def kill_at_random(home: Path, kills: int) -> Iterator[dict[str, object]]:
    """Kill users at random while a slab is damaged; yield a row of the table each."""
    chance = random.Random(1)
    for name, damage in DAMAGES.items():
        outcomes: Counter[str] = Counter()
        while outcomes["kills"] < kills // len(DAMAGES):
            path = home / "slab"
            prepare(path)
            users = [_fork(partial(churn, path, seed)) for seed in range(4)]
            time.sleep(chance.uniform(0.0, 0.05))
            damage(path)
            late = _fork(partial(churn, path, 9))
            for user in (*users, late):
                time.sleep(chance.uniform(0.0, 0.03))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(user, signal.SIGKILL)
                _note(os.waitpid(user, 0)[1], outcomes)
            try:
                with open_slab(path) as store, open_slab(path, LARGE) as large:
                    for each in (store, large):
                        outcomes["wrong bytes"] += find_wrong(each, KEYS)
                        outcomes["out of order"] += len(audit(each))
                        outcomes["left behind"] += each.stats().reserved_blocks
            except ConfigError:
                outcomes["refused"] += 1
            for each in home.iterdir():
                shutil.rmtree(each)
        yield {"case": f"random: {name}", **outcomes}


def _fork(act: Callable[[], int]) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        status = act()
    except Exception:  # noqa: BLE001 - told, and counted by the status
        traceback.print_exc()
    finally:
        os._exit(status)


def _note(status: int, outcomes: Counter[str]) -> None:
    if os.WIFSIGNALED(status):
        bus = os.WTERMSIG(status) == signal.SIGBUS
        outcomes["bus errors" if bus else "kills"] += 1
    elif os.WEXITSTATUS(status) == _WRONG:
        outcomes["wrong bytes"] += 1
    elif os.WEXITSTATUS(status) == _REFUSED:
        outcomes["kills"] += 1  # had left before: the slab was lost
    else:
        outcomes["failed"] += 1


_BAD = ("wrong bytes", "lost", "out of order", "left behind", "cannot save", "failed")


def main() -> int:
    """Print a table; return whether anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slab_crash")
    parser.add_argument("--kills", type=int, default=1000, help="of each kind, about")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--directory", default="/dev/shm", help="where slabs lie")
    given = parser.parse_args()
    rows = []
    columns = ("kills", *_BAD, "refused", "bus errors")
    print(f"{'case':42}" + "".join(f"{name:>13}" for name in columns))
    with tempfile.TemporaryDirectory(prefix="ucm-crash-", dir=given.directory) as home:
        for kind in (kill_at_lines, kill_at_random):
            for row in kind(Path(home), given.kills):
                rows.append(row)
                told = "".join(f"{row.get(name, 0):>13}" for name in columns)
                print(f"{row['case']:42}{told}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row.get(name) for row in rows for name in _BAD))


if __name__ == "__main__":
    sys.exit(main())
