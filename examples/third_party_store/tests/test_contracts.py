# SPDX-License-Identifier: Apache-2.0
"""What ucm asks of a store, a backend and a device."""

import sqlite3
from pathlib import Path

import numpy as np
import torch
from ucm_example.journal import JournalStore
from ucm_example.metered import MeteredDevice
from ucm_example.sqlite import SqliteBackend

from ucm.backends.abc import Backend
from ucm.blocks import PackedKey
from ucm.devices.abc import Device
from ucm.stores.abc import Store
from ucm.testing.backend_contract import BLOCK, BackendContract
from ucm.testing.device_contract import DeviceContract
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, save
from ucm.testing.store_contract import StoreContract


class TestJournalStore(StoreContract):
    """The store, looked into through the memory that it offers to devices."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a new one."""
        return JournalStore(directory, num_blocks, BLOCK_BYTES)

    def reopen(self, directory: Path, num_blocks: int) -> Store:
        """Return it as the next process finds it."""
        return JournalStore(directory, num_blocks, BLOCK_BYTES)

    def get_raw(self, store: Store, key: PackedKey) -> bytes | None:
        """Read the slot."""
        if not all(store.contains([key])):
            return None
        with store.read([key]) as lease:
            (row,) = lease.slots.slots.tolist()
            return store.buffers[0][row, : lease.slots.block_bytes].tobytes()

    def put_raw(self, store: Store, key: PackedKey, data: bytes) -> None:
        """Write to the slot."""
        with store.read([key]) as lease:
            (row,) = lease.slots.slots.tolist()
        store.buffers[0][row, : len(data)] = np.frombuffer(data, np.uint8)

    def test_death_amid_a_write_costs_the_last_record(self, tmp_path: Path) -> None:
        """Whatever of a journal was written: what comes back is what was saved."""
        keys = make_keys(3)
        with self.make_store(tmp_path / "a", 8) as store:
            save(store, keys)
        whole = (tmp_path / "a" / "journal").read_bytes()
        for cut in range(0, len(whole), 13):
            (tmp_path / "a" / "journal").write_bytes(whole[:cut])
            with self.reopen(tmp_path / "a", 8) as store:
                found = store.match(keys)
                load(store, keys[:found])
                assert found == store.stats().committed_blocks == cut * 3 // len(whole)


class TestSqliteBackend(BackendContract):
    """The backend, looked into by a connection of the test's own."""

    async def open(self, place: Path) -> Backend:
        """Return one with room for all."""
        return SqliteBackend(place / "blocks.db", 1 << 20)

    async def open_small(self, place: Path) -> Backend:
        """Return one with room for nine blocks."""
        return SqliteBackend(place / "blocks.db", 10 * BLOCK)

    def get_raw(self, place: Path, key: PackedKey) -> bytes | None:
        """Read the row."""
        with sqlite3.connect(place / "blocks.db") as file:
            asked = "SELECT value FROM blocks WHERE key = ?"
            row = file.execute(asked, (key,)).fetchone()
        file.close()
        return row and row[0]

    def put_raw(self, place: Path, key: PackedKey, raw: bytes) -> None:
        """Change the row."""
        with sqlite3.connect(place / "blocks.db") as file:
            file.execute("UPDATE blocks SET value = ? WHERE key = ?", (raw, key))
        file.close()


class TestMeteredDevice(DeviceContract):
    """The device, over tensors in host memory."""

    def make_device(self, num_blocks: int) -> Device:
        """Return a new one."""
        return MeteredDevice(num_blocks)

    def make_memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)
