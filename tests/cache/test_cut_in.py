# SPDX-License-Identifier: Apache-2.0
"""R-42: who cancels at the worst moment, or by a signal, is heard all the same."""

from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.cache.kit import Host, both_loops, keys_of
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate

pytestmark = pytest.mark.anyio

KEYS = keys_of(6)


@both_loops
async def test_save_cancelled_as_the_loop_has_just_looked_is_cancelled() -> None:
    """Who asks and cancels between the loop's two looks is forgotten by neither."""
    host = Host()
    async with host.cache() as cache:
        core, saves = host.core, []
        take_in = core._take_in

        def take_in_and_be_overtaken(*most: float) -> None:
            take_in(*most)
            if not saves:
                saves.append(cache.save(KEYS, range(6)))
                saves[0].cancel()

        core._take_in = take_in_and_be_overtaken
        other = await cache.save(keys_of(2, 50), [6, 7]).committed
        assert other.is_whole
        end = await saves[0].committed
        assert (OutcomeKind.CANCELLED, Reason.WITHDRAWN) == (end.kind, end.reason)
    host.check_left()


@both_loops
async def test_load_that_is_interrupted_returns_once_nothing_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, which trio raises where its main task waits, and not as a cancellation."""
    gate = Gate()
    host = Host(FaultPlan(Fault("scatter", gate)))
    async with host.cache() as cache:
        await cache.save(KEYS, range(6)).committed
        wait = cache._host.wait

        async def interrupted(*args: Any) -> None:
            monkeypatch.setattr(cache._host, "wait", wait)
            await anyio.to_thread.run_sync(gate.wait_reached)
            gate.open()
            raise KeyboardInterrupt

        monkeypatch.setattr(cache._host, "wait", interrupted)
        try:
            await cache.load(KEYS, range(20, 26))
        except KeyboardInterrupt:
            left = len(host.core._users)
        assert 0 == left
    host.check_left()
