# SPDX-License-Identifier: Apache-2.0
"""
Fresh processes for engines that need not import the engine first.

One process imports the engine's modules and starts nothing of them. What is asked for
here forks off it, and so do the processes that an engine calls "spawn" in there. Each
begins in the state in which imports leave a new interpreter, ten seconds earlier.
"""

import atexit
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver, reduction, resource_tracker
from pathlib import Path
from typing import Any

import attrs
import pytest

__all__ = ["Forked", "end_group", "forked", "live_members", "stand_in_for_spawn"]

ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = ["tests.e2e.preloaded"]
_STARTING = threading.Lock()


class _Process(context.ForkServerProcess):
    """
    A process with output, environment and group of whoever starts it.

    The process off which it forks has others; ``spawn`` would pass them on.
    """

    outputs = (1, 2)
    """File descriptors of what is to be its stdout and stderr."""
    leads = False
    """Whether it begins a group of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_group": 0 if self.leads else os.getpgid(0),
            "_environment": dict(os.environ),
            "_directory": os.getcwd(),
            "_descriptors": [reduction.DupFd(output) for output in self.outputs],
        }

    def run(self) -> None:
        # Or a process that forks off a server of forks would start one of its own.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running
        os.setpgid(0, self._group)
        os.chdir(self._directory)
        os.environ.clear()
        os.environ.update(self._environment)
        for output, duplicate in enumerate(self._descriptors, start=1):
            descriptor = duplicate.detach()
            os.dup2(descriptor, output)
            os.close(descriptor)
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()  # as at the end of an interpreter


class _Context(context.ForkServerContext):
    """Stands in for ``spawn``."""

    Process = _Process

    def get_start_method(self, allow_none: bool = False) -> str:
        return "spawn"


def stand_in_for_spawn() -> None:
    """Let ``spawn`` mean a fork here and in all that forks off this process."""
    context._concrete_contexts["spawn"] = _Context()


@attrs.define
class Forked:
    """A process that has been started, and the files that take what it prints."""

    pid: int
    stdout: Path
    stderr: Path
    _process: _Process

    def wait(self, timeout: float) -> int:
        """
        Block until it has ended and return its exit status.

        Raises:
            TimeoutError: It does not end.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return status

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.exitcode is not None

    def first_line(self, start: str, timeout: float) -> str:
        """
        Block until it has printed a line that starts so, and return it.

        Raises:
            TimeoutError: It prints none, or has ended.
        """
        deadline = time.monotonic() + timeout
        while self._process.is_alive() and time.monotonic() < deadline:
            for line in self.stdout.read_text(errors="replace").splitlines(True):
                if line.startswith(start) and line.endswith("\n"):
                    return line
            self._process.join(0.05)
        raise TimeoutError(self.stderr.read_text(errors="replace")[-6000:])


@contextmanager
def forked(
    function: Callable[..., object],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    **arguments: object,
) -> Iterator[Forked]:
    """
    Call a function of a module in a group of which nothing outlives the block.

    Args:
        function: Defined at module level.
        env: Added to the environment of the process.
        log: Takes what it prints, on whichever of both; two files of ours if none.
        arguments: Passed to the function.
    """
    _ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        files = (log or Path(folder) / "stdout", log or Path(folder) / "stderr")
        process = _Process(target=_call, args=(dict(env or {}), function, arguments))
        process.leads = True
        with files[0].open("a") as stdout, files[1].open("a") as stderr:
            process.outputs = (stdout.fileno(), stderr.fileno())
            process.start()
        assert process.pid is not None
        try:
            yield Forked(process.pid, *files, process)
        finally:
            process.kill()  # it may not have begun its group yet
            process.join()
            end_group(process.pid)
            process.close()


def _call(
    env: Mapping[str, str],
    function: Callable[..., object],
    arguments: Mapping[str, object],
) -> None:
    os.environ.update(env)
    function(**arguments)


def _ensure_running() -> None:
    """Start what all others fork off, once; what it imports it finds as we do."""
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with _STARTING, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search)
        forkserver.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()


def end_group(group: int) -> None:
    """Kill what is left of a process group and wait until all of it has ended."""
    with suppress(ProcessLookupError):  # all of them ended by themselves
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while live_members(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def live_members(group: int) -> list[int]:
    """Return the ids of a process group's members; zombies are not alive."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found
