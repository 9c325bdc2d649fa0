# SPDX-License-Identifier: Apache-2.0
"""Steps in the order of either model runner, and steps that end otherwise."""

import contextlib
import functools
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.integration.vllm.test_worker import KEYSPACE, an_order, step, working
from tests.rig import LAYERS
from ucm.blocks import Owner
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.modes import DIRECT, Facts, Mode, choose_mode
from ucm.integration.vllm.worker import WorkerHalf
from ucm.pipeline.guard import BlockGuard
from ucm.reasons import Reason
from ucm.scheduler.messages import (
    Deferral,
    StepPlan,
    StepReport,
    TransferKind,
    decode_report,
    encode,
)
from ucm.testing.faults import Fault, FaultPlan, Gate
from ucm.tracing import SOURCE_RELEASED

LAYERWISE = choose_mode(Facts(use_layerwise=True, overlapping_batches=True))
SAVE = an_order(1, TransferKind.SAVE, range(1, 5))
LOAD = an_order(2, TransferKind.LOAD, range(10, 14), "s")
SECOND = {"overwrites_first": True, "confirms": True}
"""The second runner, with a model whose blocks it clears."""


def enveloped(plan: StepPlan) -> PlanEnvelope:
    """Return a plan as the engine hands it out."""
    return PlanEnvelope(encode(replace(plan, keyspace_digest=KEYSPACE.digest)))


def told(half: WorkerHalf) -> StepReport:
    """Wait until all is settled and return the report of it."""
    assert half._runtime.flush(60.0)
    envelope = half.report()
    assert envelope is not None
    return decode_report(envelope.payloads[0])


def reasons(half: WorkerHalf) -> set[str]:
    """Return why saved blocks were settled as they were."""
    total = half._counters.total
    known = ("", "overwritten", "recycled", "unsubmitted", "unfinished", "deadline")
    return {
        reason
        for reason in (*known, Reason.UNCONFIRMED)
        if total("ucm_settled_parts_total", direction="save", reason=reason)
    }


class TestOverwrittenFirst:
    def test_copy_that_ended_unseen_is_torn_by_what_was_overwritten_before(self):
        """R-01: on a runner that clears blocks before it says so, a save whose copy ended
        since the engine last looked may have read zeroes: it is never stored."""
        gather, released = Gate(), Gate()
        released.open()
        plan = FaultPlan(Fault("reserve", gather))
        with working(plan, {SOURCE_RELEASED: released}, **SECOND) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gather.open()
            released.wait_reached()  # the engine's thread has not looked since
            step(half, StepPlan(step=2, overwritten=(1,)))
            report = told(half)
            assert ((), (1,)) == (report.settled_saves, report.unstored_saves)
            assert {"overwritten"} == reasons(half)

    def test_copy_under_way_is_torn_and_not_waited_for(self):
        """R-01: waiting for a copy does not mend what it has read; the step goes on."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate))
        config: dict[str, object] = {"timeout": {"fence": 3600.0}}
        with working(plan, config=config, **SECOND) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            step(half, StepPlan(step=2, overwritten=(1,)))
            gate.open()
            assert (1,) == told(half).unstored_saves

    def test_copy_that_was_seen_to_end_is_stored(self):
        """R-01: what the engine overwrites after it has seen a copy end harms nothing."""
        released = Gate()
        released.open()
        with working(at_event={SOURCE_RELEASED: released}, **SECOND) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            released.wait_reached()
            step(half, StepPlan(step=2))
            step(half, StepPlan(step=3, overwritten=(1,)))
            assert half._runtime.flush(60.0)
            assert {""} == reasons(half)

    def test_nothing_is_stored_before_the_engine_has_looked(self):
        """R-01: a save that nobody confirms ends at its deadline, as a miss."""
        released = Gate()
        released.open()
        config: dict[str, object] = {"timeout": {"save": 0.2}}
        at_event = {SOURCE_RELEASED: released}
        with working(at_event=at_event, config=config, **SECOND) as half:
            envelope = enveloped(StepPlan(step=1, saves=(SAVE,)))
            half.bind(envelope)
            half.submit_saves()
            released.wait_reached()
            assert half._runtime.flush(60.0)
            assert {"deadline"} == reasons(half)

    def test_unconfirmed_saves_are_dropped_when_the_engine_closes(self):
        """R-01: an engine that ends in the middle of a step names nothing any more."""
        released = Gate()
        released.open()
        with working(at_event={SOURCE_RELEASED: released}, **SECOND) as half:
            envelope = enveloped(StepPlan(step=1, saves=(SAVE,)))
            half.bind(envelope)
            half.submit_saves()
            released.wait_reached()
            half.close()
            assert {Reason.UNCONFIRMED} == reasons(half)

    def test_first_runner_waits_for_what_it_will_overwrite(self):
        """R-01: before anything is overwritten a wait is enough, and the save is kept."""
        with working() as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            step(half, StepPlan(step=2, overwritten=(1,)))
            assert half._runtime.flush(60.0)
            assert {""} == reasons(half)


class TestShared:
    @pytest.mark.parametrize("named_as", ["fences", "overwritten"])
    @pytest.mark.parametrize("runner", [{}, SECOND], ids=["first", "second"])
    def test_request_loses_its_blocks_of_a_save_alone(
        self, runner: dict[str, bool], named_as: str
    ):
        """A save of two requests, of which one is preempted while nothing was copied,
        stores what the other has, on either runner."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate))
        config: dict[str, object] = {"timeout": {"fence": 0.01}}
        shared = replace(SAVE, owners=(Owner("r", 1, 1), Owner("s", 1, 3)))
        with working(plan, config=config, **runner) as half:
            step(half, StepPlan(step=1, saves=(shared,)))
            gate.wait_reached()
            named = {named_as: (1,)}
            step(half, StepPlan(step=2, lost={1: (0,)}, **named))
            gate.open()
            if runner:
                half._runtime._recorder._mailbox.wait(60.0)
                step(half, StepPlan(step=3))  # confirms
            assert {1: 3} == told(half).new_blocks
            total = functools.partial(
                half._counters.total, "ucm_settled_parts_total", direction="save"
            )
            assert (3, 1) == (total(outcome="committed"), total(outcome="cancelled"))


@pytest.mark.parametrize("mode", [DIRECT, LAYERWISE], ids=lambda mode: mode.name)
class TestUnsubmitted:
    def test_plan_that_was_never_bound_is_settled_by_the_next(self, mode: Mode):
        """R-02: blocks are released and the load has failed, though nobody asked for any
        of it; what waits for its blocks is told."""
        deferral = Deferral(request_id="q", generation=3)
        plan = StepPlan(step=1, saves=(SAVE,), loads=(LOAD,), deferred=(deferral,))
        with working(mode=mode) as half:
            half.fence(enveloped(plan))
            sent, received, failed = step(half, StepPlan(step=2))
            assert ({"q"}, {"s"}, {"s"}) == (sent, received, failed)
            report = told(half)
            assert ((1,), (1,)) == (report.released, report.unstored_saves)
            assert (2,) == report.loads_done
            assert [("unsubmitted", b"")] == [
                (one.reason, one.bad_hash) for one in report.failures
            ]
            assert {"unsubmitted"} == reasons(half)
            assert {0} == set(half.counts().values())

    def test_stage_that_is_asked_for_results_only_saves_with_the_next_step(
        self, mode: Mode
    ):
        """R-02: with speculation, stages before the last are never asked for their saves;
        what they wrote is stored all the same."""
        with working(mode=mode) as half:
            envelope = enveloped(StepPlan(step=1, saves=(SAVE,)))
            half.fence(envelope)
            half.bind(envelope)
            for layer in LAYERS[:-1]:
                half.layer_saved(layer, None)
            half.start_loads()
            half.finished()
            step(half, StepPlan(step=2, fences=(1,)))
            assert half._runtime.flush(60.0)
            assert {""} == reasons(half)
            step(half, StepPlan(step=3))
            assert {0} == set(half.counts().values())

    def test_late_saves_are_dropped_where_blocks_are_overwritten_first(
        self, mode: Mode
    ):
        """R-02: when the next step is heard of, it has overwritten blocks already."""
        with working(mode=mode, overwrites_first=True) as half:
            half.bind(enveloped(StepPlan(step=1, saves=(SAVE,))))
            half.finished()
            step(half, StepPlan(step=2))
            report = told(half)
            assert ((), (1,)) == (report.settled_saves, report.unstored_saves)
            assert {"unsubmitted"} == reasons(half)

    def test_forward_pass_that_raised_saves_nothing(self, mode: Mode):
        """R-02: the engine asks for results and saves while it handles the error; what
        the pass has written is not known."""
        with working(mode=mode) as half:
            envelope = enveloped(StepPlan(step=1, saves=(SAVE,)))
            with contextlib.suppress(ZeroDivisionError), forward_pass(half, envelope):
                raise ZeroDivisionError
            step(half, StepPlan(step=2))
            report = told(half)
            assert ((), (1,)) == (report.settled_saves, report.unstored_saves)

    def test_application_that_handles_an_error_saves_as_any_other(self, mode: Mode):
        """An engine that serves within an ``except`` block finds that block's error
        wherever it asks; its own forward passes have raised nothing."""
        with working(mode=mode) as half:
            try:
                raise ImportError("a library that the application can do without")
            except ImportError:
                with forward_pass(half, enveloped(StepPlan(step=1, saves=(SAVE,)))):
                    pass
                assert half._runtime.flush(60.0)
                assert {""} == reasons(half)
                step(half, StepPlan(step=2))

    def test_request_deferred_with_its_last_save_is_kept_until_that_is_read(
        self, mode: Mode
    ):
        """A plan may save the blocks of a request that it defers; an engine that asks for
        results before it asks for saves does not get them back unread."""
        deferral = Deferral(request_id="r", generation=1)
        envelope = enveloped(StepPlan(step=1, saves=(SAVE,), deferred=(deferral,)))
        with working(mode=mode) as half:
            half.fence(envelope)
            half.bind(envelope)
            assert (set(), set(), set()) == half.finished()
            half.submit_saves()
            assert half._runtime.flush(60.0)
            assert {"r"} == half.finished()[0]
            assert {""} == reasons(half)
            half.clear()
            assert {0} == set(half.counts().values())

    def test_request_is_freed_in_a_step_without_saves(self, mode: Mode):
        """R-02: engines that ask for no saves where nothing is computed are told which
        blocks are free all the same."""
        plan = StepPlan(
            step=1, is_idle=True, deferred=(Deferral(request_id="q", generation=3),)
        )
        with working(mode=mode) as half:
            half.bind(enveloped(plan))
            assert {"q"} == half.finished()[0]


@contextlib.contextmanager
def forward_pass(half: WorkerHalf, envelope: PlanEnvelope) -> Iterator[None]:
    """Call the hooks around a forward pass as ``KVConnectorModelRunnerMixin`` does."""
    half.bind(envelope)
    try:
        yield
    finally:
        half.start_loads()
        half.submit_saves()
        half.finished()
        half.clear()


class TestIdle:
    @pytest.mark.parametrize("is_idle", [False, True])
    def test_only_a_step_that_computes_nothing_waits_for_news(self, is_idle: bool):
        """R-02: whether a step computes is told by the plan: the second runner asks for
        results when nothing says so any more."""
        gate, waits = Gate(), []
        with working(FaultPlan(Fault("reserve", gate))) as half:
            step(half, StepPlan(step=1, saves=(SAVE,)))
            gate.wait_reached()
            half._runtime.wait_for_notice = waits.append
            deferral = Deferral(request_id="r", generation=1)
            step(half, StepPlan(step=2, is_idle=is_idle, deferred=(deferral,)))
            assert is_idle == bool(waits)
            gate.open()


class TestCost:
    def calls_in(self, half: WorkerHalf, number: int) -> int:
        """Return how many functions an empty step calls on the engine's thread."""
        count = 0

        def note(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event == "call"

        envelope = enveloped(StepPlan(step=number))
        sys.setprofile(note)
        try:
            half.fence(envelope)
            half.bind(envelope)
            half.start_loads()
            half.submit_saves()
            half.finished()
            half.report()
            half.clear()
        finally:
            sys.setprofile(None)
        return count

    def test_empty_step_does_as_much_beside_many_requests_as_beside_none(self):
        """R-18: what waits to be saved or loaded for others costs a step nothing."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate))
        orders = [
            an_order(number, TransferKind.SAVE, range(1, 5), f"request-{number}")
            for number in range(1, 51)
        ]
        with working(plan) as half:
            self.calls_in(half, 1)  # tells its first report
            alone = self.calls_in(half, 2)
            step(half, StepPlan(step=3, saves=tuple(orders)))
            gate.wait_reached()
            half._runtime._take_in()
            step(half, StepPlan(step=4))
            assert 50 == half.counts()["open"]
            assert alone == self.calls_in(half, 5) <= 70
            gate.open()

    def test_ticket_of_many_requests_is_submitted_and_told_once(self):
        """Twelve decoded blocks are one ticket: one wake-up, one release, one end."""
        owners = tuple(Owner(f"request-{at}", 1, 1) for at in range(12))
        shared = replace(an_order(1, TransferKind.SAVE, range(1, 13)), owners=owners)
        with working() as half:
            woken, wake = [], half._runtime._loop._waker.wake
            half._runtime._loop._waker.wake = lambda: (woken.append(1), wake())
            step(half, StepPlan(step=1, saves=(shared,)))
            report = told(half)
            assert [1] == woken
            assert ((1,), (1,)) == (report.released, report.settled_saves)
            assert {1: 12} == report.new_blocks


class TestGuard:
    def test_confirmed_copy_cannot_be_torn(self):
        """R-01: between confirmation and commit a later overwrite changes nothing."""
        guard = BlockGuard(lambda: None)
        guard.begin()
        guard.end()
        guard.is_confirmed = True
        guard.tear("overwritten")
        assert ("", True) == (guard.torn, guard.is_released)
