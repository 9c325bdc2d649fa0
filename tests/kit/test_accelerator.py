# SPDX-License-Identifier: Apache-2.0
"""The simulated accelerator: late, adversarial, repeatable."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.accelerator import SimEvent
from tests.kit.accelerator_kit import (
    BOTH,
    NEW,
    NUM_PAGES,
    OLD,
    Pages,
    kinds,
    make_driver,
)
from tests.kit.accelerator_ops import Misuse, MisuseError
from tests.kit.accelerator_streams import CUDA, NPU, Bias
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch


def race(seed, *, waits, semantics=CUDA, bias=None):
    """Copy pages beside the kernel that writes them; return what the host got."""
    driver = make_driver(seed, semantics=semantics, bias=bias)
    pages, event = Pages(driver), SimEvent(driver.hardware)
    compute, ours = driver.current_stream(), driver.make_stream()
    driver.launch(compute, pages.write)
    event.record(compute)
    if waits:
        driver.wait(ours, event)
    pages.gather(ours)
    driver.synchronize()
    assert [] == driver.hardware.violations
    return pages.found()


def program(seed, **options):
    """Run kernels, copies and events on three streams; return what ran in which order."""
    driver = make_driver(seed, **options)
    pages, event = Pages(driver), driver.make_event()
    streams = [driver.make_stream() for _ in range(3)]
    for number in range(12):
        driver.launch(streams[number % 3], pages.write)
    driver.record(event, streams[0])
    driver.wait(streams[1], event)
    pages.gather(streams[1])
    while not driver.is_done(event):
        pass
    driver.hardware.drain()
    return tuple(driver.hardware.executed)


class TestOrder:
    @BOTH
    def test_same_seed_runs_in_the_same_order(self, semantics):
        """The same calls under the same seed execute the same steps in one order."""
        for seed in range(10):
            once, again = (program(seed, semantics=semantics) for _ in range(2))
            assert once == again

    def test_seeds_differ(self):
        """Other seeds execute the same steps in other orders."""
        runs = {program(seed) for seed in range(20)}
        assert 15 < len(runs)
        assert 1 == len({tuple(sorted(run)) for run in runs})

    def test_nothing_runs_at_submission(self):
        """Kernels, copies and records wait until somebody lets the hardware run."""
        driver = make_driver()
        pages, stream = Pages(driver), driver.current_stream()
        driver.launch(stream, pages.write)
        pages.gather(stream)
        driver.record(driver.make_event(), stream)
        assert [] == driver.hardware.executed
        assert {0} == pages.found()
        assert 2 == driver.hardware.run(2)
        assert 2 == len(driver.hardware.executed)
        driver.hardware.drain()
        assert {NEW} == pages.found()
        assert 0 == driver.hardware.run(1)

    @given(data=st.data(), seed=st.integers(0, 2**16), bias=st.sampled_from(Bias))
    @settings(max_examples=40, deadline=None)
    def test_what_is_behind_something_runs_behind_it(self, data, seed, bias):
        """Each kernel runs behind its stream's earlier ones and behind what these wait for."""
        semantics = data.draw(st.sampled_from([CUDA, NPU]))
        driver = make_driver(seed, semantics=semantics, bias=bias)
        streams = [driver.make_stream() for _ in range(3)]
        events = [driver.make_event() for _ in range(3)]
        behind = [frozenset() for _ in streams]
        recorded, ran, expected = {}, [], {}
        lanes, verbs = st.integers(0, 2), st.sampled_from("klrw?")
        for number in range(data.draw(st.integers(1, 30))):
            verb, at, which = data.draw(st.tuples(verbs, lanes, lanes))
            if verb in "kl":
                expected[number] = behind[at]
                behind[at] |= {number}
                driver.launch(streams[at], lambda number=number: ran.append(number))
            elif verb == "r" and (semantics is CUDA or which not in recorded):
                recorded[which] = behind[at]
                driver.record(events[which], streams[at])
            elif verb == "w":
                behind[at] |= recorded.get(which, frozenset())
                driver.wait(streams[at], events[which])
            else:
                driver.is_done(events[which])
        driver.synchronize()
        assert sorted(expected) == sorted(ran)
        for number, before in expected.items():
            assert before <= set(ran[: ran.index(number)])

    def test_synchronize_runs_what_was_there_at_the_call(self):
        """All that was submitted has run; what a kernel submits meanwhile may wait."""
        driver = make_driver()
        ran, other = [], driver.make_stream()
        stream = driver.current_stream()
        driver.launch(stream, lambda: driver.launch(other, lambda: ran.append("late")))
        driver.launch(stream, lambda: ran.append("early"))
        driver.synchronize()
        assert ["early"] == ran
        assert 1 == len(driver.hardware.pending(0))


class TestCopies:
    @BOTH
    def test_copy_that_does_not_wait_reads_wrong_bytes(self, semantics):
        """Without the wait some seeds read old pages, some new ones, some of each."""
        runs = [race(seed, waits=False, semantics=semantics) for seed in range(60)]
        assert {OLD} in runs
        assert {NEW} in runs
        assert {OLD, NEW} in runs

    @BOTH
    def test_copy_that_waits_reads_right_bytes(self, semantics):
        """With the wait each seed reads the kernel's bytes."""
        for seed in range(60):
            assert {NEW} == race(seed, waits=True, semantics=semantics)

    @pytest.mark.parametrize(
        ("bias", "found"), [(Bias.COPIES_FIRST, OLD), (Bias.KERNELS_FIRST, NEW)]
    )
    def test_bias_decides_the_race(self, bias, found):
        """Copies come as early or as late as they may, whatever the seed."""
        for seed in range(10):
            assert {found} == race(seed, waits=False, bias=bias)

    def test_starved_stream_comes_last(self):
        """A stream that is starved gets on only when nobody else can."""
        lasts = set()
        for seed in range(10):
            driver = make_driver(seed, bias=Bias.STARVE_ONE)
            streams = [driver.make_stream() for _ in range(2)]
            for stream in streams * 5:
                driver.launch(stream, lambda: None)
            driver.hardware.drain()
            names = [name for name, _ in driver.hardware.executed]
            assert 1 == len(set(names[:5])) == len(set(names[5:]))
            lasts.add(names[-1])
        assert {stream.name for stream in streams} == lasts

    def test_copies_of_a_batch_have_no_order(self):
        """Which copy of a batch comes first is drawn."""
        firsts = set()
        for seed in range(30):
            driver = make_driver(seed)
            Pages(driver).gather(driver.current_stream())
            driver.hardware.run(1)
            firsts.add(driver.hardware.executed[0][1])
        assert NUM_PAGES // 2 < len(firsts)

    def test_unpinned_copy_is_over_when_the_call_returns(self):
        """A copy with memory that is not pinned runs its stream up to it."""
        driver = make_driver(bias=Bias.COPIES_FIRST)
        pages, event = Pages(driver, is_pinned=False), SimEvent(driver.hardware)
        ours = driver.make_stream()
        driver.launch(driver.current_stream(), pages.write)
        event.record(driver.current_stream())
        driver.wait(ours, event)
        pages.gather(ours)
        assert {NEW} == pages.found()

    def test_copy_goes_both_ways_and_keeps_the_addresses(self):
        """Bytes arrive on the device although the batch was overwritten meanwhile."""
        driver = make_driver()
        pages = Pages(driver)
        pages.host[:] = np.arange(NUM_PAGES)[:, None]
        batch = pages.batch(Direction.TO_DEVICE)
        stream = driver.current_stream()
        driver.copy(batch, Direction.TO_DEVICE, stream, is_pinned=True)
        for part in (batch.sources, batch.targets, batch.nbytes):
            part[:] = 0
        driver.synchronize()
        np.testing.assert_array_equal(pages.host.ravel(), pages.device.numpy())

    def test_submitted_batches_can_be_looked_at(self):
        """A test sees each call's addresses, direction and pinning (S2-02)."""
        driver = make_driver()
        pages = Pages(driver)
        pages.gather(driver.current_stream())
        (copy,) = driver.copies
        np.testing.assert_array_equal(pages.batch().sources, copy.batch.sources)
        assert (Direction.TO_HOST, True) == (copy.direction, copy.is_pinned)
        assert 1 == driver.calls["copy"]

    def test_empty_batch_is_nothing(self):
        """A batch without copies leaves nothing in the stream."""
        driver = make_driver()
        none = np.empty(0, np.int64)
        driver.copy(
            CopyBatch(none, none, none),
            Direction.TO_HOST,
            driver.current_stream(),
            is_pinned=False,
        )
        assert [] == driver.hardware.pending(0)
        driver.close()


class TestEvents:
    @BOTH
    def test_unrecorded_event_passes_at_once(self, semantics):
        """Without a record there is no handle, and nobody waits (S0-19, S0-24)."""
        driver = make_driver(semantics=semantics)
        event, stream = SimEvent(driver.hardware), driver.make_stream()
        driver.launch(driver.current_stream(), lambda: None)
        assert (0, None) == (driver.handle(event), driver.device_index(event))
        assert event.query()
        event.synchronize()
        event.wait(stream)
        assert not stream.ops
        assert [] == driver.hardware.executed

    @BOTH
    def test_event_passes_behind_its_record(self, semantics):
        """It is not done before the kernel in front of the record has run."""
        driver = make_driver(semantics=semantics, pace=(0,))
        ran, stream = [], driver.current_stream()
        event = driver.make_event()
        driver.launch(stream, lambda: ran.append(1))
        driver.record(event, stream)
        assert 0 < driver.handle(event)
        assert 0 == driver.device_index(event)
        assert not driver.is_done(event)
        driver.hardware.run(1)
        assert [1] == ran
        assert not driver.is_done(event)
        driver.hardware.run(1)
        assert driver.is_done(event)

    def test_polling_lets_the_hardware_get_on(self):
        """Asking often enough is enough."""
        driver = make_driver()
        event, stream = driver.make_event(), driver.current_stream()
        for _ in range(20):
            driver.launch(stream, lambda: None)
        driver.record(event, stream)
        polls = 1
        while not driver.is_done(event):
            polls += 1
        assert 1 < polls == driver.calls["is_done"] < 100

    @BOTH
    def test_record_after_a_wait_delays_who_looks_late(self, semantics):
        """A wait is for the record at the call, or for the latest there is (S0-25)."""
        orders = set()
        for seed in range(30):
            driver = make_driver(seed, semantics=semantics)
            ran, event = [], SimEvent(driver.hardware)
            compute, ours = driver.current_stream(), driver.make_stream()
            event.record(compute)
            driver.wait(ours, event)
            driver.launch(ours, lambda ran=ran: ran.append("ours"))
            driver.launch(compute, lambda ran=ran: ran.append("engine's"))
            event.record(compute)
            driver.hardware.drain()
            orders.add(tuple(ran))
        assert ("engine's", "ours") in orders
        assert driver.captures_waits == (("ours", "engine's") in orders)

    def test_recorded_again_an_event_has_not_passed(self):
        """A poll is answered for the latest record."""
        driver = make_driver(pace=(0,))
        event, stream = driver.make_event(), driver.current_stream()
        driver.record(event, stream)
        driver.hardware.drain()
        assert driver.is_done(event)
        driver.record(event, stream)
        assert not driver.is_done(event)
        event.synchronize()
        assert driver.is_done(event)

    def test_circle_is_found(self):
        """An event recorded again behind its own waiter hangs where waits look late."""
        driver = make_driver(semantics=NPU)
        event, other = driver.make_event(), driver.make_stream()
        driver.record(event, driver.current_stream())
        driver.wait(other, event)
        driver.record(event, other)
        driver.hardware.pace = (1,)
        uses = (
            driver.synchronize,
            driver.hardware.drain,
            lambda: [driver.is_done(event) for _ in range(3)],
        )
        for use in uses:
            with pytest.raises(MisuseError, match="nothing can go on"):
                use()
        assert {Misuse.DEADLOCK} == kinds(driver)

    def test_native_event_lives_as_long_as_its_owner(self):
        """It is alive while anybody holds the object, and dead after that (S0-18)."""
        driver = make_driver()
        event = SimEvent(driver.hardware)
        event.record()
        handle, kept, gone = driver.handle(event), [event], weakref.ref(event)
        del event
        gc.collect()
        assert {handle} == driver.hardware.live_events
        kept.clear()
        assert gone() is None
        assert set() == driver.hardware.live_events

    def test_destroyed_event_is_not_used(self):
        """Every use of an event that its owner destroyed is found, also a second end."""
        driver = make_driver()
        event = SimEvent(driver.hardware)
        event.record()
        event.destroy()
        uses = (event.query, event.record, event.wait, event.synchronize, event.destroy)
        for use in uses:
            with pytest.raises(MisuseError, match="destroyed"):
                use()
        assert len(uses) == len(driver.hardware.violations)
        assert set() == driver.hardware.live_events

    @BOTH
    def test_event_dropped_under_a_wait_matters_to_who_looks_late(self, semantics):
        """Where waits are not captured, the event must outlive its waiters."""
        driver = make_driver(semantics=semantics)
        event, ours = SimEvent(driver.hardware), driver.make_stream()
        event.record()
        driver.wait(ours, event)
        del event
        driver.synchronize()
        assert (set() if semantics is CUDA else {Misuse.DESTROYED_EVENT}) == kinds(
            driver
        )

    def test_uses_of_foreign_events_are_counted(self):
        """A test can say that a borrowed event was waited for and nothing else (S0-30)."""
        driver = make_driver()
        borrowed, ours = SimEvent(driver.hardware), driver.make_event()
        borrowed.record()
        stream = driver.make_stream()
        driver.wait(stream, borrowed)
        driver.record(ours, stream)
        driver.is_done(ours)
        assert {"record": 1, "wait": 1} == borrowed.uses
        assert {} == driver.foreign_uses
        driver.is_done(borrowed)
        driver.record(borrowed, stream)
        assert {"is_done": 1, "record": 1} == driver.foreign_uses
        assert {"record": 2, "wait": 1, "query": 1} == borrowed.uses

    def test_event_of_another_runtime_has_no_handle(self):
        """A driver says so of what is not an event of its runtime."""
        driver = make_driver(semantics=CUDA)
        for stranger in (
            object(),
            torch.Event(),
            SimEvent(make_driver(semantics=NPU).hardware),
        ):
            with pytest.raises(AttributeError, match="no event"):
                driver.handle(stranger)
