# SPDX-License-Identifier: Apache-2.0
"""Room on a shared mount, where more is put than it takes."""

import pytest

from tests.backends.test_files import BLOCK, collected, open_files, put
from ucm.backends.abc import Verdict
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(6)


@pytest.mark.asyncio
class TestRoom:
    async def test_room_is_made_behind_a_count_that_made_none(self, tmp_path):
        """A share that is counted as a block comes is not full for that: the oldest go."""
        most = 4 * (BLOCK + 128)
        backend = await open_files(tmp_path / "share", capacity=most)
        await collected(backend)
        assert [Verdict.DONE] * 4 == await put(backend, *KEYS[:4])
        backend._start_collection(0)  # as it is every ten minutes
        assert [Verdict.DONE] == await put(backend, KEYS[4])
        stats = await backend.stats()
        assert (3, 2) == (stats.blocks, stats.evicted_blocks_total)  # and a sixteenth
        await backend.aclose()
