# SPDX-License-Identifier: Apache-2.0
"""
Dedicated copy threads, and how the loop hands work to them.

Threading: ``put`` and ``post`` are called on the loop thread; jobs run one after the
other on the copy thread, and each is told there when it is over. When the thread ends
for any reason other than ``stop``, all its jobs fail with ``WorkerDiedError`` and
``on_death`` is called once, on the copy thread.
"""

import contextlib
from collections.abc import Callable
from queue import Empty
from typing import Any, Generic, TypeVar

from ucm.errors import WorkerDiedError
from ucm.threads import SYSTEM, Queue, Threads

__all__ = ["CopyThread", "Job"]

_A = TypeVar("_A")
_R = TypeVar("_R")


class Job(Generic[_A, _R]):
    """
    One call, and then what it returned or raised.

    Args:
        function: What to call.
        argument: With what.
        done: Called with the job when it is over, as a rule on the copy thread; must
            not block. None: nobody waits for it.
    """

    __slots__ = ("argument", "done", "error", "function", "result")

    def __init__(
        self,
        function: Callable[[_A], _R],
        argument: _A,
        done: "Callable[[Any], None] | None",
    ) -> None:
        self.function = function
        self.argument = argument
        self.done = done
        self.result: _R | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Call the function; its exception travels to whoever waits for the job."""
        try:
            self.result = self.function(self.argument)
        except Exception as exc:  # noqa: BLE001 - carried to the waiting lane, which reports it
            self.error = exc


class CopyThread:
    """
    One thread that runs jobs in order.

    Args:
        name: Thread name, seen in debuggers and logs.
        on_death: Called on the dying thread.
        threads: Where the thread and its queue come from.
        on_start: Called on the thread before its first job.
    """

    def __init__(
        self,
        name: str,
        on_death: Callable[[str], None],
        threads: Threads = SYSTEM,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._on_start = on_start
        self._on_death = on_death
        self._jobs: Queue = threads.queue()
        self._dead = ""
        self._thread = threads.thread(self._main, name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end behind the jobs it has. Never blocks."""
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Block up to *timeout* seconds; return whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def put(self, job: Job[_A, _R]) -> None:
        """
        Queue a job for the thread.

        Its error is ``WorkerDiedError`` if the thread has ended.
        """
        self._jobs.put(job)
        if self._dead:  # perhaps since just now, behind the dying thread's last look
            self._fail_jobs(None)

    def post(self, function: Callable[[_A], _R], argument: _A) -> None:
        """
        Run *function* on the thread; nobody waits for it.

        Behind the end of the thread it runs on whichever thread notices.
        """
        self.put(Job(function, argument, None))

    def _main(self) -> None:
        clean = False
        job: Job[Any, Any] | None = None
        try:
            self._on_start()
            while (job := self._jobs.get()) is not None:
                job.run()
                if job.done is not None:
                    job.done(job)
            clean = True
        finally:
            if not clean:
                self._dead = f"copy thread {self.name} has died"
                self._on_death(self._dead)  # first: nobody is to offer any more
                self._fail_jobs(job)

    def _fail_jobs(self, current: "Job[Any, Any] | None") -> None:
        jobs = [] if current is None else [current]
        with contextlib.suppress(Empty):
            while True:
                waiting = self._jobs.get_nowait()
                if waiting is not None:
                    jobs.append(waiting)
        for job in jobs:
            if job.done is not None:
                job.error = WorkerDiedError(self._dead)
                job.done(job)
        for job in jobs:
            if job.done is None:
                job.run()  # cleans up; there is nobody else to do it
