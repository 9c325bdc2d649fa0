# SPDX-License-Identifier: Apache-2.0
"""How the loop serves: what is done on it, how often, and what becomes of an error."""

import itertools
import threading

import pytest

from tests.pipeline.kit import make_ticket
from tests.rig import KEYSPACE_DIGEST, order, running
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.testing.faults import Fault, FaultPlan, Gate, raising
from ucm.threads import SYSTEM, Threads

SAVE = Direction.SAVE


def on_loop(rig, function):
    """Call a function on the loop; return when it has come back."""
    done = threading.Event()
    loop = rig.runtime._loop._loop
    loop.call_soon_threadsafe(lambda: (function(), done.set()))
    assert done.wait(60.0)


class TestServing:
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_error_of_the_loop_fails_what_is_open(self):
        """S2-13: what goes wrong between two stages ends the loop, and nobody waits for
        it any more."""
        with running() as rig:
            ordered = threading.Event()
            rig.runtime._loop._loop.call_soon_threadsafe(ordered.wait, 60.0)
            rig.runtime._pipeline._deadlines.look_at_hung = raising(ZeroDivisionError())
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            ordered.set()  # had the loop gone on, it might have ended before the order
            rig.runtime._loop.join(60.0)
            rig.poll()
            assert "loop" in rig.runtime.failure
            assert OutcomeKind.FAILED is rig.outcomes()[1].kind

    def test_wake_while_serving_serves_once_more(self):
        """What is served calls for more: that is done behind it, never within it."""
        with running() as rig:
            pipeline, depths = rig.runtime._pipeline, [0]
            serve, fill = pipeline._serve, pipeline._fill_lanes
            calls = []

            def served():
                depths.append(depths[-1] + 1)
                serve()
                depths.append(depths[-1] - 1)

            def filled(direction):
                calls.append(direction)
                if len(calls) == 1:
                    pipeline.wake()
                fill(direction)

            def wake():
                pipeline._serve, pipeline._fill_lanes = served, filled
                pipeline.wake()
                del pipeline._serve, pipeline._fill_lanes

            on_loop(rig, wake)
            assert [0, 1, 0, 1, 0] == depths
            assert 2 * len(Direction) == len(calls)

    @pytest.mark.parametrize("rows", [None, [0]], ids=["under way", "rows to come"])
    def test_deadlines_are_looked_at_while_anything_is_open(self, rows):
        """Nothing else happens, also where no lane has an item: the alarm rings again
        and again."""
        gate, rung = Gate(), threading.Semaphore(0)
        faults = FaultPlan(*([] if rows else [Fault("reserve", gate)]))
        with running(plan=faults) as rig:
            pipeline = rig.runtime._pipeline
            ring = pipeline._ring
            pipeline._ring = lambda: (rung.release(), ring())
            one = order(1, SAVE, range(4), range(1, 5))
            rig.runtime.submit(KEYSPACE_DIGEST, [one], rig.device.lease(None), rows)
            assert all(rung.acquire(timeout=60.0) for _ in range(4))
            gate.open()

    def test_burst_of_saves_is_served_in_few_calls(self):
        """R-18: the loop is woken for bursts, not for each stage of each ticket."""
        with running() as rig:
            pipeline, calls = rig.runtime._pipeline, {"_serve": 0, "_ring": 0}

            def count(name):
                function = getattr(pipeline, name)

                def counted():
                    calls[name] += 1
                    function()

                setattr(pipeline, name, counted)

            on_loop(rig, lambda: (count("_serve"), count("_ring")))
            rig.submit(*(order(n, SAVE, range(n, n + 4), range(1, 5)) for n in (1, 5)))
            assert {4} == {outcome.committed for outcome in rig.settle().values()}
            on_loop(rig, lambda: None)
            # Submitted, copied and stored: at most once for each of the two, and once
            # more where a place in the window was free behind it.
            assert 8 >= calls["_serve"] - calls["_ring"]

    def test_look_at_all_that_waits_has_pauses(self):
        """R-18: however many tickets are open, the engine's thread may have the lock
        amid the look through them."""
        with running() as rig:
            pipeline, ways = rig.runtime._pipeline, []
            tickets = [make_ticket(n) for n in range(300)]

            def sweep():
                pipeline.queue.open.update({each.transfer_id: each for each in tickets})
                pipeline._threads = Counted(ways)
                pipeline._sweep(0.0)
                pipeline._threads = SYSTEM
                pipeline.queue.open.clear()

            on_loop(rig, sweep)
            assert 10 < len(ways)


class Counted(Threads):
    """Threads that count how often others were given way."""

    def __init__(self, ways):
        self._ways, self._looks = ways, itertools.count()

    def monotonic(self):
        """Let a tenth of a millisecond go by at each look."""
        return next(self._looks) * 1e-4

    def give_way(self):
        """Count it."""
        self._ways.append(1)
