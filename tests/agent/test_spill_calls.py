# SPDX-License-Identifier: Apache-2.0
"""What a tier does while blocks of another call are looked at."""

from functools import partial

import anyio
import pytest

from tests.agent.unruly import Unruly, guarded, run_virtual
from tests.stores.slab_kit import open_slab
from ucm.agent.spill import Spiller
from ucm.stores.abc import Change
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save

KEYS = make_keys(8)


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 16 blocks."""
    with open_slab(tmp_path / "slab", 16) as store:
        yield store


class TestCalls:
    def test_one_call_is_looked_at_while_the_one_before_is_put(self, slab) -> None:
        """R-55: all cores compute the checksums of one. Of two that were looked at together a tier would
        have none until both were."""
        backend, told = Unruly(), list[str]()
        save(slab, KEYS)

        async def call(function):
            is_read = isinstance(function, partial)
            if is_read:
                told.append("looked at")
            await anyio.sleep(1.0)
            if is_read:
                told.append(f"after {backend.asked.count('put')} puts")
            return function()

        async def spill():
            spiller = Spiller(slab, guarded(backend), call, 30)
            spiller.offer([Change(key, BLOCK_BYTES) for key in KEYS])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(spiller.run)
                await spiller.drained()
                tasks.cancel_scope.cancel()
            return spiller.counts.spilled

        assert 8 == run_virtual(spill)
        assert ["looked at", "after 0 puts", "looked at", "after 1 puts"] == told
