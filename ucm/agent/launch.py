# SPDX-License-Identifier: Apache-2.0
"""How an engine starts its node's agent, without any of the agent's code in the engine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ucm.config import UCMConfig

__all__ = ["REFUSED", "Launcher"]

REFUSED: Final = 2
"""Exit code of an agent that cannot be used as it is set."""
_REFUSED_S: Final = 60.0
"""What stands against its settings may be gone by then, such as another slab's agent."""
_MOST_TEXT: Final = 4096
_left_behind: "Final[list[subprocess.Popen[bytes]]]" = []
"""An agent outlives who started it; what stands for it must not be collected before."""


class Launcher:
    """
    Starts an agent in a process of its own, one at a time.

    It is in a session of its own: what ends the engine's group does not end it. One that
    refuses its settings says why through a pipe, and is not started anew for a while.

    Args:
        config: As the engine has it; travels by standard input, as it may hold secrets.
        clock: In seconds.
    """

    def __init__(
        self, config: UCMConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = msgspec.json.encode(config)
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._problem_fd = -1
        self._problem = ""
        self._not_before = 0.0

    def __call__(self) -> str:
        """
        Start one, unless the one that was started is there. Blocks for a moment.

        Returns:
            Why the one before could not be used; empty if it could.
        """
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return ""
            if self._problem_fd >= 0:
                self._take_problem(is_refused=code == REFUSED)
        if not self._problem or self._clock() >= self._not_before:
            self._start()
        return self._problem

    def _take_problem(self, *, is_refused: bool) -> None:
        """Read what the one that is over has said, which nobody writes any more."""
        said = os.read(self._problem_fd, _MOST_TEXT).decode(errors="replace")
        os.close(self._problem_fd)
        self._problem_fd = -1
        self._problem = said if is_refused else ""
        self._not_before = self._clock() + _REFUSED_S

    def _start(self) -> None:
        reader, writer = os.pipe()
        command = [sys.executable, "-P", "-m", "ucm.agent", "--problem-fd", str(writer)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError:  # as without an agent; it is tried again
            os.close(reader)
            return
        finally:
            os.close(writer)
        self._problem_fd = reader
        os.set_blocking(reader, True)
        _left_behind[:] = [each for each in _left_behind if each.poll() is None]
        _left_behind.append(self._process)
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(self._settings)
            stdin.close()
        except OSError:
            return
