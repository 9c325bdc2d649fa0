# SPDX-License-Identifier: Apache-2.0
"""The pipeline in the simulated world, over a few seeds and over many."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from tests.kit.simulation import Simulation
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    PAGE_BYTES,
    null_log,
    order,
)
from tests.simulation.pipeline_world import PipelineWorld
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.deadlines import Deadlines
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore


class TestPipelineWorld:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(12))
    def test_nothing_that_must_hold_is_broken(self, seed):
        """X-05, X-06: whatever fails, hangs, dies or rots, no byte is wrong, every
        ticket ends once and in time, and no lease, ticket or thread is left."""
        PipelineWorld(seed, 100).run()

    def test_seed_repeats_a_run(self):
        """A number is enough to see a run again, to the last act."""
        runs = [PipelineWorld(5, 40) for _ in range(2)]
        for run in runs:
            run.run()
        first, second = runs
        assert (first.seen, first.simulation.switches, first.simulation.now) == (
            second.seen,
            second.simulation.switches,
            second.simulation.now,
        )

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_many_seeds_see_all_that_can_happen(self, tmp_path):
        """S1-15, S2-11: thousands of steps over many seeds meet every outcome and every
        trouble, and nothing that must hold is broken."""
        result = tmp_path / "result.json"
        arguments = ["--seconds", "1500", "--most-steps", "24000", "--first", "2000"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.simulation.soak",
                *arguments,
                "--world",
                "pipeline",
                "--json",
                str(result),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout
        seen = json.loads(result.read_text())["seen"]
        for what in (
            *("save committed", "save skipped", "save refused", "save failed"),
            *("save cancelled", "load committed", "load failed", "load cancelled"),
            *("load refused", "fenced", "damage", "failed", "hang gather", "hang read"),
            *("fail reserve", "fail gather", "fail commit", "fail read"),
            *("reason recycled", "reason corrupt", "reason evicted", "reason deadline"),
            *("reason queue_tickets", "reason queue_bytes", "reason store_full"),
            *("reason runtime_failed", "reason shutdown"),
            *("reason unfinished", "reason row_failed", "reason unasked"),
            *("reason store_hung", "reason store_behind"),
            *("rows missing: deadline", "rows missing: recycled", "rows loaded"),
            *("rows come late", "rows never come", "pass ended early", "came late"),
        ):
            assert seen.get(f"pipeline: {what}"), what

    def test_what_waits_is_looked_through_at_intervals_only(self):
        """However many items come and go, all that waits is swept every 50 ms."""
        world, sweeps = PipelineWorld(5, 150), []
        look_through = Deadlines.look_through

        def counted(deadlines, tickets, now):
            sweeps.append(world.simulation.now)
            look_through(deadlines, tickets, now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deadlines, "look_through", counted)
            world.run()
        assert sweeps
        assert all(b - a >= 0.05 for a, b in itertools.pairwise(sweeps))


def test_save_duration_is_measured_from_submit_to_the_last_word():
    """S1-23: a commit that takes 7 s is 7 s of the save, however short the hooks are."""
    simulation, counters = Simulation(3), Counters()

    def main():
        plan = FaultPlan(Fault("commit", lambda: simulation.sleep(7.0)))
        device = CPUDevice(NUM_BLOCKS)
        memory = torch.zeros((len(LAYERS), NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
        device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
        runtime = Runtime(
            FaultStore(MemoryStore(8, BLOCK_BYTES), plan),
            device,
            layout=LAYOUT,
            config=UCMConfig(),
            counters=counters,
            log=null_log(),
            threads=simulation.threads,
        )
        runtime.start()
        start = simulation.now
        one = order(1, Direction.SAVE, range(4), range(1, 5))
        runtime.submit(KEYSPACE_DIGEST, [one], device.lease(None))
        assert simulation.now - start < 1.0
        assert runtime.flush(20.0)
        runtime.close()

    simulation.run(main)
    (duration,) = counters.take()["histograms"]["ucm_save_duration_seconds"]
    assert 7.0 <= duration < 8.0
