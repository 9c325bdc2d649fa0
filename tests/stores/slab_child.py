# SPDX-License-Identifier: Apache-2.0
"""
A process that uses a slab, for tests that need a real one.

Run as ``python -m tests.stores.slab_child DIRECTORY ACTION ...``; speaks in lines.
"""

import contextlib
import os
import random
import signal
import sys
from pathlib import Path

from tests.stores.slab_kit import open_slab
from ucm.errors import StoreFullError, StoreUnavailableError
from ucm.testing.store_blocks import BLOCK_BYTES, fill, load, make_keys, payload, save


def say(line: object) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def race(directory: Path, num_blocks: int) -> None:
    """Open when told to and save a block of our own."""
    say("ready")
    number = int(sys.stdin.readline())
    with open_slab(directory, num_blocks) as store:
        say(save(store, make_keys(1, first=number)))


def save_some(directory: Path, num_blocks: int) -> None:
    """Save three blocks, leave the slab open until told."""
    with open_slab(directory, num_blocks) as store:
        say(save(store, make_keys(3)))
        sys.stdin.readline()


def reserve(directory: Path, num_blocks: int) -> None:
    """Hold sealed slots for ever; a child of ours inherits the files."""
    store = open_slab(directory, num_blocks)
    lease = store.reserve(make_keys(3), BLOCK_BYTES)
    fill(lease)
    if os.fork() == 0:
        try:
            store.match(make_keys(1))
        except StoreUnavailableError as exc:
            say(f"child: {exc}")
        lease.discard()  # not ours to give back: must leave the parent's slots alone
        store.close()
        say(f"grandchild {os.getpid()}")
    sys.stdin.readline()


def late(directory: Path, num_blocks: int) -> None:
    """Hold a slot; write it when told, whatever has become of the slab by then."""
    store = open_slab(directory, num_blocks)
    lease = store.reserve(make_keys(1), BLOCK_BYTES)
    say("reserved")
    for _ in sys.stdin:
        lease.slots.block(0)[:] = 7
        say("written")


def stand_still(directory: Path, num_blocks: int) -> None:
    """Stop within a change; who waits for us sees it."""
    with open_slab(directory, num_blocks) as store, store._slab.index.locked():
        os.kill(os.getpid(), signal.SIGSTOP)


def churn(directory: Path, num_blocks: int, seed: int) -> None:
    """Save, read, forget and discard at random; report each round."""
    chance = random.Random(seed)
    with open_slab(directory, num_blocks) as store:
        while True:
            keys = make_keys(chance.randint(1, 6), first=chance.randint(0, 40))
            # All slots may hold what others write, or what is among these keys.
            with (
                contextlib.suppress(StoreFullError),
                store.reserve(keys, BLOCK_BYTES) as lease,
            ):
                fill(lease)
                if chance.random() < 0.9:
                    lease.commit()
            known = [
                key
                for key, there in zip(keys, store.contains(keys), strict=True)
                if there
            ]
            store.touch(known)
            if chance.random() < 0.2:
                store.forget(known)
            say("round")


def read_back(directory: Path, num_blocks: int) -> None:
    """Read three blocks that another process saved."""
    keys = make_keys(3)
    with open_slab(directory, num_blocks) as store:
        say([payload(key) for key in keys] == load(store, keys))


ACTIONS = {
    "race": race,
    "save": save_some,
    "reserve": reserve,
    "late": late,
    "stand still": stand_still,
    "churn": churn,
    "read": read_back,
}

if __name__ == "__main__":
    ACTIONS[sys.argv[2]](Path(sys.argv[1]), *map(int, sys.argv[3:]))
