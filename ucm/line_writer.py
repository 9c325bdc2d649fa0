# SPDX-License-Identifier: Apache-2.0
"""
Lines written on a thread of their own, so that who logs never waits.

Standard error may be a pipe that nobody reads, and a disk may stand still. What is put
waits in a buffer of bounded size; beyond it lines are dropped and counted, and a line
says how many as soon as one can be written again.

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

__all__ = ["MAX_CHARS", "DescriptorSink", "LineWriter", "Sink", "TextSink"]

MAX_CHARS: Final = 4 << 20
"""The most text that waits."""
_RETRY_MS: Final = 1000
_EXIT_S: Final = 1.0


class Sink(Protocol):
    """Where lines go; only the writer's thread uses it."""

    def write(self, text: str) -> None:
        """Write, or lose, whole lines. May block."""

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

    def write(self, text: str) -> None:
        """Write; what cannot be written, on a full disk or into a closed pipe, is lost."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody has made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_RETRY_MS)
            except OSError:
                return

    def close(self) -> None:
        """Close it if it is ours."""
        if self._is_ours:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)


class TextSink:
    """A text stream of somebody else's that has no descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write, or lose what a stream that is closed or full does not take."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def close(self) -> None:
        """Leave it open."""


class _Buffer:
    """What a writer and its thread share; the thread keeps no writer alive."""

    def __init__(self, sink: Sink, tell_dropped: Callable[[int], str]) -> None:
        self.num_dropped = 0
        self._sink = sink
        self._tell_dropped = tell_dropped
        self._is_closed = False
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
                self._dropped += 1
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_chars += len(line)
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ucm-log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had now; the next line tries again
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
                self._num_chars = 0
            if not lines:
                self._sink.close()
                return
            if dropped:
                lines.append(self._tell_dropped(dropped))
            self._sink.write("".join(lines))

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
        weakref.finalize(self, self._buffer.end)  # its thread ends with its owner

    @property
    def num_dropped(self) -> int:
        """Lines that were lost for want of room, since the start; any thread."""
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
