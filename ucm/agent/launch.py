# SPDX-License-Identifier: Apache-2.0
"""How an engine starts its node's agent, without any of the agent's code in the engine."""

import subprocess
import sys
from typing import Final

import msgspec

from ucm.config import UCMConfig

__all__ = ["Launcher"]

_left_behind: "Final[list[subprocess.Popen[bytes]]]" = []
"""An agent outlives who started it; what stands for it must not be collected before."""


class Launcher:
    """
    Starts an agent in a process of its own, one at a time.

    It is in a session of its own: what ends the engine's group does not end it.

    Args:
        config: As the engine has it; travels by standard input, as it may hold secrets.
    """

    def __init__(self, config: UCMConfig) -> None:
        self._settings = msgspec.json.encode(config)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Start one, unless the one that was started is there. Blocks for a moment."""
        if self._process is not None and self._process.poll() is None:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ucm.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return  # as without an agent; it is tried again
        _left_behind[:] = [each for each in _left_behind if each.poll() is None]
        _left_behind.append(self._process)
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(self._settings)
            stdin.close()
        except OSError:
            return
