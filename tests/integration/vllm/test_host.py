# SPDX-License-Identifier: Apache-2.0
"""The real halves of the connector under the fake host, with threads of their own."""

from collections import Counter

import pytest

from tests.integration.vllm.host_kit import world
from tests.testing.host_kit import BUSY, HYBRID, ONE_FULL, missing
from ucm.errors import StoreUnavailableError
from ucm.testing.faults import Fault, FaultPlan, raising
from ucm.testing.host import HostSettings, Odds

COMMON = {
    "bound_first",
    "checked_blocks",
    "deferred",
    "finished",
    "free_now",
    "freed_later",
    "held_back",
    "id_reused",
    "load",
    "poisoned",
    "preempted",
    "repeated",
    "results_first",
    "resumed",
}
"""What happens in every run, whatever the pace of the connector's threads."""


class TestRealHalves:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("layout", "settings"),
        [
            pytest.param(ONE_FULL, HostSettings(odds=BUSY), id="full"),
            pytest.param(HYBRID, HostSettings(odds=BUSY), id="hybrid"),
            pytest.param(HYBRID, HostSettings(in_flight=2, odds=BUSY), id="ahead"),
        ],
    )
    def test_real_halves_break_no_rule(self, layout, settings) -> None:
        """S1-02, S1-03, S1-07, S1-09, S1-15, S2-08, S3-10, H-01, H-02, H-06, H-10,
        H-12: with threads of their own, over many lives, both halves keep every rule
        and leave nothing."""
        seen: Counter[str] = Counter()
        for seed in (1, 2):
            with world(seed, layout, settings=settings) as it:
                it.run(1200)
                seen += it.host.seen
        assert set() == missing(seen, COMMON)

    @pytest.mark.slow
    def test_partial_local_hits_are_declined(self) -> None:
        """H-09: a local hit that ends within a block is no error."""
        settings = HostSettings(local_cache=True, partial_hits=True, odds=BUSY)
        with world(3, settings=settings) as it:
            it.run(1200)
            seen = it.host.seen
        assert set() == missing(seen, {"local_hit", "load", "deferred"})

    @pytest.mark.slow
    def test_failing_store_fails_no_content(self) -> None:
        """S1-25, H-05: loads and saves that fail are reported once, and the requests
        compute what is missing."""
        error = StoreUnavailableError("planned")
        faults = [
            Fault(verb, raising(error), nth)
            for verb in ("write", "read")
            for nth in range(3, 60, 7)
        ]
        with world(
            4, HYBRID, settings=HostSettings(odds=BUSY), plan=FaultPlan(*faults)
        ) as it:
            it.run(1200)
            assert 0 < it.host.seen["load_failed"]

    @pytest.mark.slow
    def test_reset_forgets_in_the_middle_of_everything(self) -> None:
        """A reset of the cache while requests load, save and run breaks no rule."""
        odds = Odds(reset=0.02, preempt=0.05)
        with world(5, HYBRID, settings=HostSettings(odds=odds)) as it:
            it.run(1200)
            assert set() == missing(it.host.seen, {"reset", "load", "deferred"})

    @pytest.mark.slow
    def test_class_that_the_engine_is_given_breaks_no_rule(self) -> None:
        """S3-02, H-12: ``UCMConnector`` itself, hook by hook, keeps every rule."""
        settings = HostSettings(odds=BUSY)
        with world(6, HYBRID, settings=settings, is_whole=True) as it:
            it.run(600)
            assert set() == missing(it.host.seen, {"load", "deferred", "preempted"})
