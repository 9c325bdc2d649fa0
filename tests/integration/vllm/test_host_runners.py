# SPDX-License-Identifier: Apache-2.0
"""The real halves under both orders of hooks, with drafters, parts and silent stages."""

import pytest

from tests.integration.vllm.host_kit import world
from tests.testing.host_kit import BUSY, HYBRID, ONE_FULL, RECURRENT, missing
from ucm.integration.vllm.modes import Facts, Mode, choose_mode, shape_of
from ucm.layout import KVLayout
from ucm.testing.host import HostAssertionError, HostSettings, Rule

SECOND = {"overwrites_first": True, "clears": True, "odds": BUSY}
DRAFTS = {"defers_saves": True, "draft_layers": 1, "odds": BUSY}


def mode_of(layout: KVLayout, settings: HostSettings) -> Mode:
    """Return how blocks move in an engine that asks for layer-wise transfer."""
    return choose_mode(
        Facts(
            use_layerwise=True,
            shape=shape_of(layout),
            overlapping_batches=settings.in_flight > 1,
            micro_batches=settings.parts > 1,
            speculation=settings.draft_layers > 0,
        )
    )


class TestRunners:
    @pytest.mark.slow
    @pytest.mark.parametrize("whole", [True, False], ids=["whole", "layerwise"])
    @pytest.mark.parametrize(
        ("layout", "settings", "kinds"),
        [
            pytest.param(
                RECURRENT, HostSettings(**SECOND), {"cleared", "copied"}, id="second"
            ),
            pytest.param(
                HYBRID,
                HostSettings(**SECOND, in_flight=2),
                {"cleared", "late_load"},
                id="second-ahead",
            ),
            pytest.param(
                ONE_FULL,
                HostSettings(**DRAFTS, silent_ranks=frozenset({0})),
                {"drafted", "never_asked", "results_first"},
                id="stages-and-drafts",
            ),
            pytest.param(
                ONE_FULL, HostSettings(**DRAFTS, parts=2), {"part"}, id="parts"
            ),
        ],
    )
    def test_no_rule_is_broken_in_any_order_of_hooks(
        self, layout, settings, kinds, whole
    ) -> None:
        """R-01, R-02, R-03, R-04: whatever runner the engine has, and however its steps
        end, both halves keep every rule, content is right and nothing is left."""
        mode = choose_mode(Facts()) if whole else mode_of(layout, settings)
        with world(7, layout, settings=settings, mode=mode) as it:
            it.run(400)
            assert set() == missing(it.host.seen, {*kinds, "load", "deferred"})


def broken(layout: KVLayout, settings: HostSettings, mode: Mode) -> Rule | None:
    """Return the rule that some run breaks, if one does."""
    for seed in range(1, 12):
        try:
            with world(seed, layout, settings=settings, mode=mode) as it:
                it.run(400)
        except HostAssertionError as exc:
            return exc.rule
    return None


class TestSpoilt:
    @pytest.mark.slow
    def test_row_saved_behind_its_first_part_is_found_out(self) -> None:
        """R-03: were rows saved layer by layer in a pass that runs in parts, what is
        loaded later would be wrong: the fallback is needed."""
        layerwise = choose_mode(Facts(use_layerwise=True, speculation=True))
        settings = HostSettings(parts=2, odds=BUSY)
        assert Rule.CONTENT is broken(ONE_FULL, settings, layerwise)

    @pytest.mark.slow
    def test_plan_that_nobody_settles_is_found_out(self, monkeypatch) -> None:
        """R-02: what a stage was never asked for would stay held for good."""
        monkeypatch.setattr(
            "ucm.integration.vllm.worker.WorkerHalf._settle", lambda *_: None
        )
        settings = HostSettings(
            **DRAFTS, silent_ranks=frozenset({0}), max_drain_steps=50
        )
        found = broken(ONE_FULL, settings, choose_mode(Facts()))
        assert found in (Rule.NEVER_ENDS, Rule.CONTENT)
