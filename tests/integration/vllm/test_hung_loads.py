# SPDX-License-Identifier: Apache-2.0
"""Both halves of the connector over a store whose reads hang."""

import contextlib

from tests.integration.vllm.test_halves import Engine, make_setup, request
from ucm.integration.vllm.messages import plan_in
from ucm.reasons import Reason
from ucm.scheduler.messages import Failure, StepReport, encode
from ucm.testing.faults import Gate


class TestTogether:
    def test_store_whose_reads_hang_costs_one_deadline_and_is_tried_again(
        self, tmp_path, monkeypatch
    ):
        """R-14: the first load that hangs costs its deadline, the next two nothing, and
        behind them the prefix is a miss; when the read has returned it is found again, by
        one request first and then by all, without anybody's doing."""
        gate, now = Gate(), [0.0]
        with contextlib.ExitStack() as stack:
            engine = Engine(make_setup(tmp_path, timeout={"load": 0.05}))
            for half in (engine.scheduler, engine.worker):
                stack.enter_context(contextlib.closing(half))
            engine.register()
            engine.save()
            monkeypatch.setattr(engine.scheduler._store, "_clock", lambda: now[0])
            read = engine.worker._store.read
            monkeypatch.setattr(
                engine.worker._store, "read", lambda keys: (gate(), read(keys))[1]
            )
            for name in ("s", "t", "u"):
                assert (set(), {name}, {name}) == engine.load(name)
                engine.scheduler.finished(name)
            failed = engine.scheduler._adapter.totals.failed_loads
            assert {"deadline": 1, "store_hung": 2} == failed
            assert (0, False) == engine.scheduler.match(request("v"), 0)
            gate.open()
            while any(engine.worker._runtime._pipeline._deadlines._hung.values()):
                engine.worker._runtime.wait_for_notice(0.01)
            assert (0, False) == engine.scheduler.match(request("v"), 0)
            now[0] = 1.0
            one = request("v")
            assert (48, True) == engine.scheduler.match(one, 0)
            engine.scheduler.allocated(one, [[5, 6, 7]], 48)
            assert (0, False) == engine.scheduler.match(request("w"), 0)
            assert (set(), {"v"}, set()) == engine.work(engine.plan())
            assert (set(), {"w"}, set()) == engine.load("w")

    def test_failures_that_are_told_ahead_of_their_ends_count(self, tmp_path):
        """R-14: a report may say that loads failed, and a later one that they are through: the
        store is bypassed with the first, and is not taken for well with the second."""
        with contextlib.ExitStack() as stack:
            engine = Engine(make_setup(tmp_path))
            for half in (engine.scheduler, engine.worker):
                stack.enter_context(contextlib.closing(half))
            engine.register()
            engine.save()
            half, loads = engine.scheduler, []
            for at, name in enumerate("stu"):
                one = request(name)
                assert (48, True) == half.match(one, 0)
                half.allocated(one, [[3 * at + 1, 3 * at + 2, 3 * at + 3]], 48)
                loads += plan_in(engine.plan()).loads
            failures = [
                Failure(
                    transfer_id=load.transfer_id,
                    request_id=load.request_id,
                    generation=load.generation,
                    group_id=0,
                    bad_hash=b"",
                    reason=Reason.DEADLINE,
                )
                for load in loads
            ]
            half._apply_report(encode(StepReport(rank=0, failures=tuple(failures))))
            assert half.store.is_bypassed
            done = tuple(load.transfer_id for load in loads)
            half._apply_report(encode(StepReport(rank=0, loads_done=done)))
            assert half.store.is_bypassed
