# SPDX-License-Identifier: Apache-2.0
"""Fetch: who looks for the blocks of a long prompt shares the agent's loop with all others."""

import asyncio

import anyio
import pytest

from tests.agent.unruly import Unruly
from tests.clocks import LeapingLoop
from ucm.agent import calls
from ucm.agent import hits as hits_module
from ucm.agent.hits import Hits
from ucm.agent.locating import Looks
from ucm.backends.abc import Presence
from ucm.testing.store_blocks import make_keys


class Counted(bytes):
    """A key that counts how often any is looked up in one turn of the loop."""

    num = most = 0

    def __hash__(self) -> int:
        Counted.num += 1
        return super().__hash__()


class Watched(LeapingLoop):
    """A loop that takes note, with each turn, of how often keys were looked up in it."""

    def __init__(self) -> None:
        super().__init__()
        select = self._leap.select
        Counted.num = Counted.most = 0

        def note(timeout=None):
            Counted.most = max(Counted.most, Counted.num)
            Counted.num = 0
            return select(timeout)

        self._leap.select = note


class Constant(Unruly):
    """A tier that says the same of each block, some time after it is asked, and looks nothing up."""

    def __init__(self, presence: Presence, look_s: float, **can: object) -> None:
        super().__init__(**can)
        self._presence, self._look_s = presence, look_s

    async def exists(self, keys):
        """Wait, if at all, then say it."""
        await anyio.sleep(self._look_s)
        return [self._presence] * len(keys)


@pytest.mark.parametrize("of_windows", [Presence.ABSENT, Presence.PRESENT])
@pytest.mark.parametrize(("in_turn", "most_asked"), [(8, 512), (32, 16)])
@pytest.mark.parametrize("shared", [False, True])
def test_search_among_many_blocks_shares_the_loop(
    monkeypatch, of_windows: Presence, in_turn: int, most_asked: int, shared: bool
) -> None:
    """R-53, R-63: between two turns of others it looks up so many blocks only, however many there are, also
    where all is told already; of sixty thousand nobody else was served for 170 ms with each answer."""
    monkeypatch.setattr(calls, "_IN_TURN", in_turn)
    monkeypatch.setattr(hits_module, "_MOST", most_asked)
    spans = [span for hit in range(1, 401) for span in ((hit, 0), (hit, hit))]
    hits = Hits(*zip(*spans, strict=True), len(spans))
    keys = [Counted(key) for key in make_keys(len(spans))]
    late = Constant(of_windows, 60.0, shared=shared)

    async def run():
        async with anyio.create_task_group() as tasks:
            looks = Looks([Constant(Presence.ABSENT, 0.0), late], [0, 1], 100.0, tasks)
            there = [not longest for _, longest in spans]
            for _ in range(2):  # by the second all is told
                found, _ = await looks.choose(
                    lambda: hits.choose(there, len(spans)), keys
                )
            places = await looks.find(keys, is_whole=False)
            most = Counted.most
            tasks.cancel_scope.cancel()
            return found, len(places), most

    with asyncio.Runner(loop_factory=Watched) as runner:
        found, num_places, most = runner.run(run())
    is_there = of_windows is Presence.PRESENT
    assert (400 * is_there, len(keys) * is_there) == (found, num_places)
    assert 0 < most <= 8 * in_turn
