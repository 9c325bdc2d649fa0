# SPDX-License-Identifier: Apache-2.0
"""
Threads that make blocking calls for a loop, and may hang in them.

Their number is bounded whatever happens. Batches take turns item by item, so that a long one
does not keep a short one waiting; those of one row come one after the other. Threads are daemons:
one that hangs in the kernel does not hold up the end of the process.

Threading: ``run`` and ``aclose`` on the loop; all else that is not private, too.
"""

import asyncio
import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio

from ucm.backends._gate import Gate

__all__ = ["Crew", "Job", "Scratch"]

_Item = TypeVar("_Item")
_T = TypeVar("_T")


class Scratch(threading.local):
    """
    Memory of a thread, from a page on, as much as it asked for at most.

    A call that hangs may write to it whenever it likes.
    """

    _view = memoryview(b"")

    def get(self, nbytes: int) -> memoryview:
        """Return so much memory; what was in it is not cleared."""
        if len(self._view) < nbytes:
            self._view = memoryview(mmap.mmap(-1, nbytes))
        return self._view[:nbytes]


class _Batch(Generic[_Item, _T]):
    """Items that threads work on, and what came of them."""

    def __init__(
        self,
        items: Sequence[_Item],
        work: Callable[[_Item], _T],
        results: "list[_T] | list[_T | None]",
        nbytes: int = 0,
        before: "_Batch[Any, Any] | None" = None,
    ) -> None:
        self._items = items
        self.nbytes = nbytes
        self.before = before
        """The one that comes before it in its row."""
        self._work = work
        self._results: Any = results
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._next = 0
        self._num_entered = 0
        """Who will begin with an item each, as soon as there is room for it."""
        self.num_working = 0
        self.gate = Gate()
        """To the memory of whoever waits for it."""
        self.error: Exception | None = None
        self.over = anyio.Event()
        """Nobody works on it any more, and nobody will."""

    def row(self) -> "list[_Batch[Any, Any]]":
        """Return those of its row with whose items it is to be begun before its own, and itself."""
        line: list[_Batch[Any, Any]] = [self]
        while (before := line[-1].before) is not None:
            if before.is_begun:
                line[-1].before = None  # nor is any one before that
                break
            line.append(before)
        return line[::-1]

    def step(self) -> None:
        """Work on one item, if one is left, on a thread."""
        if self.enter():
            self.proceed()

    def enter(self) -> bool:
        """Return whether an item is left for one more thread, which goes on with ``proceed`` then."""
        with self._lock:
            is_left = self._next + self._num_entered < len(self._items)
            self._num_entered += is_left
            return is_left

    def proceed(self) -> None:
        """Work on one item, having entered."""
        with self._lock:
            self._num_entered -= 1
            at = self._next
            if at >= len(self._items):
                return
            self._next += 1
            self.num_working += 1
        try:
            self._results[at] = self._work(self._items[at])
        except BaseException as exc:  # noqa: BLE001 - handed to whoever awaits the batch
            # A panic of native code, which is no Exception, is a bug as others are.
            self.error = exc if isinstance(exc, Exception) else RuntimeError(repr(exc))
        with self._lock:
            self.num_working -= 1
            is_over = self.is_begun and not self.num_working
        if is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.over.set)

    @property
    def is_begun(self) -> bool:
        """Whether somebody has begun with each item, or nobody will with those that are left."""
        return self._next >= len(self._items)

    def stop(self, *, leave: bool) -> bool:
        """
        Let nobody begin with another item; return whether somebody still works.

        Args:
            leave: Let nobody use the caller's memory any more, either. Waits for those
                who just do, which takes as long as a copy.
        """
        with self._lock:
            self._next = len(self._items)
            is_working = self.num_working > 0
        if leave:
            self.gate.leave()
        return is_working


class _Room:
    """
    Lets so many bytes be moved at a time, and more of one item by itself; who came first goes first.

    What moves them may serve all alike. Batches that began together would end together then, and
    nothing would be moved until both were looked at.
    """

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    def within(self, batch: _Batch[Any, Any]) -> None:
        """
        Work on one item as there is room, having entered.

        Without a deadline: whoever waits works on nothing yet.
        """
        wanted = min(batch.nbytes, self._size)
        if not wanted:
            batch.proceed()
            return
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._left >= wanted)
            self._left -= wanted
        try:
            batch.proceed()
        finally:
            with self._changed:
                self._left += wanted
                self._changed.notify()


class Job(Generic[_T]):
    """
    A call that goes on whoever waits for it; made by ``Crew.start``.

    Args:
        work: What is called.
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        self._results: list[_T | None] = [None]
        self.batch: _Batch[None, _T] = _Batch([None], lambda _: work(), self._results)

    @property
    def is_over(self) -> bool:
        """Whether it has an end."""
        return self.batch.over.is_set()

    async def wait(self) -> None:
        """Wait for its end."""
        await self.batch.over.wait()

    @property
    def error(self) -> Exception | None:
        """What the call raised."""
        return self.batch.error

    @property
    def result(self) -> _T | None:
        """What the call returned; None while it has not, or if it raised."""
        return self._results[0]


class Crew:
    """
    A bounded number of threads, started as they are needed.

    Args:
        num_threads: How many at most; fewer do where the system starts no more.
        name: Of the threads.
        most_bytes: Of the items that are worked on at a time; 0: whatever they have.
    """

    def __init__(self, num_threads: int, name: str, most_bytes: int = 0) -> None:
        self.num_threads = num_threads
        self._room = _Room(most_bytes)
        self._name = name
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[_Batch[Any, Any] | None] = SimpleQueue()
        self._at = threading.local()
        """What a thread works on."""
        self._open: set[_Batch[Any, Any]] = set()
        self._rows: dict[str, _Batch[Any, Any]] = {}
        """The last batch of each."""
        self._num_shares = 0
        """Of batches that somebody waits for."""
        self._left: list[_Batch[Any, Any]] = []
        self._jobs: list[Job[Any]] = []
        self._is_closing = False

    @property
    def num_hung(self) -> int:
        """Threads that work for somebody who has gone."""
        self._left = [batch for batch in self._left if batch.num_working]
        return sum(batch.num_working for batch in self._left)

    async def run(
        self,
        items: Sequence[_Item],
        work: Callable[[_Item], _T],
        results: "list[_T] | list[_T | None]",
        *,
        nbytes: int = 0,
        row: str = "",
        leave: bool = False,
    ) -> None:
        """
        Call *work* with each item on some thread; put what it returns into *results*.

        Cancelled, it begins with no further item, and ends when nobody works on one any
        more: what *work* writes to is not written to behind the end of the call. What was
        not done stays in *results* as it was. Once the crew is being closed nothing is begun.

        Args:
            items: Any number.
            work: Called on several threads at once. What it raises is raised here, once
                the others are through.
            results: As long as *items*.
            nbytes: Of each item at most, for ``most_bytes``; 0: it does not count.
            row: With its items it is begun behind those of the calls of this row before it, as they
                would end together otherwise, and nothing be moved until all are looked at; empty:
                it takes turns with all others.
            leave: End at once when cancelled, and begin nothing while all threads hang, or
                are at jobs, which may; *work* uses the caller's memory by way of ``gate``
                only, or does no harm with it.
        """
        if not items or self._is_closing:
            return
        if leave and self.num_hung + self._num_jobs >= self.num_threads:
            return
        batch = _Batch(items, work, results, nbytes, self._rows.get(row))
        shares = min(len(items), self.num_threads)
        self._hire(shares)  # where it raises nobody comes to the batch later
        self._open.add(batch)
        if row:
            self._rows[row] = batch
        for _ in range(shares):
            self._queue.put(batch)
        self._num_shares += shares
        try:
            await batch.over.wait()
        except asyncio.CancelledError:
            is_working = batch.stop(leave=leave)
            self._forget_stopped()
            if is_working:
                if leave:
                    self._left.append(batch)
                else:
                    with anyio.CancelScope(shield=True):
                        await batch.over.wait()
            raise
        finally:
            self._open.discard(batch)
            self._num_shares -= shares
            if self._rows.get(row) is batch:
                del self._rows[row]
        if batch.error is not None:
            raise batch.error

    def start(self, work: Callable[[], _T]) -> "Job[_T]":
        """Call *work* on some thread, whoever waits for it."""
        self._hire(1)
        job = Job(work)
        self._jobs.append(job)
        self._queue.put(job.batch)
        return job

    @property
    def gate(self) -> Gate:
        """To the memory of the caller of ``run``, for *work*."""
        batch: _Batch[Any, Any] = self._at.batch
        return batch.gate

    async def aclose(self, seconds: float = 2.0) -> bool:
        """
        End all threads; False if some hang and were left. Idempotent.

        Calls that are under way end with what was begun by then.
        """
        self._is_closing = True
        for batch in self._open:
            if not batch.stop(leave=False):
                batch.over.set()
        for _ in self._threads:
            self._queue.put(None)
        with anyio.move_on_after(seconds, shield=True):
            while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110
                await anyio.sleep(0.005)  # a thread's end is no event
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    @property
    def _num_jobs(self) -> int:
        """Of those that have no end yet."""
        self._jobs = [job for job in self._jobs if not job.is_over]
        return len(self._jobs)

    def _forget_stopped(self) -> None:
        """Let go of what nobody need begin with: threads that hang would never come to it."""
        with contextlib.suppress(Empty):  # a thread was faster
            for _ in range(self._queue.qsize()):
                batch = self._queue.get_nowait()
                if batch is None or not batch.is_begun:
                    self._queue.put(batch)

    def _hire(self, more: int) -> None:
        """Start threads for so much more; raises RuntimeError where there is none for anything."""
        busy = self._num_shares + self._num_jobs + self.num_hung + more
        wanted = min(self.num_threads, busy)
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more; it is asked again
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            while self._step(batch) and not batch.is_begun:
                if not self._queue.empty():  # else nobody waits, and nobody need wake
                    self._queue.put(batch)
                    break

    def _step(self, turn: _Batch[Any, Any]) -> bool:
        """Work on an item whose turn it is, on a thread; return whether there was one."""
        for batch in turn.row():
            if batch.enter():  # else nobody need wait: none is left for this thread
                self._at.batch = batch
                self._room.within(batch)
                return True
        return False
