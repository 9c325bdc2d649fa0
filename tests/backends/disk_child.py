# SPDX-License-Identifier: Apache-2.0
"""
Kills a process that uses a drive, again and again, and looks at what it has left.

``python -m tests.backends.disk_child DIRECTORY ROUNDS SEED [CAPACITY]`` does so and tells.
"""

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.backends.disk_kit import open_disk
from ucm.backends.abc import Presence, Verdict
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

__all__ = ["AMPLE", "TIGHT", "Killed"]

ROOT = Path(__file__).resolve().parents[2]
KEYS = make_keys(60)
SIZES = (4096, 20480)
TIGHT, AMPLE = 16 * 12 * 4096, 16 * 64 * 4096
"""A quarter of what all blocks need, and more than that."""


def say(*words: object) -> None:
    """Write a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def work(path: str, seed: int, capacity: int) -> None:
    """Put and delete for ever; tell what is begun and what is done."""
    dice = random.Random(seed)
    backend = await open_disk(path, capacity=capacity)

    async def put() -> None:
        some = dice.sample(range(len(KEYS)), 4)
        for at in some:
            say("begin", at)
        verdicts = await backend.put([seal(KEYS[at], SIZES[at % 2]) for at in some])
        for at, verdict in zip(some, verdicts, strict=True):
            if verdict in (Verdict.DONE, Verdict.PRESENT):
                say("put", at)

    while True:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(put())
        (gone,) = dice.sample(range(len(KEYS)), 1)
        say("deleting", gone)
        await backend.delete([KEYS[gone]])
        say("deleted", gone)


class Killed:
    """
    A drive and what its killed users have told of it.

    Args:
        path: Its directory.
        capacity: Of it; with ``AMPLE`` nothing is evicted.
        seed: Of when who is killed.
    """

    def __init__(self, path: Path, capacity: int, seed: int) -> None:
        self.path = path
        self.capacity = capacity
        self.put: set[int] = set()
        self.deleted: set[int] = set()
        self._dice = random.Random(seed)

    def round(self) -> None:
        """Let a process work, kill it, and take note of what it has told."""
        seed, lines = self._dice.randrange(1 << 30), self._dice.randrange(1, 150)
        args = [str(self.path), str(self.capacity), str(seed)]
        with subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "work", *args],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        ) as child:
            for _ in range(lines):
                self._note(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                self._note(line)

    def _note(self, line: str) -> None:
        word, _, number = line.strip().partition(" ")
        at = int(number)
        self.deleted.discard(at)
        if word == "put":
            self.put.add(at)
        elif word == "deleting":
            self.put.discard(at)
        elif word == "deleted":
            self.deleted.add(at)

    async def check(self) -> list[bool]:
        """Return for each key whether its block is there; each one that is must be whole."""
        backend = await open_disk(self.path, capacity=self.capacity)
        there = [one is Presence.PRESENT for one in await backend.exists(KEYS)]
        sound = [
            (await fetch_sound(backend, [key], SIZES[at % 2]))[0]
            for at, key in enumerate(KEYS)
        ]
        await backend.aclose()
        assert there == sound
        found = {at for at, is_there in enumerate(there) if is_there}
        assert set() == found & self.deleted
        if self.capacity == AMPLE:
            assert set() == self.put - found
        self.put &= found
        return there


if __name__ == "__main__":
    if sys.argv[1] == "work":
        asyncio.run(work(sys.argv[2], int(sys.argv[4]), int(sys.argv[3])))
    killed = Killed(
        Path(sys.argv[1]), int((sys.argv[4:] or [AMPLE])[0]), int(sys.argv[3])
    )
    for number in range(int(sys.argv[2])):
        killed.round()
        say(number, sum(asyncio.run(killed.check())), "blocks, all whole")
