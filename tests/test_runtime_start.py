# SPDX-License-Identifier: Apache-2.0
"""What a runtime does before it serves."""

import os

import pytest

from tests.kit.lockstep import Tracer
from tests.rig import BLOCK_BYTES, LAYOUT, NUM_BLOCKS
from ucm.affinity import AffinityPlan, format_cpulist
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.tracing import THREAD_BOUND

SAVE = Direction.SAVE


NOWHERE = 99999
"""A CPU that no machine has."""


class TestStart:
    @pytest.mark.parametrize("others", [(), (NOWHERE,)])
    def test_copy_threads_bind_themselves_and_say_so(self, others):
        """With a plan each copy thread runs on its CPUs, which the log tells; that it does
        not on those that a setting names is a warning, which is told without a directory."""
        cpus = frozenset({min(os.sched_getaffinity(0))})
        tracer = Tracer()
        runtime = Runtime(
            MemoryStore(capacity_blocks=4, block_bytes=BLOCK_BYTES),
            CPUDevice(NUM_BLOCKS),
            layout=LAYOUT,
            config=UCMConfig(),
            counters=Counters(),
            log=tracer.log,
            affinity=AffinityPlan(cpus.union(others), "by hand"),
        )
        runtime.start()
        runtime.close()
        bound = [line for line in tracer.events if line["event"] == THREAD_BOUND]
        reason = "by hand"
        if others:
            reason += f"; CPUs {NOWHERE} are offline or not allowed"
        level = "warning" if others else "info"
        assert [(reason, format_cpulist(cpus), level)] * 3 == [
            (line["reason"], line["cpus"], line["level"]) for line in bound
        ]
