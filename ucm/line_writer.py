# SPDX-License-Identifier: Apache-2.0
"""
Lines written on a thread of their own, so that who logs never waits.

Standard error may be a pipe that nobody reads, and a disk may stand still. What is put
waits in a buffer of bounded size; beyond it lines are dropped and counted, as are those
that a sink cannot write, and a line says how many as soon as one can be written again.

Threading: ``put`` from any thread; it takes a lock that is held for a few instructions
only, never during a write. A child process that was forked starts with an empty buffer
and a thread of its own.
"""

import atexit
import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol, TextIO

import attrs

from ucm.affinity import leave_one_cpu

__all__ = ["MAX_CHARS", "DescriptorSink", "LineWriter", "Sink", "TextSink"]

MAX_CHARS: Final = 4 << 20
"""The most text that waits."""
_RETRY_MS: Final = 1000
_EXIT_S: Final = 1.0


class Sink(Protocol):
    """Where lines go; only the writer's thread uses it."""

    def write(self, text: str) -> int:
        """Write whole lines; return how many are lost instead. May block."""

    def close(self) -> None:
        """Give back what is ours."""


class DescriptorSink:
    """
    A file descriptor. No buffer or lock of Python's is held while a write blocks.

    Args:
        descriptor: Of a file, a pipe or a terminal.
        is_ours: Whether to close it.
    """

    def __init__(self, descriptor: int, *, is_ours: bool) -> None:
        self._descriptor = descriptor
        self._is_ours = is_ours
        self._is_torn = False
        """Whether the last line is not whole, and none may stand beside it."""

    def write(self, text: str) -> int:
        """Write; what cannot be, into a closed pipe or to a full disk, is lost."""
        given = text.encode("utf-8", "backslashreplace")
        given = b"\n" + given if self._is_torn else given
        data = memoryview(given)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody has made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_RETRY_MS)
            except OSError:
                if written := given[: -len(data)]:
                    self._is_torn = not written.endswith(b"\n")
                return min(bytes(data).count(b"\n"), text.count("\n"))
        self._is_torn = False
        return 0

    def close(self) -> None:
        """Close it if it is ours."""
        if self._is_ours:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)


class TextSink:
    """A text stream of somebody else's that has no descriptor; all that it has to have is ``write``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose what the stream does not take: it is closed, full, or raises anything else."""
        try:
            self._stream.write(text)
            if hasattr(self._stream, "flush"):
                self._stream.flush()
        except Exception:  # noqa: BLE001 - an object of others, on the log's thread
            return text.count("\n")
        return 0

    def close(self) -> None:
        """Leave it open."""


@attrs.define
class _Regular:
    """What is written at intervals."""

    seconds: float
    make: Callable[[], str]
    due_at: float

    def seconds_left(self) -> float:
        """Return how long it is not due."""
        return max(0.0, self.due_at - time.monotonic())

    def due(self) -> str:
        """Return what is to be written now, if it is due and there is something."""
        if self.seconds_left():
            return ""
        self.due_at = time.monotonic() + self.seconds
        return self.make()


class _Buffer:
    """What a writer and its thread share; the thread keeps no writer alive."""

    def __init__(self, sink: Sink, tell_dropped: Callable[[int], str]) -> None:
        self._sink = sink
        self._tell_dropped = tell_dropped
        self._is_closed = False
        self._regular: _Regular | None = None
        self.num_dropped = 0
        """Lines that were never written, since the start."""
        self.start_afresh()
        _BUFFERS.add(self)

    def start_afresh(self) -> None:
        """Forget lines and thread; in a forked child they are the parent's."""
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._num_chars = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Take a line, or count it as dropped."""
        with self._changed:
            if self._is_closed:
                return
            if self._thread is None:
                self._start()
            if self._num_chars + len(line) > MAX_CHARS:
                self._drop(1)
                return
            self._lines.append(line)
            self._num_chars += len(line)
            self._changed.notify_all()

    def every(self, seconds: float, make: Callable[[], str]) -> None:
        """Write what *make* returns so often; nothing where it returns nothing."""
        with self._changed:
            self._regular = _Regular(seconds, make, time.monotonic() + seconds)
            self._changed.notify_all()

    def _what_to_wait_for(self) -> tuple[Callable[[], bool], float | None]:
        """Return the condition, and for how long at most; under the lock."""
        regular = self._regular

        def is_met() -> bool:
            return bool(self._lines) or self._is_closed or self._regular is not regular

        return is_met, None if regular is None else regular.seconds_left()

    def _drop(self, num_lines: int) -> None:
        self._dropped += num_lines
        self.num_dropped += num_lines

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ucm-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had now; the next line tries again
            self._thread = None

    def _run(self) -> None:
        leave_one_cpu()
        while True:
            with self._changed:
                self._changed.wait_for(*self._what_to_wait_for())
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                self._num_chars = 0
                is_over = self._is_closed and not lines
            if is_over:
                if dropped:  # by the last lines, and there may be room again
                    self._sink.write(self._tell_dropped(dropped))
                self._sink.close()
                return
            if self._regular is not None and (told := self._regular.due()):
                lines.append(told)
            if dropped:
                lines.append(self._tell_dropped(dropped))
            if lines and (lost := self._sink.write("".join(lines))):
                with self._changed:  # the line that tells of dropped ones is lost, too
                    self._drop(lost - bool(dropped))
                    self._dropped += dropped

    def end(self) -> threading.Thread | None:
        """Take no line any more; return the thread that writes what is left."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
            thread = self._thread
        if thread is None and not was_closed:
            self._sink.close()
        return thread


_BUFFERS: "weakref.WeakSet[_Buffer]" = weakref.WeakSet()


def _start_all_afresh() -> None:
    for buffer in list(_BUFFERS):
        buffer.start_afresh()


def _end_all() -> None:
    """Write at the process's end what nobody has closed."""
    limit = time.monotonic() + _EXIT_S
    for thread in [buffer.end() for buffer in list(_BUFFERS)]:
        if thread is not None:
            thread.join(max(0.0, limit - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_start_all_afresh)


class LineWriter:
    """
    Takes lines and never blocks.

    Args:
        sink: Where they go; closed with this, or with its last line.
        tell_dropped: Makes the line that says how many were dropped.
    """

    def __init__(self, sink: Sink, tell_dropped: Callable[[int], str]) -> None:
        self._buffer = _Buffer(sink, tell_dropped)
        self.put = self._buffer.put
        """Take a line that ends with a newline, or drop it. Never blocks."""
        self.every = self._buffer.every
        """Have a line made on the writer's thread at intervals, from the first line on."""
        weakref.finalize(self, self._buffer.end)  # its thread ends with its owner

    @property
    def num_dropped(self) -> int:
        """Lines that were never written, since the start."""
        return self._buffer.num_dropped

    def close(self, timeout: float) -> bool:
        """
        Write what is left, for at most *timeout* seconds; idempotent.

        Returns:
            Whether all was written. If not, its thread goes on as long as the process.
        """
        thread = self._buffer.end()
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()
