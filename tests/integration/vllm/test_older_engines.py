# SPDX-License-Identifier: Apache-2.0
"""What a worker does differently under engines that ask in another way."""

import time

from tests.integration.vllm.test_worker import an_order
from tests.integration.vllm.test_worker_orders import KEYSPACE, working
from ucm.errors import StoreUnavailableError
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.worker import WorkerHalf
from ucm.scheduler.messages import Deferral, StepPlan, TransferKind, encode
from ucm.testing.faults import Fault, raising

SAVE = an_order(1, TransferKind.SAVE, range(1, 5))
LOAD = an_order(2, TransferKind.LOAD, range(10, 14), "l")


def begin(half: WorkerHalf, number: int, *, is_idle: bool, **orders: object) -> None:
    """Begin a step; its saves are not asked for."""
    digest = KEYSPACE.digest
    plan = StepPlan(step=number, keyspace_digest=digest, is_idle=is_idle, **orders)
    envelope = PlanEnvelope(encode(plan))
    half.fence(envelope)
    half.bind(envelope)
    half.start_loads()


def finished_after(half: WorkerHalf, told: int, *, by_blocks: bool) -> set[str]:
    """Wait until something of a kind is told, and return it."""
    limit = time.monotonic() + 60.0
    while not (found := half.finished(by_blocks=by_blocks)[told]):
        assert time.monotonic() < limit, "nothing is told"
        half._runtime.wait_for_notice(5.0)
    return found


class TestIdleSteps:
    def test_saves_and_deferrals_of_an_idle_step_are_not_lost(self) -> None:
        """S1-03: before vLLM 0.31 ``wait_for_save`` is not called where nothing is
        computed; the step's saves go out all the same, once, and the request is freed."""
        with working() as half:
            deferral = Deferral(request_id=SAVE.request_id, generation=SAVE.generation)
            begin(half, 1, is_idle=True, saves=(SAVE,), deferred=(deferral,))
            told = half.finished(by_blocks=True)[0]
            # Not with another call, or with the next step: there may be none.
            assert half._runtime.flush(60.0)
            assert {SAVE.request_id} == told | half.finished(by_blocks=True)[0]
            half.submit_saves()  # newer engines do ask, and nothing comes twice
            assert half._runtime.flush(60.0)
            assert (set(), set(), set()) == half.finished()
            assert [1] == half._progress.outbox.settled_saves

    def test_saves_of_a_computing_step_wait_until_they_are_asked_for(self) -> None:
        """H-06: results that are asked for before ``wait_for_save`` read no block that
        the forward pass may still write."""
        with working() as half:
            begin(half, 1, is_idle=False, saves=(SAVE,))
            assert (set(), set(), set()) == half.finished(by_blocks=True)
            assert 0 == half.counts()["open"]
            half.submit_saves()
            assert 1 == half.counts()["open"]


class TestFailures:
    def test_failed_load_is_told_by_blocks_to_who_asks_so(self) -> None:
        """S3-09: an engine without ``get_transfer_results`` hears of the blocks of a
        load that failed, in the step that ends it and once."""
        fault = Fault("read", raising(StoreUnavailableError("planned")))
        with working(fault) as half:
            begin(half, 1, is_idle=False, loads=(LOAD,))
            assert {"l"} == finished_after(half, 1, by_blocks=True)
            assert set(range(10, 14)) == half.bad_blocks()
            assert set() == half.bad_blocks()

    def test_failed_load_is_told_by_request_to_others(self) -> None:
        """S4-15: an engine that asks for failed requests hears of no block."""
        fault = Fault("read", raising(StoreUnavailableError("planned")))
        with working(fault) as half:
            begin(half, 1, is_idle=False, loads=(LOAD,))
            assert {"l"} == finished_after(half, 2, by_blocks=False)
            assert set() == half.bad_blocks()
