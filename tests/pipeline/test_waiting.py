# SPDX-License-Identifier: Apache-2.0
"""How the loop waits for a fence."""

import anyio
import pytest

from tests.pipeline.kit import HandFence
from ucm.devices.events import DoneFence
from ucm.pipeline.waiting import fence_passed

pytestmark = pytest.mark.asyncio


class TestFencePassed:
    async def test_passed_fence_costs_no_turn_of_the_loop(self, monkeypatch):
        """A fence that is done is not waited for."""
        pauses = []
        monkeypatch.setattr(anyio, "sleep", pauses.append)
        await fence_passed(DoneFence())
        assert [] == pauses

    async def test_pauses_grow_up_to_a_bound(self, monkeypatch):
        """A short wait is noticed soon, a long one costs few wake-ups (half a
        millisecond, doubling to five)."""
        fence, pauses = HandFence(), []
        fence.call_when_over = lambda _: False  # it has to be looked at

        async def turn(pause):
            pauses.append(pause)
            if len(pauses) == 6:
                fence.open()

        monkeypatch.setattr(anyio, "sleep", turn)
        await fence_passed(fence)
        assert [0.0005, 0.001, 0.002, 0.004, 0.005, 0.005] == pauses

    async def test_wait_ends_with_its_scope(self):
        """The caller's scope is the deadline of a fence that never passes."""
        with anyio.move_on_after(0.01) as scope:
            await fence_passed(HandFence())
        assert scope.cancelled_caught
