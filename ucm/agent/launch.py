# SPDX-License-Identifier: Apache-2.0
"""How an engine starts its node's agent, without any of the agent's code in the engine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ucm.affinity import engine_cpus, format_cpulist
from ucm.config import UCMConfig

__all__ = ["REFUSED", "Launcher", "Pauses"]

REFUSED: Final = 2
"""Exit code of an agent that cannot be used as it is set."""
_REFUSED_S: Final = 60.0
"""What stands against its settings may be gone by then, such as another slab's agent."""
_FIRST_S: Final = 0.1
_LONGEST_S: Final = 10.0
_COMING_S: Final = 60.0
"""One that does not serve by then has stopped."""
_OTHER_S: Final = 5.0
"""Another engine's agent, that ours has met, serves by then."""
_MOST_TEXT: Final = 4096
_BINDING: Final = frozenset(
    {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
)
"""What has a rank's process bind itself to cores, and the agent's too, if it inherits it."""


class _Agent(subprocess.Popen[bytes]):
    """A process that outlives who started it, which is no leak to be warned of."""

    def __del__(self) -> None:
        """Say nothing."""


_left_behind: Final[list[_Agent]] = []
"""Those that are to be reaped once they are over."""


class Pauses:
    """
    How long to wait before an agent is looked for again.

    Less and less often where there is none; not so while one is on its way, which costs hits
    until it is found.

    Args:
        is_coming: Returns whether one was started, and is on its way.
    """

    def __init__(self, is_coming: Callable[[], bool] = lambda: False) -> None:
        self._is_coming = is_coming
        self._last_s = 0.0

    def next(self, lasted_s: float) -> float:
        """Return so many seconds; the last try took *lasted_s*, its agent's time included."""
        if lasted_s > _LONGEST_S or self._is_coming():
            self._last_s = _FIRST_S
        else:
            self._last_s = min(max(2 * self._last_s, _FIRST_S), _LONGEST_S)
        return self._last_s


class Launcher:
    """
    Starts an agent in a process of its own, one at a time.

    It is in a session of its own: what ends the engine's group does not end it. One that
    refuses its settings says why through a pipe, and is not started anew for a while. One that
    dies soon, again and again, is started less and less often. One that ends at once, well, has
    met another engine's, which is waited for. Its CPUs are the engine's, not those of the rank
    that happens to start it: on one core with a rank that polls, it was seen to get no turn in
    half a minute.

    Args:
        config: As the engine has it; travels by standard input, as it may hold secrets.
        clock: In seconds.
    """

    def __init__(
        self, config: UCMConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = msgspec.json.encode(config)
        self._clock = clock
        self._process: _Agent | None = None
        self._problem_fd = -1
        self._problem = ""
        self._started_at = self._not_before = 0.0
        self._starts = Pauses()
        self._met_another = False

    def is_coming(self) -> bool:
        """Return whether an agent that was started, ours or another's, is on its way."""
        process, now = self._process, self._clock()
        if process is None:
            return False
        if process.poll() is None:
            return now < self._started_at + _COMING_S
        return self._met_another and now < self._not_before

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
                self._is_over(code)
        if self._clock() >= self._not_before:
            self._start()
        return self._problem

    def _is_over(self, code: int) -> None:
        """Read what the one that is over has said; decide when the next one is started."""
        said = os.read(self._problem_fd, _MOST_TEXT).decode(errors="replace")
        os.close(self._problem_fd)
        self._problem_fd = -1
        self._problem = said if code == REFUSED else ""
        now = self._clock()
        lasted_s = now - self._started_at
        pause_s = self._starts.next(lasted_s)
        self._met_another = code == 0 and lasted_s < _LONGEST_S
        if code == REFUSED:
            pause_s = _REFUSED_S
        elif self._met_another:
            pause_s = max(pause_s, _OTHER_S)
        elif lasted_s > _LONGEST_S:
            pause_s = 0.0
        self._not_before = now + pause_s

    def _start(self) -> None:
        self._started_at = self._clock()
        try:
            reader, writer = os.pipe()
        except OSError:  # as without an agent; it is tried again
            return
        command = [sys.executable, "-P", "-m", "ucm.agent", "--problem-fd", str(writer)]
        command += ["--cpus", format_cpulist(engine_cpus())]
        env = {name: os.environ[name] for name in os.environ.keys() - _BINDING}
        try:
            self._process = _Agent(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(writer,),
                env=env,
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
