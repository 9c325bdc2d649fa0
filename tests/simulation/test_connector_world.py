# SPDX-License-Identifier: Apache-2.0
"""Both halves of the connector in the simulated world."""

import json
import subprocess
import sys

import pytest

from tests.simulation.connector_world import ConnectorWorld
from ucm.config import SaveDecoded

SEEN = [
    *("load", "full_hit", "load_failed", "received_late", "declined", "local_hit"),
    *("deferred", "free_now", "freed_later", "late_free", "finished", "id_reused"),
    *("preempted", "resumed", "resumed_at_once", "recycled", "poisoned", "held_back"),
    *("aborted_waiting", "aborted_loading", "aborted_running", "aborted_preempted"),
    *("repeated", "results_first", "bound_first", "empty_step", "checked_blocks"),
    *(
        "offered",
        "copied",
        "damage",
        "fail reserve",
        "fail read",
        "hang commit",
        "runtime failed",
        "reset",
    ),
    *("mode direct", "mode layerwise", "mode layerwise-groups"),
    *("mode layerwise-overlapping", "mode layerwise-recurrent"),
    *(f"saved decoded {when.value}" for when in SaveDecoded),
    *("load_in_step", "blocks_failed", "loaded_weights"),
    *("weights touch", "weights reset", "weights renew", "weights sleep"),
    *("cleared", "torn by an overwrite", "part", "drafted", "never_asked"),
    *("mode layerwise-microbatches", "mode layerwise-speculation"),
    *("halted", "slept", "kept_awake", "asleep in the middle"),
]
"""Kinds of acts and ends, of the engine and of the store."""


class TestConnectorWorld:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(6))
    def test_nothing_that_must_hold_is_broken(self, seed):
        """S1-05, S1-10, S1-16, S1-22, H-01, H-02, H-05, H-06, H-07, H-08, H-10: on any
        interleaving of engine, loops and copy threads of up to three ranks, over a
        store in trouble, no rule of the host is broken and nothing is left."""
        ConnectorWorld(seed, 40).run()

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_many_seeds_see_all_that_can_happen(self, tmp_path):
        """S1-15: over many seeds every kind of act, end and trouble happens, no content
        is wrong, and all containers, holds, leases and fences end at zero."""
        result = tmp_path / "result.json"
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "tests.simulation.soak",
                    "--world",
                    "connector",
                ),
                *("--first", "3000", "--steps", "400", "--most-steps", "16000"),
                *("--seconds", "1500", "--json", str(result)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout
        seen = json.loads(result.read_text())["seen"]
        assert [] == [what for what in SEEN if not seen.get(f"connector: {what}")]
        assert seen["connector: arrived"] > 1500
