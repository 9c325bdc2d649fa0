# SPDX-License-Identifier: Apache-2.0
"""A drive that an older release has written, with its index."""

import shutil
import struct
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from tests.backends.test_disk_index import ALL, KEYS, LOOKED, Reads, opened
from ucm.backends.disk._index import _HEAD, INDEX
from ucm.testing.backend_contract import fetch_sound

GOLDEN = Path(__file__).parents[1] / "golden/disk_drive_1.zip"
"""A drive with two blocks, as it was written before the index's second version."""


def believe(path: Path) -> None:
    """Have an index be true by its own word, as on the drive where it was written."""
    blocks = (path / "blocks").stat()
    with (path / INDEX).open("r+b") as file:
        head = bytearray(file.read(_HEAD.size))
        struct.pack_into(">QQ", head, 24, blocks.st_ino, blocks.st_mtime_ns)
        file.seek(0)
        file.write(head + struct.pack(">Q", xxh3_64_intdigest(bytes(head))))


@pytest.mark.asyncio
async def test_drive_of_an_older_release_is_served(tmp_path, monkeypatch):
    """R-52: what the first release with an index has written is read, and looked through
    once: of its index not all was true."""
    shutil.unpack_archive(GOLDEN, tmp_path)
    believe(tmp_path)
    for expected in (ALL + LOOKED, ALL):
        reads = Reads(monkeypatch)
        backend = await opened(tmp_path)
        assert expected == reads.taken()
        assert [True] * 2 == await fetch_sound(backend, KEYS[:2])
        await backend.aclose()
