# SPDX-License-Identifier: Apache-2.0
"""A tier with a call that does not end, and a backlog that waits for it."""

import anyio
import pytest

from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(2)


@pytest.mark.asyncio
async def test_whoever_only_waits_has_a_hung_call_told():
    """R-63: a backlog waits for a tier that hangs, and nobody else need ask it."""
    free, now, told = anyio.Event(), [100.0], []

    class Stuck(MemoryBackend):
        async def put(self, blocks):
            with anyio.CancelScope(shield=True):
                await free.wait()
            return await super().put(blocks)

    stuck, clock = Stuck(Shelf(1 << 20)), lambda: now[0]
    backend = BreakerBackend(stuck, clock=clock, hung_s=4.0, tell=told.append)
    async with anyio.create_task_group() as group:
        group.start_soon(backend.put, [seal(KEYS[0])])
        await anyio.wait_all_tasks_blocked()
        waits = []
        for at in (3.9, 4.0, 4.5, 5.0):
            now[0] = 100.0 + at
            waits.append(backend.wait_s)
        free.set()
    assert ([0.0, 1.0, 0.5, 2.0], [1.0, 2.0]) == (waits, told)
