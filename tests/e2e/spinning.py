# SPDX-License-Identifier: Apache-2.0
"""How an engine's processes wait for each other where there are fewer CPUs than processes."""

import functools
import time

__all__ = ["leave_the_cpu"]

_PAUSE_S = 0.0005
_LOST_MS = 50


def leave_the_cpu() -> None:
    """
    Let those who read the engine's queues leave the CPU to those who write.

    They spin for a second after each message, and when they sleep may miss that there is
    another, which they find out five seconds later.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, _PAUSE_S)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOST_MS
