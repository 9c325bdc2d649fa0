# SPDX-License-Identifier: Apache-2.0
"""An engine with nobody to run, whose saves still wait for others."""

import contextlib

import attrs

from tests.integration.vllm.test_halves import Engine, make_setup, request
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.ucm_connector import UCMConnector


class TestAwake:
    def test_engine_steps_until_nothing_waits(self, tmp_path):
        """R-18: one with nobody to run is asked for a step as long as blocks wait for
        others, and that step saves them."""
        setup = make_setup(tmp_path, timeout={"company": 60})
        engine = Engine(setup)
        engine.scheduler.close()
        large = attrs.evolve(setup, may_wait=True, num_blocks=1000)
        engine.scheduler = SchedulerHalf(large)
        connector = object.__new__(UCMConnector)  # as it is without an engine
        connector._scheduler = engine.scheduler
        with contextlib.closing(engine.scheduler), contextlib.closing(engine.worker):
            engine.register()
            assert not connector.has_pending_push_work()
            one = request("a")
            engine.scheduler.allocated(one, [[1, 2, 3]], 0)
            assert () == plan_in(engine.plan([one], [1, 2, 3])).saves
            assert connector.has_pending_push_work()
            (save,) = plan_in(engine.plan()).saves
            assert (1, 2, 3) == save.block_ids
            assert not connector.has_pending_push_work()
