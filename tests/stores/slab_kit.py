# SPDX-License-Identifier: Apache-2.0
"""What the tests of the slab share: making one, and reaching under it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import numpy as np

from ucm.blocks import PackedKey
from ucm.config import Verify
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import IndexLayout, SlotState
from ucm.testing.store_blocks import BLOCK_BYTES

ROOT = Path(__file__).resolve().parents[2]
SLOT_BYTES = 4096


def open_slab(
    directory: Path,
    num_blocks: int = 8,
    *,
    index_only: bool = False,
    verify: Verify = Verify.ALWAYS,
    open_timeout: float = 60.0,
    lock_timeout: float = 60.0,
    tenant_share: float = 1.0,
    block_bytes: int = BLOCK_BYTES,
) -> SlabStore:
    """Open a slab of that many slots of a page."""
    return SlabStore(
        path=str(directory),
        capacity_bytes=num_blocks * SLOT_BYTES,
        block_bytes=block_bytes,
        index_only=index_only,
        verify=verify,
        open_timeout=open_timeout,
        lock_timeout=lock_timeout,
        tenant_share=tenant_share,
    )


def die(store: SlabStore) -> None:
    """Leave a store as its process does that is killed."""
    store._slab.abandon()


def index_path(directory: Path) -> Path:
    """Return the index of a slab that one class uses."""
    (path,) = directory.glob("index-*")
    return path


class RawSlab:
    """A slab's files, read with nothing but their documented layout."""

    def __init__(self, directory: Path, num_slots: int = 8) -> None:
        self._data = directory / "data"
        index = index_path(directory)
        place = IndexLayout(num_slots).place()
        offset, dtype, _ = place["records"]
        self.records = np.memmap(index, dtype, "r+", offset=offset, shape=(num_slots,))
        offset, dtype, _ = place["states"]
        self.states = np.memmap(index, dtype, "r+", offset=offset, shape=(num_slots,))
        offset, dtype, length = place["header"]
        self.header = np.memmap(index, dtype, "r+", offset=offset, shape=(length,))

    def slot_of(self, key: PackedKey) -> int | None:
        """Look through all records for a committed key."""
        for slot, record in enumerate(self.records):
            field = record["key"].tobytes()
            if self.states[slot] == SlotState.COMMITTED and key == field[: field[-1]]:
                return slot
        return None

    def get(self, key: PackedKey) -> bytes | None:
        """Read the data file."""
        slot = self.slot_of(key)
        if slot is None:
            return None
        with self._data.open("rb") as file:
            return os.pread(
                file.fileno(), int(self.records["nbytes"][slot]), slot * SLOT_BYTES
            )

    def put(self, key: PackedKey, data: bytes) -> None:
        """Write the data file."""
        slot = self.slot_of(key)
        assert slot is not None
        with self._data.open("r+b") as file:
            os.pwrite(file.fileno(), data, slot * SLOT_BYTES)


class Child:
    """Another process that uses the slab; see ``slab_child``."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.stores.slab_child",
                str(directory),
                *map(str, arguments),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self) -> str:
        """Return the child's next line; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill -9 and wait for the end."""
        self.process.kill()
        self.finish()

    def finish(self) -> int:
        """Wait for the end; return the exit status."""
        try:
            self.process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
