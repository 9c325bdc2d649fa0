# SPDX-License-Identifier: Apache-2.0
"""The agent in the simulated world: a few seeds, and that they meet what can happen."""

import threading
import time
from collections import Counter

import pytest

from tests.simulation.tiers_world import TiersWorld

_MET = (
    *("answer all", "answer absent", "answer unavailable", "answer deadline"),
    *("answer corrupt", "answer withdrawn", "answer admission"),
    *("spilled", "skipped", "dropped admission", "dropped evicted"),
    *("dropped queue_bytes", "dropped unavailable", "dropped shutdown"),
    *("fetched", "joined", "failed corrupt", "failed deadline", "failed slower"),
    *("fails", "hangs", "sticks", "lies", "spoils", "loses", "rots"),
    *("hang_up", "restart", "forget", "settled"),
)


class Clock:
    """A machine's clock that goes on by as much each time this thread looks at it."""

    def __init__(self) -> None:
        self._now = 10**15
        self._thread = threading.get_ident()

    def now_ns(self) -> int:
        """Return nanoseconds."""
        self._now += 20_000 * (threading.get_ident() == self._thread)
        return self._now

    def now(self) -> float:
        """Return seconds."""
        return self.now_ns() / 1e9


class TestTiersWorld:
    @pytest.mark.slow
    def test_nothing_that_must_hold_is_broken_whatever_tiers_do(self) -> None:
        """R-53, R-54, R-55, R-58, R-59, X-05: whatever fails, hangs, comes out of order, lies
        or rots, and whoever goes in the middle, no byte is wrong, no answer is late, and each
        block and slot is accounted for; and the seeds meet all of that."""
        seen: Counter[str] = Counter()
        for seed in range(24):
            world = TiersWorld(seed, 400)
            world.run()
            seen.update(world.seen)
        assert [] == [what for what in _MET if not seen[what]]

    @pytest.mark.parametrize(("seed", "steps"), [(7, 60), (9, 150), (11, 150)])
    def test_seed_repeats_a_run(
        self, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A number is enough to see a run again, to the last act, wherever its objects lie, and
        however busy the machine is by whose clock the slab goes."""
        runs = [TiersWorld(seed, steps) for _ in range(2)]
        for run in runs:
            clock = Clock()
            monkeypatch.setattr(time, "monotonic_ns", clock.now_ns)
            monkeypatch.setattr(time, "monotonic", clock.now)
            run.run()
            monkeypatch.undo()
        assert runs[0].seen == runs[1].seen
