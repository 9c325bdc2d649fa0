# SPDX-License-Identifier: Apache-2.0
"""
The steps behind an engine's last answer, where nobody else takes them.

An engine in its host's own process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) steps while
requests run, and no further. What they leave to be saved would keep its blocks until the
next prompt: a reset of the engine's cache would fail till then, and ``sleep`` raise. So the
scheduler's half takes these steps within the last one, as an engine with a process of its
own does behind it.
"""

import time
from multiprocessing import current_process
from typing import Any, Final

from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from ucm.integration.vllm.compat import has
from ucm.integration.vllm.mock import MockSchedulerHalf
from ucm.integration.vllm.scheduler import SchedulerHalf

__all__ = ["LastSteps"]

_LONGEST_S: Final = 1.0
"""Of these steps, which the last answer waits for; it is copies that they wait for."""
_UNPLANNED: Final = ("endings", "waiting", "new_deferrals")
"""What is counted of that which no plan has told the worker."""


class LastSteps:
    """
    Takes them; called by ``UCMConnector.update_connector_output`` in each step, on the engine's thread.

    Args:
        half: The scheduler's.
        vllm_config: The engine's.
    """

    def __init__(
        self,
        half: SchedulerHalf | MockSchedulerHalf,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    ) -> None:
        self._half = half
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        own_process = current_process().name.startswith("EngineCore")
        self._are_ours = (
            not (envs.VLLM_ENABLE_V1_MULTIPROCESSING or own_process)
            and vllm_config.parallel_config.world_size == 1
            and has("failed_requests")
        )

    def take(self, output: KVConnectorOutput) -> None:
        """
        Save what is left if no request runs or waits to, for a second at most.

        Args:
            output: What the worker told of the last step; whose blocks are free behind it
                joins it, so that the engine hears of it at once.
        """
        half = self._half
        if not self._are_ours or isinstance(half, MockSchedulerHalf):
            return
        if half.running:  # somebody has come, and is not over
            return
        worker = self._worker() if half.counts()["deferred"] else None
        if worker is None or worker.has_connector_metadata():  # amid a step of its own
            return
        limit = time.monotonic() + _LONGEST_S
        sent, received = (
            set(each or ())
            for each in (output.finished_sending, output.finished_recving)
        )
        is_over = False
        while not is_over and time.monotonic() < limit:
            half.apply(told := self._step(half, worker))
            sent |= told.finished_sending
            received |= told.finished_recving
            # What else is kept the engine hears of from a step that is on its way.
            left, of_worker = half.counts(), worker.worker.counts()
            is_over = not (any(map(left.get, _UNPLANNED)) or of_worker["deferred"])
        output.finished_sending, output.finished_recving = sent, received

    def _worker(self) -> Any:  # noqa: ANN401 - a connector, of the worker's side
        """Return the engine's connector, if it is ours alone and in this process."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        is_ours = getattr(group, "engine_id", None) == self._engine_id
        return group if is_ours else None

    @staticmethod
    def _step(half: SchedulerHalf, worker: Any) -> KVConnectorOutput:  # noqa: ANN401 - as above
        """Take one that computes nothing."""
        plan = half.plan(SchedulerOutput.make_empty())
        worker.handle_preemptions(plan)
        worker.bind_connector_metadata(plan)
        try:
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            return KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
        finally:  # else each later step would be taken for one amid which we are
            worker.clear_connector_metadata()
