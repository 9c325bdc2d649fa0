# SPDX-License-Identifier: Apache-2.0
"""What a runtime does before it serves."""

import os

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


class TestStart:
    def test_copy_threads_bind_themselves_and_say_so(self):
        """With a plan each copy thread runs on its CPUs, which the log tells."""
        cpus = frozenset({min(os.sched_getaffinity(0))})
        tracer = Tracer()
        runtime = Runtime(
            MemoryStore(capacity_blocks=4, block_bytes=BLOCK_BYTES),
            CPUDevice(NUM_BLOCKS),
            layout=LAYOUT,
            config=UCMConfig(),
            counters=Counters(),
            log=tracer.log,
            affinity=AffinityPlan(cpus, "by hand"),
        )
        runtime.start()
        runtime.close()
        bound = [line for line in tracer.events if line["event"] == THREAD_BOUND]
        assert [("by hand", format_cpulist(cpus))] * 3 == [
            (line["reason"], line["cpus"]) for line in bound
        ]
