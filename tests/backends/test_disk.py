# SPDX-License-Identifier: Apache-2.0
"""Blocks on drives: the contract, and what is on the drive."""

import pytest

from tests.backends.disk_kit import STAMP_BYTES, find, open_disk, write
from ucm.backends.disk._drive import BLOCKS
from ucm.testing import backend_contract
from ucm.testing.backend_contract import BackendContract


class TestDiskBackend(BackendContract):
    """One drive, in a directory below the place."""

    async def open(self, place):
        """Open a drive for a few megabytes."""
        return await open_disk(place / "disk")

    async def open_small(self, place):
        """Open a drive of sixteen extents with one slot each."""
        return await open_disk(place / "disk", capacity=16 * 3 * 4096)

    def get_raw(self, place, key):
        """Look for the stamp that names the key."""
        at = find(place / "disk", key)
        if at is None:
            return None
        start, stop, stamp = at
        data = (place / "disk" / BLOCKS).read_bytes()
        return data[start:stop] + data[stamp : stamp + STAMP_BYTES]

    def put_raw(self, place, key, raw):
        """Write over block and stamp; what is missing is zeros."""
        start, stop, stamp = find(place / "disk", key)
        nbytes = stop - start
        write(place / "disk", start, raw[:nbytes].ljust(nbytes, b"\0"))
        write(place / "disk", stamp, raw[nbytes:].ljust(STAMP_BYTES, b"\0"))

    @pytest.mark.parametrize(
        "how", sorted(backend_contract.DAMAGES.keys() - {"longer"})
    )
    async def test_damage_is_noticed(self, tmp_path, how):
        """A slot is no longer than it is."""
        await super().test_damage_is_noticed(tmp_path, how)
