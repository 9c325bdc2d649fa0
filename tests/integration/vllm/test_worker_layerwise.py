# SPDX-License-Identifier: Apache-2.0
"""The worker's half row by row, and the same suite for both ways to save."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.integration.vllm.test_worker import (
    KEYSPACE,
    an_order,
    working,
    zeroed_memory,
)
from tests.rig import LAYERS
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.modes import Facts, Mode, choose_mode
from ucm.integration.vllm.worker import WorkerHalf
from ucm.scheduler.messages import (
    Deferral,
    StepPlan,
    TransferKind,
    decode_report,
    encode,
)
from ucm.testing.faults import Fault, FaultPlan, Gate

DIRECT = choose_mode(Facts())
LAYERWISE = choose_mode(Facts(use_layerwise=True))
SAVE, LOAD = TransferKind.SAVE, TransferKind.LOAD

Told = tuple[set[str], set[str], set[str]]


def forward(
    half: WorkerHalf, plan: StepPlan, in_layer: Callable[[str], None] = lambda _: None
) -> Told:
    """Call the hooks of one engine step with a forward pass, and return what is told."""
    envelope = PlanEnvelope(encode(replace(plan, keyspace_digest=KEYSPACE.digest)))
    half.fence(envelope)
    half.bind(envelope)
    half.start_loads()
    for layer in LAYERS:
        half.wait_for_layer(layer)
        in_layer(layer)
        half.layer_saved(layer, None)
    half.submit_saves()
    told = half.finished()
    half.clear()
    return told


@pytest.mark.parametrize("mode", [DIRECT, LAYERWISE], ids=lambda mode: mode.name)
class TestSaves:
    def test_deferred_request_is_told_when_its_saves_are_released(
        self, mode: Mode
    ) -> None:
        """S1-06: whole blocks and rows are tracked by one mechanism: the engine hears of
        a finished request when its copies are over, once."""
        gate = Gate()
        save = an_order(1, SAVE, range(1, 5))
        deferral = Deferral(request_id="r", generation=1)
        with working(FaultPlan(Fault("reserve", gate)), mode=mode) as half:
            forward(half, StepPlan(step=1, saves=(save,)))
            gate.wait_reached()
            told = forward(half, StepPlan(step=2, deferred=(deferral,)))
            assert (set(), set(), set()) == told
            assert 1 == half.counts()["reading"]
            gate.open()
            assert half._runtime.flush(60.0)
            assert ({"r"}, set(), set()) == forward(half, StepPlan(step=3))
            assert (set(), set(), set()) == forward(half, StepPlan(step=4))
            assert {0} == set(half.counts().values())

    def test_blocks_that_are_taken_back_are_fenced(self, mode: Mode) -> None:
        """S1-07, S1-08, S1-09: before blocks are overwritten, by a preemption or inside
        a request, the saves that read them are waited for, and dropped if they have not
        begun in time; other saves stay in flight."""
        gate = Gate()
        saves = (an_order(1, SAVE, range(1, 3)), an_order(2, SAVE, range(5, 7)))
        other = replace(
            saves[1],
            owners=(saves[1].owners[0]._replace(request_id="s"),),
            hashes=bytes(range(64)),
        )
        config: dict[str, object] = {"timeout": {"fence": 0.02}, "queue": {"window": 1}}
        plan = FaultPlan(Fault("reserve", gate))
        with working(plan, mode=mode, config=config) as half:
            forward(half, StepPlan(step=1, saves=(other, saves[0])))
            gate.wait_reached()
            forward(half, StepPlan(step=2, fences=(1,)))
            gate.open()
            assert half._runtime.flush(60.0)
            envelope = half.report()
            assert envelope is not None
            report = decode_report(envelope.payloads[0])
            assert ([1, 2], (1,), (2,)) == (
                sorted(report.released),
                report.unstored_saves,
                report.settled_saves,
            )

    def test_rank_whose_weights_were_written_moves_nothing(self, mode: Mode) -> None:
        """R-10: from the moment that its weights are written a rank stores and loads
        nothing, whole or by rows, until a plan has a new number; all of it ends."""
        memory = zeroed_memory()
        saves = [an_order(n, SAVE, range(1, 3)) for n in (1, 3)]
        load = an_order(2, LOAD, range(9, 11))
        with working(mode=mode, memory=memory) as half:
            forward(half, StepPlan(step=1, saves=(saves[0],)))
            assert half._runtime.flush(5.0)
            half._weights.written()
            memory[:, 9:11] = 7
            new = replace(saves[1], hashes=bytes(range(64)))
            forward(half, StepPlan(step=2, saves=(new,), loads=(load,)))
            assert half._runtime.flush(5.0)
            half.finished()
            report = half.report()
            assert report is not None
            told = decode_report(report.payloads[0])
            assert ((1,), (3,)) == (told.settled_saves, told.unstored_saves)
            assert ((1, 3), (2,)) == (tuple(sorted(told.released)), told.loads_done)
            assert "" == half._runtime.failure
            assert (memory[:, 9:11] == 7).all()
            again = replace(new, transfer_id=4)
            forward(half, StepPlan(step=3, epoch=1, saves=(again,)))
            assert half._runtime.flush(5.0)
            report = half.report()
            assert report is not None
            assert (4,) == decode_report(report.payloads[0]).settled_saves

    def test_what_is_saved_is_what_the_forward_pass_wrote(self, mode: Mode) -> None:
        """Each row has the bytes that its layer wrote in this step, both ways."""
        memory = zeroed_memory()

        def write(layer: str) -> None:
            row = LAYERS.index(layer)
            memory[row, 1:3] = row + 1

        save, load = an_order(1, SAVE, range(1, 3)), an_order(2, LOAD, range(9, 11))
        with working(mode=mode, memory=memory) as half:
            forward(half, StepPlan(step=1, saves=(save,)), write)
            assert half._runtime.flush(60.0)
            memory.zero_()
            forward(half, StepPlan(step=2, loads=(load,)))
            assert half._runtime.flush(60.0)
            assert [1, 2, 3] == [int(row[9:11].min()) for row in memory]


class TestRows:
    def test_rows_leave_while_the_forward_pass_runs(self) -> None:
        """A row is submitted by its layer: when the last one runs, the save of the first
        is under way."""
        save, begun = an_order(1, SAVE, range(1, 3)), []
        with working(mode=LAYERWISE) as half:

            def look(layer: str) -> None:
                begun.append(half.counts()["open"])

            forward(half, StepPlan(step=1, saves=(save,)), look)
            assert [0, 1, 1] == [min(count, 1) for count in begun]

    def test_hooks_may_be_called_twice_and_in_any_order(self) -> None:
        """S2-08, H-06: repeated hooks, results before the end of the saves and hooks
        behind it change nothing."""
        save = an_order(1, SAVE, range(1, 3))
        plan = StepPlan(step=1, saves=(save,), keyspace_digest=KEYSPACE.digest)
        envelope = PlanEnvelope(encode(plan))
        with working(mode=LAYERWISE) as half:
            half.bind(envelope)
            half.bind(envelope)
            for _ in range(2):
                half.layer_saved(LAYERS[0], None)
                half.finished()
            half.submit_saves()
            half.submit_saves()
            half.layer_saved(LAYERS[1], None)
            assert half._runtime.flush(60.0)
            report = half.report()
            assert report is not None
            assert (1,) == decode_report(report.payloads[0]).settled_saves

    def test_step_that_ended_in_an_error_leaves_nothing(self) -> None:
        """S1-15: a forward pass that raises never asks for the rest of its rows; the next
        step drops what it began and does not wait for it."""
        save = an_order(1, SAVE, range(1, 3))
        plan = StepPlan(step=1, saves=(save,), keyspace_digest=KEYSPACE.digest)
        with working(mode=LAYERWISE) as half:
            half.bind(PlanEnvelope(encode(plan)))
            half.layer_saved(LAYERS[0], None)
            half.clear()
            forward(half, StepPlan(step=2, fences=(1,)))
            assert half._runtime.flush(60.0)
            forward(half, StepPlan(step=3))
            report = half.report()
            assert report is not None
            told = decode_report(report.payloads[0])
            assert ((1,), (1,)) == (told.released, told.unstored_saves)
            assert {0} == set(half.counts().values())


class TestLoads:
    def test_layer_finds_its_row_and_the_request_is_not_told_as_received(self) -> None:
        """S3-04, S4-04: within the forward pass each layer finds its row; the request
        runs already, so that the engine must not hear of a load that is over."""
        memory, found = zeroed_memory(), []
        with working(mode=LAYERWISE, memory=memory) as half:

            def write(layer: str) -> None:
                memory[LAYERS.index(layer), 1:3] = LAYERS.index(layer) + 1

            def look(layer: str) -> None:
                found.append(int(memory[LAYERS.index(layer), 9:11].min()))

            forward(
                half, StepPlan(step=1, saves=(an_order(1, SAVE, range(1, 3)),)), write
            )
            assert half._runtime.flush(60.0)
            load = an_order(2, LOAD, range(9, 11))
            told = forward(half, StepPlan(step=2, loads=(load,)), look)
            assert [1, 2, 3] == found
            assert (set(), set(), set()) == told
            assert set() == half.bad_blocks()
            assert {0} == set(half.counts().values())

    def test_failed_load_is_told_by_all_its_blocks_in_the_same_step(self) -> None:
        """S4-13, S4-14, S3-09: whatever is known of a failure, the engine gets the
        blocks of the load from the order itself, in the step that computed with them,
        once."""
        load = an_order(1, LOAD, range(9, 11))
        with working(mode=LAYERWISE) as half:
            told = forward(half, StepPlan(step=1, loads=(load,)))
            assert (set(), set(), set()) == told
            assert {9, 10} == half.bad_blocks()
            assert set() == half.bad_blocks()
            report = half.report()
            assert report is not None
            failures = decode_report(report.payloads[0]).failures
            assert ["evicted"] == [failure.reason for failure in failures]

    def test_sibling_of_a_failed_load_blames_no_block(self) -> None:
        """Of a request's loads that end because one of them failed, only that one names
        a block: the others are good and found again."""
        save = an_order(1, SAVE, range(1, 3))
        good = an_order(2, LOAD, range(9, 11))
        bad = replace(an_order(3, LOAD, range(11, 12)), hashes=(99).to_bytes(32, "big"))
        with working(mode=LAYERWISE) as half:
            forward(half, StepPlan(step=1, saves=(save,)))
            assert half._runtime.flush(60.0)
            half.report()
            forward(half, StepPlan(step=2, loads=(good, bad)))
            assert 11 in half.bad_blocks()
            report = half.report()
            assert report is not None
            told = decode_report(report.payloads[0])
            assert (2, 3) == tuple(sorted(told.loads_done))
            assert [(99).to_bytes(32, "big")] == [one.bad_hash for one in told.failures]

    def test_layers_that_do_not_ask_make_the_load_fail(self) -> None:
        """An engine that runs without the layers' hooks computed with what was not
        there: the load fails, and the request loads nothing more."""
        save, load = an_order(1, SAVE, range(1, 3)), an_order(2, LOAD, range(9, 11))
        with working(mode=LAYERWISE) as half:
            forward(half, StepPlan(step=1, saves=(save,)))
            assert half._runtime.flush(60.0)
            half.report()
            plan = StepPlan(step=2, loads=(load,), keyspace_digest=KEYSPACE.digest)
            half.bind(PlanEnvelope(encode(plan)))
            half.start_loads()
            half.submit_saves()
            half.finished()
            assert {9, 10} == half.bad_blocks()
            report = half.report()
            assert report is not None
            (failure,) = decode_report(report.payloads[0]).failures
            assert ("unasked", b"") == (failure.reason, failure.bad_hash)
