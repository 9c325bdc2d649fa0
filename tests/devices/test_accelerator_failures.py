# SPDX-License-Identifier: Apache-2.0
"""An accelerator that fails, for good or for once, at each of its verbs."""

import gc
import weakref

import numpy as np
import pytest

from tests.devices.accelerator_kit import (
    NEW,
    OLD,
    STILL,
    TIMEOUT,
    World,
    make_driver,
    running,
    simulated,
)
from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_kit import BOTH, on_a_thread
from ucm.devices import accelerator, events, poller
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Direction
from ucm.errors import DeviceError, DeviceFailedError
from ucm.plan import CopyBatch
from ucm.testing.device_memory import Engine

LINES = tuple(module.__file__ for module in (accelerator, events, poller))


class HalfDriver(SimulatedDriver):
    """A runtime that submits half of a batch and fails at the rest."""

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit half, and fail."""
        half = len(batch) // 2
        part = CopyBatch(
            batch.sources[:half], batch.targets[:half], batch.nbytes[:half]
        )
        super().copy(part, direction, stream, is_pinned=is_pinned)
        raise RuntimeError("half is submitted")


class PoorDriver(SimulatedDriver):
    """A runtime whose memory on the host is short behind a copy."""

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit, and fail to make a note of it."""
        super().copy(batch, direction, stream, is_pinned=is_pinned)
        raise MemoryError


class NotingDriver(SimulatedDriver):
    """A runtime that knows which events it has made are still alive."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.made = weakref.WeakSet()

    def make_event(self):
        """Note the event."""
        event = super().make_event()
        self.made.add(event)
        return event


class SlowDriver(SimulatedDriver):
    """A runtime that fails at once when it loads, and a second later when it saves."""

    def copy(self, batch, direction, stream, *, is_pinned):
        """Fail, sooner or later."""
        if direction is Direction.TO_DEVICE:
            raise RuntimeError("the first")
        self.sleep(1.0)
        raise RuntimeError("the second")


class DyingDriver(SimulatedDriver):
    """A runtime that ends the thread that asks, without a word."""

    def is_done(self, event):
        """End the thread."""
        raise SystemExit


def bind_another(world):
    """Copy on a thread that was not bound."""
    return on_a_thread(world.gather)


TRIGGERS = {
    "bind_thread": bind_another,
    "is_capturing": lambda world: world.device.lease(),
    "current_stream": lambda world: world.device.lease(),
    "wait": lambda world: world.device.lease(world.event()),
    "copy": lambda world: world.gather(),
    "record": lambda world: world.scatter(),
    "make_event": lambda world: world.gather(),
    "is_done": lambda world: world.device.lease(),
    "synchronize": lambda world: world.device.synchronize(),
    "pin": lambda world: world.device.pin(np.zeros((4, 4), np.uint8)),
}
"""What makes the device call each verb."""
SUBMITTED = {"copy", "record", "make_event"}
"""Verbs at whose failure a copy may be under way."""


def check_failed(world, match="failed as planned"):
    """See that nothing is done any more, nothing passes, and nothing is given back."""
    ran = len(world.hardware.executed)
    for refused in (
        world.device.lease,
        lambda: world.device.lease(world.driver.make_event),
        world.gather,
        world.scatter,
        world.device.synchronize,
        lambda: world.device.pin(np.zeros((4, 4), np.uint8)),
    ):
        with pytest.raises(DeviceFailedError, match=match):
            refused()
    world.device.close()
    world.device.close()
    world.hardware.drain()
    assert ran == len(world.hardware.executed)
    assert 0 == world.driver.calls["unpin"]
    assert [world.pool.ctypes.data] == list(world.driver.pins)
    world.check_closed()


class TestForGood:
    @BOTH
    @pytest.mark.parametrize("verb", TRIGGERS)
    def test_failure_at_any_verb_fails_all_that_follows(self, verb, semantics):
        """C6 rule 10: a failure of the runtime stays: what was pending fails, each later
        call raises, no memory is unpinned and ``close`` ends."""
        world = World(make_driver(semantics, pace=STILL))
        world.write()
        fences, called = [world.device.lease(world.event()), world.gather()], []
        for fence in fences:
            fence.call_when_over(lambda: called.append(1))
        world.driver.fail_at(verb, 1)
        try:
            late = TRIGGERS[verb](world)
        except DeviceFailedError:
            assert verb not in SUBMITTED
        else:
            assert late is not None
            fences.append(late)
        for fence in fences:
            with pytest.raises(DeviceFailedError, match=f"{verb} failed as planned"):
                fence.wait(TIMEOUT)
            with pytest.raises(DeviceFailedError, match=f"{verb} failed as planned"):
                fence.is_done()
        check_failed(world)
        assert [1, 1] == called

    @BOTH
    def test_event_that_a_failed_device_cannot_record_is_no_fence(self, semantics):
        """X-07: a lease whose record fails raises and leaves neither a loan nor an event
        of ours, also when the device is gone with it."""
        world = World(make_driver(semantics, driver=NotingDriver, pace=STILL))
        event = world.event()
        world.driver.fail_at("record", 1)
        with pytest.raises(DeviceError, match="no event could be recorded"):
            world.device.lease(event)
        gc.collect()
        assert 0 == len(world.driver.made)
        check_failed(world)

    @pytest.mark.parametrize("move", [World.gather, World.scatter])
    def test_copy_that_failed_half_way_is_a_fence_that_fails(self, move):
        """C6 rules 9 and 10: after half of a copy was submitted nothing is raised, since
        the caller would give blocks and slots back under the other half; the fence
        fails instead, and the memory stays pinned while the half still moves."""
        world = World(make_driver(driver=HalfDriver, pace=STILL))
        world.pool[:] = NEW
        fence = move(world)
        assert fence.call_when_over(lambda: None)
        for asked in (fence.is_done, lambda: fence.wait(TIMEOUT)):
            with pytest.raises(DeviceFailedError, match="half is submitted"):
                asked()
        with pytest.raises(DeviceFailedError, match="half is submitted"):
            world.device.lease()
        world.device.close()
        assert [world.pool.ctypes.data] == list(world.driver.pins)
        world.hardware.drain()
        moved = world.saved() if move is World.gather else world.loaded()
        assert {OLD, NEW} == moved
        world.check_closed()

    def test_copy_behind_which_memory_is_short_is_a_fence_that_fails(self):
        """C6 rule 9: whatever is raised behind a copy, that is under way: nothing is given
        back, nor its memory unpinned."""
        world = World(make_driver(driver=PoorDriver, pace=STILL))
        fence = world.gather()
        with pytest.raises(DeviceFailedError, match="MemoryError"):
            fence.is_done()
        world.device.close()
        assert [world.pool.ctypes.data] == list(world.driver.pins)
        world.hardware.drain()
        world.check_closed()

    def test_call_back_of_a_failed_copy_comes_at_once(self):
        """A fence that fails from its start calls back before the call returns."""
        world = World(make_driver())
        world.driver.fail_at("copy", 1)
        called = []
        assert world.gather().call_when_over(lambda: called.append(1))
        assert [1] == called
        check_failed(world)

    def test_failure_on_one_thread_is_known_to_all(self):
        """What a copy thread has found out the engine's thread is told with its next
        call, which does not ask the runtime."""
        world = World(make_driver())
        assert world.device.lease().wait(TIMEOUT)  # the poller has nothing to do
        world.driver.fail_at("copy", 1)
        on_a_thread(world.gather)
        before = world.driver.calls.copy()
        with pytest.raises(DeviceFailedError, match="copy failed as planned"):
            world.device.lease()
        assert before == world.driver.calls
        check_failed(world)

    def test_failure_reaches_fences_that_are_not_asked_for(self):
        """What fails at a copy fails the fences of leases too, which may never pass."""
        world = World(make_driver(pace=STILL))
        fence = world.device.lease()
        world.driver.fail_at("copy", 1)
        world.gather()
        with pytest.raises(DeviceFailedError, match="copy failed as planned"):
            fence.is_done()
        check_failed(world, match="copy failed as planned")

    def test_first_failure_is_the_one_that_is_told(self):
        """When two calls fail at once, all are told of the one that failed first."""
        fences = []

        def fail_twice(world, simulation):
            world.driver.sleep = simulation.sleep
            save = simulation.threads.thread(
                lambda: fences.append(world.gather()), "save"
            )
            save.start()
            simulation.sleep(0.5)
            fences.append(world.scatter())
            save.join()
            for fence in fences:
                with pytest.raises(DeviceFailedError, match="the first"):
                    fence.is_done()
            check_failed(world, match="the first")

        simulated(fail_twice, driver=SlowDriver, close=False)
        assert 2 == len(fences)

    def test_device_whose_streams_cannot_be_made_is_refused(self):
        """A device that fails while it is registered raises, and closes."""
        driver = make_driver()
        engine = Engine(World(make_driver()).engine.arrangement, driver.allocate)
        driver.fail_at("make_stream", 2)
        device = AcceleratorDevice(driver)
        with pytest.raises(DeviceFailedError, match="make_stream failed"):
            device.register(engine.layout, engine.kv_caches)
        device.close()
        driver.close()
        assert [] == driver.hardware.violations

    def test_thread_that_dies_is_a_failed_device(self):
        """Without the poller's thread nobody can tell when fences pass: that is failure."""

        def die(world, simulation):
            with pytest.raises(DeviceFailedError, match="poller has ended"):
                world.device.lease().wait(TIMEOUT)
            world.hardware.drain()
            check_failed(world, match="poller has ended")

        simulated(die, driver=DyingDriver, close=False)

    @BOTH
    @pytest.mark.slow
    def test_failure_at_any_moment_leaves_nobody_waiting(self, semantics):
        """C6 rule 10: wherever a run of leases and copies on several threads is hit, each
        fence passes with the right bytes or fails, and ``close`` ends."""
        ends = set()
        for seed in range(12):
            simulated(
                lambda *given: ends.add(hit(*given)),
                semantics,
                seed,
                lines=LINES,
                close=False,
            )
        assert {"passed", "failed"} <= ends


def hit(world, simulation):
    """Copy on two threads while the device fails; return how the last fence ended."""
    dice = simulation.dice
    verb = dice.choice(["is_done", "copy", "record", "wait", "is_capturing", "none"])
    world.driver.fail_at(verb, dice.randrange(1, 8))
    world.write()
    ends = []

    def copy():
        for _ in range(3):
            try:
                assert world.gather().wait(TIMEOUT)
            except DeviceFailedError:
                ends.append("failed")
                return
            assert {NEW} == world.saved()
            ends.append("passed")

    try:
        assert world.device.lease(world.event()).wait(TIMEOUT)
    except DeviceError:
        ends.append("failed")
    else:
        threads = [simulation.threads.thread(copy, "copy") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    world.device.close()
    world.check_closed()
    return ends[-1]


class TestForOnce:
    @BOTH
    @pytest.mark.parametrize("verb", ["record", "make_event"])
    def test_copy_without_an_event_is_waited_for(self, verb, semantics):
        """S0-23: when no event is to be had behind a copy that was submitted, the device
        is synchronized instead, once, and the fence has passed; the device goes on."""
        for seed in range(5):
            with running(semantics, seed, pace=STILL) as world:
                world.driver.fail_at(verb, 1, stays=False)
                fence = world.gather()
                assert fence.is_done()
                assert {OLD} == world.saved()
                assert 1 == world.driver.calls["synchronize"]
                again = world.gather()
                world.hardware.drain()
                assert again.wait(TIMEOUT)
                assert 1 == world.driver.calls["synchronize"]

    @BOTH
    @pytest.mark.parametrize("verb", ["record", "make_event"])
    def test_lease_without_an_event_is_no_failure(self, verb, semantics):
        """S0-23, X-07: a lease for which no event is to be had raises, keeps no event,
        and the next one is as good as ever; so are the fences before it."""
        with running(semantics, driver=NotingDriver) as world:
            before = world.device.lease()
            assert before.wait(TIMEOUT)
            world.device.events._free.clear()
            gc.collect()
            known = len(world.driver.made)
            world.driver.fail_at(verb, 1, stays=False)
            with pytest.raises(DeviceError, match=f"{verb} failed") as raised:
                world.device.lease()
            assert not isinstance(raised.value, DeviceFailedError)
            del raised
            gc.collect()
            assert known == len(world.driver.made)
            assert world.device.lease().wait(TIMEOUT)
            assert before.is_done()
            assert 0 == world.driver.calls["synchronize"]


class TestOrder:
    def test_nothing_is_leased_before_register(self):
        """Before the engine's memory is known every lease is refused."""
        device = AcceleratorDevice(make_driver())
        for verb in (device.lease, device.synchronize):
            with pytest.raises(DeviceError, match="registered"):
                verb()
