# SPDX-License-Identifier: Apache-2.0
"""The fake host around correct connectors: nothing is wrong, and everything happens."""

from collections import Counter

import pytest

from tests.testing.host_kit import (
    ALWAYS,
    BUSY,
    HYBRID,
    ONE_FULL,
    missing,
    run,
    tiny_host,
)
from tests.testing.tiny_connector import TinyScheduler, WorkerInStep
from ucm.testing.host import HostSettings, Odds


class TestSmallConnector:
    @pytest.mark.slow
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["full", "hybrid"])
    def test_correct_connector_breaks_no_rule(self, layout, in_flight) -> None:
        """H-01, H-02, H-06, H-07, H-10: thousands of acts of every kind leave a correct
        connector unblamed, also when the engine plans a step ahead."""
        settings = HostSettings(in_flight=in_flight, odds=BUSY)
        host = tiny_host(layout, settings=settings)
        run(host, 2500)
        assert set() == missing(host.seen, ALWAYS)
        assert (layout is HYBRID) == (host.seen["recycled"] > 0)
        assert (in_flight == 2) == (host.seen["late_free"] > 0)
        assert in_flight == 2 or host.seen["resumed_at_once"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["full", "hybrid"])
    def test_engines_own_cache_is_shared_and_hit(self, layout) -> None:
        """H-09: hits of the engine's own cache, of whole blocks and within a block, mix
        with loads."""
        settings = HostSettings(local_cache=True, partial_hits=True, odds=BUSY)
        host = tiny_host(layout, settings=settings)
        run(host, 2500)
        assert set() == missing(host.seen, {"local_hit", "partial_hit", "forgot"})
        assert set() == missing(host.seen, ALWAYS)

    @pytest.mark.slow
    @pytest.mark.parametrize("recomputes", [True, False])
    def test_failed_loads_are_recomputed_or_end(self, recomputes) -> None:
        """H-05: a request whose load failed starts anew, or fails where the engine is
        told so."""
        settings = HostSettings(recomputes=recomputes, odds=Odds(reset=0.02))
        host = tiny_host(HYBRID, settings=settings)
        run(host, 2500)
        assert set() == missing(host.seen, {"reset", "load_failed"})
        assert recomputes == (host.seen["failed"] == 0)

    @pytest.mark.slow
    def test_loads_within_the_step_may_fail_by_block(self) -> None:
        """What is computed on top of a block that failed is computed again."""
        host = tiny_host(ONE_FULL, TinyScheduler, WorkerInStep, in_step=True)
        run(host, 2500)
        assert set() == missing(host.seen, {"load_in_step", "blocks_failed"})
        assert 0 == host.seen["load"]

    def test_engine_sleeps_unless_somebody_wants_a_step(self) -> None:
        """R-18: with nobody there, or halted, it steps for the connector alone, as long as
        that asks for it, and runs nobody then."""
        calm = Odds(arrive=0, abort=0, forget=0, admit=1, preempt=0, empty=0)
        host = tiny_host(ONE_FULL, settings=HostSettings(odds=calm))
        wanted = [False]
        host.scheduler.hooks.has_pending_push_work = wanted.pop
        assert "sleep" == host.act()
        host.arrive()
        assert "step" == host.act()
        host.scheduler.is_halted = True
        wanted += [False, True, False]
        before = host.seen["step"]
        assert ["sleep", "step", "sleep"] == [host.act() for _ in range(3)]
        assert (before, 1) == (host.seen["step"], host.seen["empty_step"])
        run(host, 0)

    def test_same_seed_gives_the_same_run(self) -> None:
        """A run repeats from its seed, and another seed gives another run."""

        def seen(seed: int) -> Counter[str]:
            host = tiny_host(HYBRID, seed=seed)
            run(host, 100)
            return host.seen

        assert seen(5) == seen(5)
        assert seen(5) != seen(6)
