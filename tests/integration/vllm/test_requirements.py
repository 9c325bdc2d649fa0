# SPDX-License-Identifier: Apache-2.0
"""What the engine is told, and when, whatever order things come in."""

import ast
from pathlib import Path

from tests.integration.vllm.test_worker import an_order, step
from tests.integration.vllm.test_worker_orders import NOTHING, working
from tests.rig import order, running
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.pipeline.tickets import Direction
from ucm.scheduler.messages import Deferral, StepPlan, TransferKind
from ucm.testing.faults import Fault, FaultPlan, Gate

PACKAGE = Path(__file__).parents[3] / "ucm"
SAVE = an_order(1, TransferKind.SAVE, range(1, 5))


LOAD = an_order(2, TransferKind.LOAD, range(10, 14), "l")


def carry_out(half, number, **orders):
    """Run one step with its metadata; return what is finished."""
    return step(half, StepPlan(step=number, keyspace_digest=b"", **orders))


class TestCompletions:
    def test_load_is_told_in_a_later_step_that_does_not_mention_it(self) -> None:
        """S2-09: a load of step 2 that ends in step 5 is told in step 5, once."""
        gate = Gate()
        with working(Fault("read", gate)) as half:
            carry_out(half, 1, saves=(SAVE,))
            assert half._runtime.flush(60.0)
            assert NOTHING == carry_out(half, 2, loads=(LOAD,))
            gate.wait_reached()
            assert [NOTHING] * 2 == [carry_out(half, number) for number in (3, 4)]
            gate.open()
            assert half._runtime.flush(60.0)
            assert (set(), {"l"}, set()) == carry_out(half, 5)
            assert NOTHING == carry_out(half, 6)

    def test_completion_in_a_step_without_metadata_is_kept(self) -> None:
        """S2-10: what ends while no metadata is bound is told all the same."""
        gate = Gate()
        with working(Fault("read", gate)) as half:
            carry_out(half, 1, saves=(SAVE,))
            assert half._runtime.flush(60.0)
            carry_out(half, 2, loads=(LOAD,))
            gate.open()
            assert half._runtime.flush(60.0)
            half.submit_saves()  # S1-24: nothing is bound, and nothing happens
            assert (set(), {"l"}, set()) == half.finished()

    def test_later_completion_does_not_end_an_earlier_operation(self) -> None:
        """S2-14: a save that ends before a load of lower number ends nothing else."""
        gate = Gate()
        with working(Fault("read", gate)) as half:
            carry_out(half, 1, saves=(SAVE,))
            assert half._runtime.flush(60.0)
            carry_out(half, 2, loads=(LOAD,))
            gate.wait_reached()
            later = an_order(3, TransferKind.SAVE, range(20, 24))
            carry_out(half, 3, saves=(later,))
            while not half._progress.outbox.settled_saves[1:]:
                half._runtime.wait_for_notice(5.0)
                assert NOTHING == half.finished()
            assert [1, 3] == half._progress.outbox.settled_saves
            assert [] == half._progress.outbox.loads_done
            gate.open()
            assert half._runtime.flush(60.0)
            assert (set(), {"l"}, set()) == half.finished()


class TestBounds:
    def test_copies_in_flight_are_bounded_by_the_window(self) -> None:
        """S2-15: however many saves are ordered, no more than the window reach the
        device before the first of them is over."""
        gate = Gate()
        config = {"queue": {"window": 3}}
        with running(config, FaultPlan(Fault("gather", gate))) as rig:
            orders = [
                order(n, Direction.SAVE, range(n, n + 1), range(n, n + 1), f"r{n}")
                for n in range(1, 20)
            ]
            assert ["accepted"] * 19 == rig.submit(*orders)
            gate.wait_reached()
            assert 3 == len(rig.runtime._pipeline._lanes)
            assert 16 == rig.runtime._pipeline.queue.num_items
            gate.open()
            assert 19 == len(rig.settle())


class TestOneDoor:
    def test_both_names_of_the_end_of_a_request_give_one_answer(
        self, monkeypatch
    ) -> None:
        """S1-20: with groups or without, a finished request is decided on once."""
        asked = []

        class Half:
            def finished(self, request_id, tables, *, is_aborted) -> bool:
                asked.append((request_id, tables))
                return request_id == "held"

        connector = object.__new__(UCMConnector)
        monkeypatch.setattr(connector, "_scheduler", Half(), raising=False)
        for name in ("held", "free"):
            request = type("Request", (), {"request_id": name})
            single = connector.request_finished(request, [1])
            groups = connector.request_finished_all_groups(request, ([1], [2]))
            assert (name == "held", None) == single == groups
        tables = ([1],), ([1], [2])
        expected = [(name, told) for name in ("held", "free") for told in tables]
        assert expected == asked

    def test_one_function_builds_metadata_and_none_overrides_it(self) -> None:
        """S1-21: no variant of the connector can forget to hold what it saves."""
        ours = [
            each
            for each in UCMConnector.__subclasses__()
            if each.__module__.startswith("ucm.")
        ]
        assert [] == ours
        names = ("build_connector_meta", "plan_step")
        found = [
            (path.name, node.name)
            for path in PACKAGE.rglob("*.py")
            if "testing" not in path.parts
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name in names
        ]
        assert [
            ("adapter.py", "plan_step"),
            ("ucm_connector.py", "build_connector_meta"),
        ] == sorted(found)
        assert callable(SchedulerHalf.plan)


def test_ranks_with_nothing_to_save_report_too() -> None:
    """H-03: a rank that has nothing in hand for a deferred request tells of it once."""
    with working() as half:
        deferral = Deferral(request_id="r", generation=1)
        assert ({"r"}, set(), set()) == carry_out(half, 1, deferred=(deferral,))
        assert NOTHING == carry_out(half, 2)
