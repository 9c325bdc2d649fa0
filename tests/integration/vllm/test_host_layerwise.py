# SPDX-License-Identifier: Apache-2.0
"""The real halves under a host whose layers wait for their rows and save them."""

from collections import Counter

import pytest

from tests.integration.vllm.host_kit import world
from tests.integration.vllm.test_worker import KEYSPACE, an_order, step, working
from tests.rig import LAYERS
from tests.testing.host_kit import BUSY, HYBRID, ONE_FULL, RECURRENT, missing
from ucm.errors import StoreUnavailableError
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.modes import Facts, Loads, choose_mode, shape_of
from ucm.reasons import Reason
from ucm.scheduler.messages import StepPlan, TransferKind, decode_report, encode
from ucm.testing.faults import Fault, FaultPlan, raising
from ucm.testing.host import HostSettings


class TestLayers:
    @pytest.mark.slow
    @pytest.mark.parametrize("is_whole", [False, True], ids=["halves", "whole"])
    def test_rows_that_layers_wait_for_break_no_rule(self, is_whole: bool) -> None:
        """S4-01, S4-12, S4-13, H-10: what a layer reads is there when it reads it, or
        the engine is told by its blocks, computes again and stores nothing wrong."""
        mode = choose_mode(Facts(use_layerwise=True))
        error = StoreUnavailableError("planned")
        faults = (
            Fault(verb, raising(error), nth)
            for verb in ("read", "verify", "recheck")
            for nth in range(5, 400, 9)
        )
        plan, seen = FaultPlan(*faults), Counter[str]()
        settings = HostSettings(odds=BUSY)
        for seed in (1, 2):
            with world(
                seed, settings=settings, plan=plan, mode=mode, is_whole=is_whole
            ) as it:
                it.run(400)
                seen += it.host.seen
        assert Loads.LAYERWISE is mode.loads
        assert set() == missing(seen, {"load_in_step", "blocks_failed", "deferred"})

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("layout", "in_flight"), [(ONE_FULL, 2), (HYBRID, 1), (RECURRENT, 2)]
    )
    def test_rows_that_layers_save_break_no_rule(self, layout, in_flight) -> None:
        """S4-05, S4-07, S4-10: where loads are asynchronous rows are saved layer by
        layer all the same, also such as several groups share."""
        mode = choose_mode(
            Facts(
                use_layerwise=True,
                shape=shape_of(layout),
                overlapping_batches=in_flight > 1,
            )
        )
        settings = HostSettings(odds=BUSY, in_flight=in_flight)
        with world(1, layout, settings=settings, mode=mode, num_blocks=64) as it:
            it.run(600)
        assert Loads.ASYNC is mode.loads
        assert set() == missing(it.host.seen, {"load", "deferred", "freed_later"})


class TestLateLoads:
    def test_load_that_landed_behind_its_layer_is_told_by_its_blocks(self) -> None:
        """S4-13: a layer that ran without waiting computed with anything; the load has
        failed, though all of it is there when the step ends."""
        mode = choose_mode(Facts(use_layerwise=True))
        with working(mode=mode, config={"load_ahead_rows": 9}) as half:
            step(
                half,
                StepPlan(step=1, saves=(an_order(1, TransferKind.SAVE, range(2)),)),
            )
            assert half._runtime.flush(60.0)
            load = an_order(2, TransferKind.LOAD, range(9, 11))
            plan = StepPlan(step=2, loads=(load,), keyspace_digest=KEYSPACE.digest)
            half.bind(PlanEnvelope(encode(plan)))
            half.start_loads()
            half.wait_for_layer(LAYERS[0])
            assert half._runtime.flush(60.0)
            half.wait_for_layer(LAYERS[2])
            half.submit_saves()
            half.finished()
            assert {9, 10} == half.bad_blocks()
            report = half.report()
            assert report is not None
            (failure,) = decode_report(report.payloads[0]).failures
            assert (Reason.UNASKED, b"") == (failure.reason, failure.bad_hash)
            assert {0} == set(half.counts().values())

    def test_late_load_of_a_pass_that_broke_off_is_told_by_the_next(self) -> None:
        """S4-13: a load behind its layer is told as failed also when its own step never
        came to its end."""
        mode = choose_mode(Facts(use_layerwise=True))
        with working(mode=mode, config={"load_ahead_rows": 9}) as half:
            save = an_order(1, TransferKind.SAVE, range(2))
            step(half, StepPlan(step=1, saves=(save,)))
            assert half._runtime.flush(60.0)
            load = an_order(2, TransferKind.LOAD, range(9, 11))
            plan = StepPlan(step=2, loads=(load,), keyspace_digest=KEYSPACE.digest)
            half.bind(PlanEnvelope(encode(plan)))
            half.start_loads()
            half.wait_for_layer(LAYERS[0])
            assert half._runtime.flush(60.0)
            another = an_order(3, TransferKind.LOAD, range(11, 13), "r2")
            step(half, StepPlan(step=3, loads=(another,)))
            assert {9, 10} <= half.bad_blocks()
