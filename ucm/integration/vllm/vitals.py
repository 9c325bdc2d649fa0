# SPDX-License-Identifier: Apache-2.0
"""
How an engine's processes are while no step tells of it.

vLLM carries our numbers to its front end with the outputs of steps: an engine that is
idle, or hangs, tells nothing, and what was told last would stand for good. So each
process of an engine tells whoever asks in the slab's directory (``ucm.status``): ``ucm
top``, and every five seconds its front end (``stats``). If nobody asks it looks by itself
as often, so that what the next step tells is fresh.
"""

from typing import Any, Final

from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.worker import WorkerHalf
from ucm.status import StatusServer, serve_status
from ucm.threads import SYSTEM
from ucm.tracing import num_dropped

__all__ = ["begin_vitals"]

_LOOK_S: Final = 5.0
_MOST_EDGES: Final = 256


def begin_vitals(vllm_config: Any, half: object) -> StatusServer | None:  # noqa: ANN401 - vLLM's
    """Have one half of a connector tell how it is; None where there is nothing to see."""
    engine_id = getattr(vllm_config.kv_transfer_config, "engine_id", None)
    if not engine_id or not isinstance(half, SchedulerHalf | WorkerHalf):
        return None
    is_scheduler = isinstance(half, SchedulerHalf)
    rank = vllm_config.parallel_config.rank

    def look() -> None:
        if isinstance(half, SchedulerHalf):
            half.refresh()
        SYSTEM.give_way()  # an engine waits for the interpreter lock, nobody for us
        half.counters.reach("ucm_dropped_log_lines_total", num_dropped(half.log))

    def tell() -> dict[str, object]:
        look()
        SYSTEM.give_way()
        now = half.counters.snapshot()
        numbers = {"counters": now.counters, "gauges": now.gauges}
        told = {"engine": engine_id, "sizes": half.counts(), **numbers}
        if isinstance(half, WorkerHalf) and half.runtime is not None:
            told["edges"] = half.runtime.ring.last(_MOST_EDGES)
        return told

    role = "scheduler" if is_scheduler else f"worker-{rank}"
    directory = half.store.directory
    return serve_status(directory, role, tell, look=look, look_s=_LOOK_S)
