# SPDX-License-Identifier: Apache-2.0
"""The real halves of the connector under the fake host, with threads of their own."""

from collections import Counter

import attrs
import pytest

from tests.integration.vllm.host_kit import world
from tests.testing.host_kit import BUSY, HYBRID, ONE_FULL, RECURRENT, missing
from ucm.blocks import GroupId
from ucm.errors import StoreUnavailableError
from ucm.layout import KVLayout
from ucm.scheduler.lives import Life
from ucm.scheduler.requests import ScheduledRequest
from ucm.scheduler.shares import Run
from ucm.testing.faults import Fault, FaultPlan, raising
from ucm.testing.host import HostAssertionError, HostSettings, Odds, Rule

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


class TestSpoiltHalves:
    """States: the host notices what a connector could do wrong with them."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mistake", ["tails", "copies"])
    def test_wrong_state_is_found_out(
        self, monkeypatch: pytest.MonkeyPatch, mistake: str
    ) -> None:
        """A state within a block that is stored under the hash of a shorter prefix, or
        read after the engine copied onto it, is content that is wrong later."""
        if mistake == "tails":
            monkeypatch.setattr(Life, "offered", offered_tails)
        else:
            monkeypatch.setattr(
                "ucm.integration.vllm.running.overwritten_blocks",
                lambda _: frozenset(),
            )
        settings = HostSettings(odds=BUSY)
        assert any(
            Rule.CONTENT in broken_rules(seed, settings) for seed in range(1, 20)
        )


def offered_tails(
    life: Life, layout: KVLayout, at: int, request: ScheduledRequest, *, is_late: bool
) -> list[Run]:
    """Take every offer for one of the last whole block before it."""
    size = layout.groups[at].block_tokens
    return [
        Run(i, (offer.block_id,), (request.hashes[layout.hash_index(group, i)],))
        for offer in request.states
        for group in [layout.group(GroupId(offer.group_id))]
        if group is layout.groups[at]
        for i in [offer.boundary_tokens // size - 1]
        if i >= 0
    ]


def broken_rules(seed: int, settings: HostSettings) -> list[Rule]:
    """Return the rule that a run breaks, if it does."""
    try:
        with world(seed, RECURRENT, num_blocks=64, settings=settings) as it:
            it.run(800)
    except HostAssertionError as exc:
        return [exc.rule]
    return []


class TestRealHalves:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("layout", "settings"),
        [
            pytest.param(ONE_FULL, HostSettings(odds=BUSY), id="full"),
            pytest.param(HYBRID, HostSettings(odds=BUSY), id="hybrid"),
            pytest.param(HYBRID, HostSettings(in_flight=2, odds=BUSY), id="ahead"),
            pytest.param(RECURRENT, HostSettings(odds=BUSY), id="recurrent"),
            pytest.param(
                RECURRENT, HostSettings(in_flight=2, odds=BUSY), id="recurrent-ahead"
            ),
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
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["full", "hybrid"])
    def test_loads_that_are_ordered_late_break_no_rule(self, layout) -> None:
        """S1-15: vLLM 0.33 may order a load only steps after it was matched, or never,
        where its request is aborted before; what comes is right, and nothing stays."""
        settings = HostSettings(
            in_flight=2, odds=attrs.evolve(BUSY, late_load=0.9, abort=0.3, arrive=0.5)
        )
        seen: Counter[str] = Counter()
        for seed in (1, 2):
            with world(seed, layout, settings=settings) as it:
                it.run(800)
                seen += it.host.seen
        assert set() == missing(seen, {"late_load", "late_load_dropped", "full_hit"})

    @pytest.mark.slow
    def test_states_of_the_engines_own_cache_mix_with_loaded_ones(self) -> None:
        """H-09, H-10: hits within a block, copies of states and states that are offered
        for tails only, all among loads and failures, leave every state right."""
        settings = HostSettings(local_cache=True, partial_hits=True, odds=BUSY)
        error = StoreUnavailableError("planned")
        faults = [Fault("read", raising(error), nth) for nth in range(3, 60, 7)]
        seen: Counter[str] = Counter()
        for seed in (1, 2):
            with world(
                seed, RECURRENT, settings=settings, plan=FaultPlan(*faults)
            ) as it:
                it.run(1200)
                seen += it.host.seen
        kinds = {"local_hit", "partial_hit", "offered", "copied", "load", "load_failed"}
        assert set() == missing(seen, kinds)

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
