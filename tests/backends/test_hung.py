# SPDX-License-Identifier: Apache-2.0
"""A tier with a call that does not end, and a backlog that waits for it."""

from typing import Self

import anyio
import pytest

from ucm.backends.abc import Presence
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(2)


class Stuck(MemoryBackend):
    """A backend whose puts end when they may, whoever cancels them."""

    def __init__(self) -> None:
        super().__init__(Shelf(1 << 20))
        self.may_end = anyio.Event()

    async def put(self, blocks):
        """Hang, and put."""
        with anyio.CancelScope(shield=True):
            await self.may_end.wait()
        return await super().put(blocks)


class Hung:
    """A circuit over a backend in which a put hangs, until this is left."""

    def __init__(self) -> None:
        self.now, self.told, self._stuck = 100.0, [], Stuck()
        self.backend = BreakerBackend(
            self._stuck, clock=lambda: self.now, hung_s=4.0, tell=self.told.append
        )
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.backend.put, [seal(KEYS[0])])
        await anyio.wait_all_tasks_blocked()
        return self

    async def __aexit__(self, *what: object) -> None:
        self._stuck.may_end.set()
        await self._tasks.__aexit__(*what)


@pytest.mark.asyncio
async def test_nobody_asks_while_a_call_cannot_be_ended():
    """R-63, X-14: one that hangs past its deadline opens the circuit by itself, as of a
    drive that hangs in the kernel; behind its end one call tries."""
    async with Hung() as hung:
        for at in (3.9, 4.0, 4.9, 5.1, 7.2):
            hung.now = 100.0 + at
            await hung.backend.exists(KEYS)
    hung.now += 5.0
    assert [Presence.PRESENT] == await hung.backend.exists(KEYS[:1])
    assert [1.0, 2.0, 4.0, 0.0] == hung.told


@pytest.mark.asyncio
async def test_whoever_only_waits_has_a_hung_call_told():
    """R-63: a backlog waits for a tier that hangs, and nobody else need ask it."""
    async with Hung() as hung:
        waits = []
        for at in (3.9, 4.0, 4.5, 5.0):
            hung.now = 100.0 + at
            waits.append(hung.backend.wait_s)
    assert ([0.0, 1.0, 0.5, 2.0], [1.0, 2.0]) == (waits, hung.told)
