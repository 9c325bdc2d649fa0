# SPDX-License-Identifier: Apache-2.0
"""How an engine starts its node's agent, without any of the agent's code in the engine."""

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

import msgspec

from ucm.affinity import engine_cpus, format_cpulist
from ucm.agent.dialing import own_alone
from ucm.config import UCMConfig, environment_without

__all__ = ["REFUSED", "TAKEN", "Launcher", "Pauses"]

REFUSED: Final = 2
"""Exit code of an agent that cannot be used as it is set."""
TAKEN: Final = 3
"""Of one that nobody's engine has started, where the slab has an agent already."""
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
_KEEPER: Final = """
import os, socket, sys
own = socket.socket(fileno=int(sys.argv[1]))
if os.fork():
    os._exit(0)
own.set_inheritable(False)
try:
    while True:
        cpus, (settings, told), *_ = socket.recv_fds(own, 4096, 2)
        if pid := os.fork():
            os.close(settings)
            os.close(told)
            own.send(b"%d" % pid)
            os.waitpid(pid, 0)
        else:
            os.dup2(settings, 0)
            os.close(settings)
            os.set_inheritable(told, True)
            command = [*sys.argv[2:], "--engine-fd", str(told), "--cpus", cpus.decode()]
            os.execv(command[0], command)
except (OSError, ValueError):
    pass  # who wanted agents is gone
"""
_BETWEEN_S: Final = 30.0
"""For a process that only starts another; the client's thread waits, and no engine."""
_MOST_PID: Final = 32
_DIES: Final = "one dies as it starts: its own log says why, or the kernel's where memory was short"
_DIED: Final = -1
"""Stands for the exit code of an agent that said none."""


class _Keeper:
    """
    Starts agents, and is there when they end; nobody's child, nor are they the engine's.

    vLLM kills whatever descends from its processes when it ends. An agent without a parent is left
    to the first process, which in a container may be an engine's server: that leaves each that has
    ended in the table of processes for good, until no thread can be started. So the parent is a
    process that does nothing else, of which one lasts as long as this, and its agent.

    Args:
        environment: The agents'.

    Raises:
        OSError: It cannot be started.
        subprocess.SubprocessError: Likewise.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own = own_alone(own)
        weakref.finalize(self, self._own.close)
        self._own.settimeout(_BETWEEN_S)
        with its:
            command = [sys.executable, "-I", "-S", "-c", _KEEPER, str(its.fileno())]
            subprocess.run(
                [*command, sys.executable, "-P", "-m", "ucm.agent"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                env=environment,
                start_new_session=True,
                timeout=_BETWEEN_S,
                check=True,
            )

    def start(self, settings: int, told: int) -> int:
        """
        Start an agent that reads one file and writes to another; return its process.

        Raises:
            OSError: The keeper is gone, as it got no process for it, or is stopped.
        """
        cpus = format_cpulist(engine_cpus()).encode()
        socket.send_fds(self._own, [cpus], [settings, told])
        if not (pid := self._own.recv(_MOST_PID)):
            raise ConnectionError("the agents' parent is gone")
        return int(pid)


def _environment() -> dict[str, str]:
    """
    Return the agents', who find the modules that this process finds, and in the same order.

    It may have them from elsewhere than a new one would: what runs it, or itself, has put places
    into ``sys.path``, or had it not listen to ``PYTHONPATH``.
    """
    told = environment_without(_BINDING)
    given = "" if sys.flags.ignore_environment else told.get("PYTHONPATH", "")
    # Imports pass over what is no text there, too.
    own = (each for each in list[object](sys.path) if isinstance(each, str))
    # An empty one is where both are; of what is given it may be nothing.
    places = dict.fromkeys([*own, *filter(None, given.split(os.pathsep))])
    return told | {"PYTHONPATH": os.pathsep.join(places)}


class _Agent:
    """
    One that was started.

    What is known of it comes through a pipe that it holds open as long as it lives: its exit code,
    and why it cannot be used.

    Args:
        keeper: Starts it.
        settings: What it reads; travels by standard input, as it may hold secrets.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, keeper: _Keeper, settings: bytes) -> None:
        self.problem = ""
        self._said = b""
        self._code: int | None = None
        self._lock = threading.Lock()
        ours, its = socket.socketpair()
        self._reader, writer = os.pipe()
        self._close = weakref.finalize(self, os.close, self._reader)
        os.set_blocking(self._reader, False)
        with open(writer, "wb") as told, ours, its:
            self.pid = keeper.start(its.fileno(), told.fileno())
            ours.settimeout(_BETWEEN_S)
            ours.sendall(settings)
            ours.shutdown(socket.SHUT_WR)  # also where another thread has forked

    def poll(self) -> int | None:
        """Return its exit code; None while it lives. Any thread."""
        with self._lock:
            while self._code is None:
                try:
                    said = os.read(self._reader, _MOST_TEXT)
                except BlockingIOError:
                    return None
                self._said += said
                if not said:
                    self._close()
                    code, _, self.problem = self._said.decode(
                        errors="replace"
                    ).partition("\n")
                    self._code = int(code) if code.isdecimal() else _DIED
            return self._code


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

    It is in a session of its own, and no child of the engine's (``_Keeper``): what ends the engine
    does not end it. One that refuses its settings says why, and is not started anew for a while. One that
    dies soon, again and again, is started less and less often. One that ends at once, well, has
    met another engine's, which is waited for. Its CPUs are the engine's, not those of the rank
    that happens to start it: on one core with a rank that polls, it was seen to get no turn in
    half a minute.

    Args:
        config: As the engine has it.
        clock: In seconds.
    """

    def __init__(
        self, config: UCMConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = msgspec.json.encode(config)
        self._clock = clock
        self._keeper: _Keeper | None = None
        self._agent: _Agent | None = None
        self._is_over = False
        self._started_at = self._not_before = 0.0
        self._starts = Pauses()
        self._met_another = False

    def is_coming(self) -> bool:
        """Return whether an agent that was started, ours or another's, is on its way."""
        if self._agent is None:
            return False
        now = self._clock()
        if self._agent.poll() is None:
            return now < self._started_at + _COMING_S
        return self._met_another and now < self._not_before

    def __call__(self) -> str:
        """
        Start one, unless the one that was started is there. Blocks for a moment.

        Returns:
            Why the one before could not be used, or none can be started; empty if it could.
        """
        problem = ""
        if self._agent is not None:
            code = self._agent.poll()
            if code is None:
                return ""
            if not self._is_over:
                self._is_over = True
                self._note_end(self._agent, code)
            problem = self._agent.problem
        if self._clock() >= self._not_before:
            problem = self._start() or problem
        return problem

    def _note_end(self, agent: _Agent, code: int) -> None:
        """Decide when the next one is started."""
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
        elif code != 0:
            agent.problem = _DIES
        self._not_before = now + pause_s

    def _start(self) -> str:
        """Start one; return why none can be."""
        self._started_at = self._clock()
        try:
            environment = _environment()
            if self._keeper is None or self._keeper.environment != environment:
                self._keeper = _Keeper(environment)
            self._agent = _Agent(self._keeper, self._settings)
            self._is_over = False
        except (OSError, subprocess.SubprocessError) as exc:
            # As without an agent; it is tried again, by another keeper.
            self._keeper = None
            why = exc if isinstance(exc, OSError) else type(exc).__name__
            return f"none can be started: {why}"
        return ""
