# SPDX-License-Identifier: Apache-2.0
"""What a runtime does before it serves, and what is left where it cannot."""

import asyncio
import os
import threading

import numpy as np
import pytest

from tests.clocks import RefusingThreads
from tests.kit.lockstep import Tracer
from tests.rig import BLOCK_BYTES, LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, PAGE_BYTES
from ucm import loop
from ucm.affinity import AffinityPlan, format_cpulist
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.errors import PipelineClosedError, StoreUnavailableError
from ucm.metrics import Counters
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Gate, raising
from ucm.threads import SYSTEM, Threads
from ucm.tracing import THREAD_BOUND

TIMEOUT = 60.0
NOWHERE = 99999
"""A CPU that no machine has."""
BRIEF = {"timeout": {"shutdown": 0.1}}


def made(threads=SYSTEM, store=None, config=None, **more):
    """Return a runtime that has not begun, its store and its log."""
    store = store or MemoryStore(capacity_blocks=4, block_bytes=BLOCK_BYTES)
    device, tracer = CPUDevice(NUM_BLOCKS), Tracer()
    memory = np.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), np.uint8)
    device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
    parsed = UCMConfig.from_mapping(config or {})
    parts = {"counters": Counters(), "log": tracer.log, "threads": threads}
    runtime = Runtime(store, device, layout=LAYOUT, config=parsed, **parts, **more)
    return runtime, store, tracer


def is_closed(store):
    """Return whether a store answers no more."""
    try:
        store.match([bytes(32)])
    except StoreUnavailableError:
        return True
    return False


class Late(Threads):
    """Threads whose loop comes up behind a gate."""

    def __init__(self):
        self.gate, self.made = Gate(), []

    def event_loop(self):
        """Wait for the gate."""
        self.gate()
        return super().event_loop()

    def thread(self, target, name):
        """Keep it."""
        self.made.append(super().thread(target, name))
        return self.made[-1]


class Slow(MemoryStore):
    """A store that begins behind a gate."""

    def __init__(self):
        super().__init__(capacity_blocks=4, block_bytes=BLOCK_BYTES)
        self.gate = Gate()

    def watch(self, tell):
        """Wait for the gate."""
        self.gate()
        super().watch(tell)


class TestStart:
    @pytest.mark.parametrize("others", [(), (NOWHERE,)])
    def test_copy_threads_bind_themselves_and_say_so(self, others):
        """With a plan each copy thread runs on its CPUs, which the log tells; that it does
        not on those that a setting names is a warning, which is told without a directory."""
        cpus = frozenset({min(os.sched_getaffinity(0))})
        plan = AffinityPlan(cpus.union(others), "by hand")
        runtime, _, tracer = made(affinity=plan)
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

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize(
        "refused", ["ucm-save-copy", "ucm-save-store", "ucm-load-copy", "ucm-loop"]
    )
    def test_thread_that_the_system_does_not_start_leaves_nothing(self, refused):
        """A container may have no more of them: the start says so, and a close ends those
        that there are, and closes store and device."""
        threads = RefusingThreads(refused)
        runtime, store, _ = made(threads)
        with pytest.raises(PipelineClosedError, match="did not start"):
            runtime.start()
        runtime.close()
        assert is_closed(store)
        assert not any(each.is_alive() for each in threads.made)


class TestClosedBefore:
    def test_loop_that_comes_up_late_ends(self, monkeypatch):
        """Whoever gave it up has closed: it serves nobody, and its threads end."""
        monkeypatch.setattr(loop, "_START_TIMEOUT_S", 0.01)
        threads = Late()
        runtime, store, _ = made(threads, config=BRIEF)
        with pytest.raises(PipelineClosedError):
            runtime.start()
        runtime.close()
        assert not is_closed(store)  # it may still be used
        threads.gate.open()
        for thread in threads.made:
            if thread.name == "ucm-loop":
                thread.join(TIMEOUT)
        assert runtime._pipeline.join_threads(TIMEOUT)
        assert not any(each.is_alive() for each in threads.made)

    def test_runtime_that_is_closed_while_it_begins_serves_nobody(self):
        """The store is not closed under it, and it comes back when it is through."""
        runtime, store, _ = made(store=Slow(), config=BRIEF)
        host = threading.Thread(target=asyncio.run, args=(runtime.serve(lambda: None),))
        host.start()
        store.gate.wait_reached()
        runtime.close()
        assert not is_closed(store)
        store.gate.open()
        host.join(TIMEOUT)
        assert not host.is_alive()

    def test_start_that_fails_is_waited_for_by_nobody(self):
        """A close behind it closes the store at once."""
        store = MemoryStore(capacity_blocks=4, block_bytes=BLOCK_BYTES)
        store.watch = lambda _: raising(StoreUnavailableError("gone"))()
        runtime, _, _ = made(store=store)
        with pytest.raises(StoreUnavailableError, match="gone"):
            asyncio.run(runtime.serve(lambda: None))
        runtime.close()
        assert is_closed(store)
