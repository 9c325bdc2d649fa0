# SPDX-License-Identifier: Apache-2.0
"""Stores that are slow or hang, and more loads than there is time for; virtual time."""

import numpy as np
import pytest

from tests.kit.simulation import Simulation
from tests.kit.unreliable import LateDevice, Odds, SeededFaults
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
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore

SAVE, LOAD = Direction.SAVE, Direction.LOAD
DEVICES = pytest.mark.parametrize("is_late", [False, True], ids=["sync", "async"])


class Engine:
    """
    A runtime in virtual time, and when it told what.

    Args:
        simulation: Its time.
        slow: Verbs of the store, the seconds that they take, and at which call from 1;
            at each one if that is 0.
        config: Of the runtime.
        is_late: The device's copies end some time after they were asked for.
    """

    def __init__(self, simulation, slow, config, *, is_late):
        self.simulation = simulation
        device = CPUDevice(NUM_BLOCKS)
        if is_late:
            device = LateDevice(device, SeededFaults(simulation, Odds()), simulation)
        memory = np.zeros((len(LAYERS), NUM_BLOCKS, PAGE_BYTES), np.uint8)
        device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
        self.store, self.device = MemoryStore(256, BLOCK_BYTES), device
        self.released, self.settled, self.ends = {}, {}, {}
        faults = [
            Fault(verb, lambda seconds=seconds: simulation.sleep(seconds), nth)
            for verb, seconds, nth in slow
        ]
        self.runtime = Runtime(
            FaultStore(self.store, FaultPlan(*faults)),
            device,
            layout=LAYOUT,
            config=UCMConfig.from_mapping(config),
            counters=Counters(),
            log=null_log(),
            threads=simulation.threads,
        )
        self.runtime.start()

    @property
    def now(self):
        """The time."""
        return self.simulation.now

    def submit(self, direction, *requests, first=1):
        """Submit a ticket of one block for each name in *requests*; return their ids."""
        numbers = range(first, first + len(requests))
        orders = [
            order(n, direction, range(1), range(n % NUM_BLOCKS, n % NUM_BLOCKS + 1), r)
            if direction is LOAD
            else order(n, direction, range(n, n + 1), range(1, 2), r)
            for n, r in zip(numbers, requests, strict=True)
        ]
        self.runtime.submit(KEYSPACE_DIGEST, orders, self.device.lease(None))
        return list(numbers)

    def be_stored(self):
        """Save what is loaded."""
        self.runtime.submit(
            KEYSPACE_DIGEST,
            [order(900, SAVE, range(1), range(1, 2))],
            self.device.lease(None),
        )
        assert ["committed"] == self.ended(900)

    def wait(self, is_over, limit=100.0):
        """Poll until something is so."""
        end = self.now + limit
        while not is_over():
            assert self.now < end, "it takes too long"
            self.poll()
            self.simulation.sleep(0.005)

    def poll(self):
        """Note what is told, and when."""
        for notice in self.runtime.poll():
            number, outcome = notice.ticket.transfer_id, notice.outcome
            if notice.kind is NoticeKind.RELEASED:
                self.released[number] = self.now
            elif outcome is not None:
                self.settled[number] = self.now
                self.ends[number] = outcome.reason or outcome.kind.value

    def ended(self, *numbers, limit=100.0):
        """Wait until tickets have ended; return how."""
        self.wait(lambda: self.ends.keys() >= set(numbers), limit)
        return [self.ends[number] for number in numbers]


def simulated(test, *slow, config=None, is_late=False):
    """Run a test in virtual time, over an engine that it gets."""
    simulation = Simulation(7)

    def main():
        engine = Engine(simulation, slow, config or {}, is_late=is_late)
        test(engine)
        engine.runtime.close()
        assert "" == engine.runtime.failure

    simulation.run(main)


class TestSlowStore:
    @DEVICES
    @pytest.mark.parametrize(
        "requests", ["r" * 16, "rstuvwxy" * 2], ids=["one", "many"]
    )
    def test_blocks_are_held_for_the_copy_only(self, requests, is_late):
        """R-11: with commits of a second, the blocks of sixteen saves come back when they
        are copied, of one request or of many; all are stored in the end."""

        def run(engine):
            started = engine.now
            saves = engine.submit(SAVE, *requests)
            engine.wait(lambda: len(engine.released) == 16)
            assert max(engine.released.values()) - started < 0.5
            assert len(engine.ends) <= 1
            assert ["committed"] * 16 == engine.ended(*saves)
            assert 16.0 <= max(engine.settled.values()) - started < 17.0

        simulated(run, ("commit", 1.0, 0), is_late=is_late)

    @DEVICES
    def test_saves_beyond_the_bound_on_slots_are_refused_at_once(self, is_late):
        """R-11: behind three saves that the store has not stored, others are refused
        with a named reason and give their blocks back; when it has, saves go on."""

        def run(engine):
            for number in range(1, 6):
                engine.submit(SAVE, "r", first=number)
                engine.wait(lambda number=number: number in engine.released, limit=0.2)
            assert {4: "store_behind", 5: "store_behind"} == engine.ends
            assert ["committed"] * 3 == engine.ended(1, 2, 3)
            engine.submit(SAVE, "r", first=6)
            assert ["committed"] == engine.ended(6)

        config = {"queue": {"tickets": 3}}
        simulated(run, ("commit", 1.0, 0), config=config, is_late=is_late)

    def test_store_that_hangs_holds_no_blocks_and_is_asked_again(self):
        """R-11: while a commit hangs saves hold nothing; from its deadline on they are
        refused at once; when it returns they are stored again, and no slot is lost."""

        def run(engine):
            saves = engine.submit(SAVE, "a", "b", "c")
            engine.wait(lambda: len(engine.released) == 3, limit=0.5)
            assert ["deadline"] * 3 == engine.ended(*saves)
            later = engine.submit(SAVE, "d", first=4)
            assert ["store_hung"] == engine.ended(*later, limit=0.1)
            assert 4 in engine.released
            engine.simulation.sleep(20.0)
            later = engine.submit(SAVE, "e", first=5)
            assert ["committed"] == engine.ended(*later)
            assert 0 == engine.store.stats().reserved_blocks

        simulated(run, ("commit", 45.0, 1))


class TestOverload:
    @DEVICES
    def test_loads_that_fit_succeed_and_others_are_refused_at_once(self, is_late):
        """R-12: of six requests whose loads together take twice the deadline the first
        two are loaded whole, and the others are told at once to compute."""

        def run(engine):
            engine.be_stored()
            (warm,) = engine.submit(LOAD, "warm", first=800)
            assert ["committed"] == engine.ended(warm)
            started = engine.now
            loads = engine.submit(LOAD, *"aaabbbcccdddeeefff")
            engine.wait(lambda: len(engine.ends) == 2 + 12)
            assert engine.now - started < 0.5  # the first load takes a second
            ends = engine.ended(*loads)
            assert ["committed"] * 6 + ["overload"] * 12 == ends
            assert max(engine.settled.values()) - started < 7.0
            assert engine.released.keys() >= set(loads)

        simulated(run, ("read", 1.0, 0), is_late=is_late)

    def test_loads_are_judged_by_those_of_former_steps_too(self):
        """R-12: what was accepted in other steps is before a request as well."""

        def run(engine):
            engine.be_stored()
            assert ["committed"] == engine.ended(*engine.submit(LOAD, "w", first=800))
            numbers = range(1, 7)
            for number in numbers:
                engine.submit(LOAD, f"r{number}", first=number)
                engine.simulation.sleep(0.01)
            ends = engine.ended(*numbers)
            assert ["committed"] * 2 + ["overload"] * 4 == ends

        simulated(run, ("read", 3.0, 0))

    def test_first_requests_are_in_time_though_nothing_is_known_of_the_store(self):
        """R-12: without any rate all loads are tried, one request after the other: those
        whose turn comes in time are loaded, the others fail at their deadline."""

        def run(engine):
            engine.be_stored()
            loads = engine.submit(LOAD, *"aaabbbcccdddeeefff")
            ends = engine.ended(*loads)
            assert ["committed"] * 9 == ends[:9]
            assert "committed" not in ends[10:]

        simulated(run, ("read", 1.0, 0))

    def test_store_that_recovers_is_used_again(self):
        """R-12: a rate that was measured while the store was slow refuses nothing once
        loads under way have ended fast."""

        def run(engine):
            engine.be_stored()
            for number in range(1, 4):
                engine.submit(LOAD, "slow", first=number)
                assert ["committed"] == engine.ended(number)
            ends = engine.ended(*engine.submit(LOAD, *"abcdef", first=10))
            assert "overload" in ends
            for number in range(20, 60):
                engine.ended(*engine.submit(LOAD, "one", first=number))
            ends = engine.ended(*engine.submit(LOAD, *"abcdef", first=100))
            assert ["committed"] * 6 == ends

        slow = (("read", 5.0, nth) for nth in (1, 2, 3))
        simulated(run, *slow)

    @DEVICES
    def test_saves_get_on_beside_loads_that_never_end(self, is_late):
        """R-13: while there are always loads waiting, saves are stored all the same, and
        most of the time is the loads'."""

        def run(engine):
            engine.be_stored()
            saves = engine.submit(SAVE, "s" * 5, "t" * 5)
            first = 1000
            while not engine.ends.keys() >= set(saves):
                waiting = engine.runtime._pipeline.queue.waiting(LOAD)[0]
                if waiting < 8:
                    engine.submit(LOAD, *"abcdefgh", first=first)
                    first += 8
                assert first < 2000, "the saves are starved"
                engine.poll()
                engine.simulation.sleep(0.005)
            assert {"committed"} == set(engine.ended(*saves))
            assert "committed" in engine.ends.values()

        simulated(run, ("read", 0.02, 0), is_late=is_late)


class TestHungRead:
    @DEVICES
    def test_hung_read_costs_one_deadline_and_heals_by_itself(self, is_late):
        """R-14: what stands behind a read that hangs fails with it and not later, what
        comes then is refused at once, saves go on; when the read returns its slots are
        let go, and loads succeed again."""

        def run(engine):
            engine.be_stored()
            started = engine.now
            engine.submit(LOAD, "a")
            engine.simulation.sleep(5.0)
            behind = engine.submit(LOAD, *"bcdefgh" * 10, first=2)
            assert ["deadline", *["store_hung"] * 70] == engine.ended(1, *behind)
            assert engine.now - started < 10.2
            later = engine.submit(LOAD, "i", first=100)
            assert ["store_hung"] == engine.ended(*later, limit=0.1)
            assert {1, *behind, *later} < engine.released.keys()
            saves = engine.submit(SAVE, "s", first=200)
            assert ["committed"] == engine.ended(*saves, limit=0.1)
            engine.simulation.sleep(started + 26.0 - engine.now)
            later = engine.submit(LOAD, "k", first=300)
            assert ["committed"] == engine.ended(*later, limit=0.1)

        simulated(run, ("read", 25.0, 1), is_late=is_late)

    def test_read_that_never_returns_ends_loads_and_nothing_else(self):
        """R-14: a copy thread that is lost for good costs loads only; saves go on behind
        every limit, and the runtime has not failed."""

        def run(engine):
            engine.be_stored()
            assert ["deadline"] == engine.ended(*engine.submit(LOAD, "a"))
            engine.simulation.sleep(200.0)
            later = engine.submit(LOAD, "b", first=2)
            assert ["store_hung"] == engine.ended(*later, limit=0.1)
            saves = engine.submit(SAVE, "s", first=20)
            assert ["committed"] == engine.ended(*saves, limit=0.1)

        simulated(run, ("read", 1e6, 1), config={"timeout": {"shutdown": 0.1}})

    def test_slot_that_is_reserved_late_is_given_back(self):
        """R-11: a save that hangs before its copy costs others no deadline of their own;
        what it reserved when it was over is given back."""

        def run(engine):
            engine.submit(SAVE, "a")
            engine.simulation.sleep(20.0)
            later = engine.submit(SAVE, *"bcdefg", first=2)
            ends = engine.ended(1, *later)
            assert ["deadline", *["store_hung"] * 6] == ends
            assert engine.released.keys() == {1, *later}
            engine.simulation.sleep(20.0)
            assert 0 == engine.store.stats().reserved_blocks
            assert ["committed"] == engine.ended(*engine.submit(SAVE, "h", first=10))

        simulated(run, ("reserve", 40.0, 1))
