# SPDX-License-Identifier: Apache-2.0
"""An accelerator's world: what must hold in it, and that mistakes show in it."""

import json
import subprocess
import sys

import pytest

from tests.simulation.accelerator_world import AcceleratorWorld
from tests.simulation.contents import WrongBytesError
from tests.simulation.sabotage import SABOTAGES

SEEN = [
    *("save committed", "save skipped", "save refused", "save failed"),
    *("save cancelled", "load committed", "load failed", "load cancelled"),
    *("load refused", "fenced", "aborted", "read by a kernel", "drained", "failed"),
    *("damage", "device failed", "hang device"),
    *("fail reserve", "fail gather", "fail scatter", "fail commit", "fail read"),
    *("reason recycled", "reason corrupt", "reason evicted", "reason deadline"),
    *("reason queue_tickets", "reason queue_bytes", "reason store_full"),
    *("reason runtime_failed", "reason device", "reason stuck"),
    *("reason unfinished", "reason row_failed", "reason unasked", "rows loaded"),
    *("rows missing: unfinished", "rows missing: recycled", "came late"),
    *(
        "pass ended early",
        "semantics cuda",
        "semantics npu",
        "pins all",
        "pins staging",
        "pins none",
    ),
    *("closed False", "closed True"),
    *("proof written_hook_used", "proof current_stream_used"),
    *("proof sync_fallback_used", "proof reshape_cache_layer_used"),
    *("proof reshape_cache_direct_used", "proof reshape_cache_stale"),
    *("proof reshape_cache_unrecorded", "proof reshape_cache_foreign"),
]
"""Every outcome and every trouble, and each way in which writes are proved."""

FAILED_ONCE = [6, 10, 11, 16, 23, 24, 26]
"""Seeds that once found something: hardware that stands still for longer than a ticket
may last, loans that end with their device, errors that keep the engine's events alive."""


class TestAcceleratorWorld:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [*range(6), *FAILED_ONCE])
    def test_nothing_that_must_hold_is_broken(self, seed):
        """S0-24, S0-25, S0-26, S2-06, S2-15, S2-18, X-05: however late the hardware is
        and whatever the engine lends, what is stored and loaded is what was computed,
        and no event, loan, pin, slot or thread is left."""
        AcceleratorWorld(seed, 100).run()

    @pytest.mark.slow
    def test_seed_repeats_a_run(self):
        """A number is enough to see a run again, to the last step of the hardware."""
        runs = [AcceleratorWorld(5, 60) for _ in range(2)]
        for run in runs:
            run.run()
        first, second = (
            (run.seen, run.simulation.switches, run.hardware.executed) for run in runs
        )
        assert first == second

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_many_seeds_see_all_that_can_happen(self, tmp_path):
        """S1-15, S2-11: thousands of steps over many seeds meet every outcome, every
        trouble and every kind of proof, and nothing that must hold is broken."""
        result = tmp_path / "result.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.simulation.soak"),
                *("--world", "accelerator", "--first", "1000", "--seconds", "1500"),
                *("--steps", "100", "--most-steps", "6000", "--json", str(result)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout
        seen = json.loads(result.read_text())["seen"]
        assert [] == [what for what in SEEN if not seen.get(f"accelerator: {what}")]


class TestSabotage:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", SABOTAGES)
    def test_mistake_shows_within_twenty_seeds(self, name):
        """Each ordering mistake shows as wrong bytes, or as the misuse that it is known
        by, so that a world without them is one in which none is made."""
        sabotage = SABOTAGES[name]
        for seed in range(20):
            try:
                AcceleratorWorld(seed, 100, sabotage.parts).run()
            except WrongBytesError:
                assert not sabotage.shows
                return
            except AssertionError as exc:
                if sabotage.shows and sabotage.shows in str(exc):
                    return
        pytest.fail("nothing has shown")
