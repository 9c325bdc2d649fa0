# SPDX-License-Identifier: Apache-2.0
"""Agents that engines have started, which are nobody's children."""

import os
import signal
import time

from ucm.agent.launch import Launcher

__all__ = ["agent_pid", "end_agent", "exit_code"]

_LIMIT_S = 120.0


def agent_pid(launch: Launcher) -> int:
    """Return the process of the agent that was started last."""
    assert launch._agent is not None
    return launch._agent.pid


def end_agent(launch: Launcher, with_signal: int = signal.SIGKILL) -> int:
    """Send a signal to the agent that was started last, if it lives; return its exit code."""
    assert launch._agent is not None
    if launch._agent.poll() is None:
        os.kill(agent_pid(launch), with_signal)
    return exit_code(launch)


def exit_code(launch: Launcher) -> int:
    """Wait until the agent that was started last is over; return its exit code."""
    assert launch._agent is not None
    deadline = time.monotonic() + _LIMIT_S
    while (code := launch._agent.poll()) is None:
        assert deadline > time.monotonic()
        time.sleep(0.005)
    return code
