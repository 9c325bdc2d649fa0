# SPDX-License-Identifier: Apache-2.0
"""What a runtime does before it serves."""

import os

from tests.kit.lockstep import Tracer
from tests.rig import BLOCK_BYTES, LAYOUT, NUM_BLOCKS, order, running_on
from ucm.affinity import AffinityPlan, format_cpulist
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.tracing import MEMORY_UNPINNED, RUNTIME_STARTED, THREAD_BOUND

SAVE = Direction.SAVE


class Pinning(CPUDevice):
    """A device that can pin half of what it is given."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.given = []

    def pin(self, memory):
        """Note the memory; refuse some of it."""
        self.given.append(memory)
        return "locked memory is scarce" if len(self.given) > 1 else ""

    def stage(self, nbytes, slot_bytes):
        """Note what is asked for."""
        self.staged = nbytes, slot_bytes
        return "and so is staging memory"

    def describe(self):
        """Say how it copies."""
        return {"copies": "by hand"}


class TwoBuffers(WrapperStore):
    """A store in two pieces of memory."""

    @property
    def buffers(self):
        """Two."""
        return self.inner.buffers * 2


class TestStart:
    def test_memory_of_the_store_is_pinned_first(self):
        """S2-04: before the first copy the device may pin the memory that slots lie in;
        what it cannot pin is logged once, and served all the same."""
        store = MemoryStore(capacity_blocks=16, block_bytes=BLOCK_BYTES)
        config = {"queue": {"staging_bytes": 4096}}
        with running_on(TwoBuffers(store), Pinning(NUM_BLOCKS), config) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            assert 4 == rig.settle()[1].committed
            assert [id(store.buffers[0])] * 2 == [id(one) for one in rig.device.given]
            assert (4096, BLOCK_BYTES) == rig.device.staged
        told = [line for line in rig.tracer.events if line["event"] == MEMORY_UNPINNED]
        assert ["locked memory is scarce", "and so is staging memory"] == [
            line["reason"] for line in told
        ]
        (started,) = (
            line for line in rig.tracer.events if line["event"] == RUNTIME_STARTED
        )
        assert "by hand" == started["copies"]

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
