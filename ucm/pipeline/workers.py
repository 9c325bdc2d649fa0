# SPDX-License-Identifier: Apache-2.0
"""
Dedicated copy threads, and how the loop hands work to them.

Threading: ``put`` is called on any thread; jobs run one after the other on the copy thread,
or begin in order on whichever of several is free. When a thread ends, all jobs that no other
runs fail with ``WorkerDiedError``; for any other reason than ``stop`` ``on_death`` is called,
too, on the copy thread.
"""

import contextlib
import functools
from collections.abc import Callable
from queue import Empty
from typing import Any, Final, TypeVar

from ucm.errors import WorkerDiedError
from ucm.threads import SYSTEM, Queue, Threads

__all__ = ["CopyThread"]

_BRIEF_S: Final = 2e-3
"""A job that takes longer gives the interpreter lock up meanwhile, for its bytes."""
_AT_ONCE_S: Final = 5e-5
"""A job that comes later was waited for, without the lock."""

_A = TypeVar("_A")

_Job = tuple[
    Callable[[Any], object], Any, Callable[[Any, WorkerDiedError], None] | None
]


class CopyThread:
    """
    One thread that runs jobs in order, or several that share them.

    Args:
        name: Thread name, seen in debuggers and logs; of several, with a number behind it.
        on_death: Called on the dying thread.
        threads: Where the thread and its queue come from.
        on_start: Called on the thread before its first job.
        count: How many threads.
    """

    def __init__(
        self,
        name: str,
        on_death: Callable[[str], None],
        threads: Threads = SYSTEM,
        on_start: Callable[[], None] = lambda: None,
        count: int = 1,
    ) -> None:
        self.name = name
        self._on_start = on_start
        self._on_death = on_death
        self._jobs: Queue = threads.queue()
        self._over = ""
        """Why a job is not run any more; empty while it is."""
        self._clock, self._give_way = threads.monotonic, threads.give_way
        self.at: list[Any] = [None] * count
        """The argument of the job that each thread is at; None: of none."""
        names = [name] if count == 1 else [f"{name}-{at}" for at in range(count)]
        self._threads = [
            threads.thread(functools.partial(self._main, number), each)
            for number, each in enumerate(names)
        ]

    def start(self) -> None:
        """Start the thread."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the thread end behind the jobs it has. Never blocks."""
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Block up to *timeout* seconds; return whether the thread has ended, or never began."""
        limit = self._clock() + timeout
        begun = [thread for thread in self._threads if thread.is_alive()]
        for thread in begun:
            thread.join(max(0.0, limit - self._clock()))
        return not any(thread.is_alive() for thread in begun)

    def put(
        self,
        function: Callable[[_A], object],
        argument: _A,
        died: Callable[[_A, WorkerDiedError], None] | None = None,
    ) -> None:
        """
        Queue a job for the thread.

        Args:
            function: What to call there; what it raises ends the thread.
            argument: With what.
            died: Called instead if the thread has ended, or ends meanwhile. Without it the
                job cleans up: nobody hears what it raises, and behind the end of the thread
                it runs on whichever thread notices.
        """
        self._jobs.put((function, argument, died))
        if self._over:  # perhaps since just now, behind the thread's last look
            self._fail_jobs(None)

    def _main(self, number: int) -> None:
        clean = False
        job: _Job | None = None
        try:
            self._on_start()
            kept_until = 0.0  # the interpreter lock, as a job that brief has done
            while (job := self._jobs.get()) is not None:
                began = self._clock()
                if began < kept_until and job[2] is not None:
                    self._give_way()  # or a burst of small copies would keep it
                self.at[number] = job[1]
                _run(job)
                self.at[number] = None
                ended = self._clock()
                is_brief = ended < began + _BRIEF_S
                kept_until = ended + _AT_ONCE_S if is_brief else 0.0
            clean = True
        finally:
            self.at[number] = None
            try:
                if not clean:
                    self._over = f"copy thread {self.name} has died"
                    self._on_death(self._over)  # first: nobody is to offer any more
            finally:
                self._over = self._over or f"copy thread {self.name} has ended"
                self._fail_jobs(job)

    def _fail_jobs(self, current: _Job | None) -> None:
        jobs = [] if current is None else [current]
        with contextlib.suppress(Empty):
            while True:
                waiting = self._jobs.get_nowait()
                if waiting is not None:
                    jobs.append(waiting)
        for _, argument, died in jobs:
            if died is not None:
                died(argument, WorkerDiedError(self._over))
        for job in jobs:
            if job[2] is None:
                _run(job)  # cleans up; there is nobody else to do it
        self._jobs.put(None)  # for the next one: it is to begin nothing more


def _run(job: _Job) -> None:
    function, argument, died = job
    if died is not None:
        function(argument)
        return
    try:  # noqa: SIM105 - so that it is seen to catch everything
        function(argument)
    except Exception:  # noqa: BLE001, S110 - cleans up: what it cannot give back is lost
        pass
