# SPDX-License-Identifier: Apache-2.0
"""A runtime that is closed twice: by two threads, or once more after an interruption."""

import threading

import pytest

from tests.rig import keys_of, order, running
from ucm.errors import StoreUnavailableError
from ucm.pipeline.tickets import Direction
from ucm.testing.faults import Fault, FaultPlan, Gate

SAVE = Direction.SAVE
TIMEOUT = 60.0


class TestClose:
    def test_second_close_comes_back_when_the_first_is_through(self):
        """S1-27: whoever closes a runtime that another thread closes already may unmap
        its memory afterwards as well."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("commit", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            ended = []

            def close():
                rig.runtime.close()
                ended.append(
                    "runtime.closed" in {e["event"] for e in rig.tracer.events}
                )

            threads = [threading.Thread(target=close) for _ in range(2)]
            for thread in threads:
                thread.start()
            threads[1].join(0.05)  # not yet
            gate.open()
            for thread in threads:
                thread.join(TIMEOUT)
            assert [True, True] == ended

    def test_close_that_broke_off_is_gone_on_with(self):
        """S1-27: who is interrupted while it waits closes store and device by the next."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            join = rig.runtime._loop.join

            def interrupted(_):
                rig.runtime._loop.join = join
                raise KeyboardInterrupt

            rig.runtime._loop.join = interrupted
            with pytest.raises(KeyboardInterrupt):
                rig.runtime.close()
            rig.runtime.close()
            with pytest.raises(StoreUnavailableError, match="closed"):
                rig.store.match(keys_of(1))
