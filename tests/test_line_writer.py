# SPDX-License-Identifier: Apache-2.0
"""R-22: lines are written on a thread of their own, and who puts them never waits."""

import errno
import gc
import io
import os
import queue
import threading

import pytest

from ucm import line_writer
from ucm.line_writer import DescriptorSink, LineWriter, TextSink

TIMEOUT = 60.0


class GatedSink:
    """Keeps what is written; each write waits at a gate, as at a disk that stands still."""

    def __init__(self):
        self.reached, self.gate = threading.Event(), threading.Event()
        self.texts, self.is_closed = [], False

    def write(self, text):
        """Keep a text behind the gate."""
        self.reached.set()
        assert self.gate.wait(TIMEOUT)
        self.texts.append(text)
        return 0

    def close(self):
        """Take note."""
        self.is_closed = True


@pytest.fixture
def sink():
    """Return a sink whose gate opens behind the test."""
    sink = GatedSink()
    yield sink
    sink.gate.set()


def note(count):
    """Return the line of dropped ones."""
    return f"{count} dropped\n"


class TestLineWriter:
    def test_lines_are_written_in_order_and_the_sink_closed_behind_them(self, sink):
        """Nothing of what was put is lost by the end."""
        writer = LineWriter(sink, note)
        sink.gate.set()
        for number in range(100):
            writer.put(f"{number}\n")
        assert writer.close(TIMEOUT)
        assert [f"{number}" for number in range(100)] == "".join(sink.texts).split()
        assert sink.is_closed

    def test_nobody_waits_and_dropped_lines_are_counted_where_they_were(
        self, sink, monkeypatch
    ):
        """R-22, R-73: while a write hangs, lines wait up to the bound, others are dropped; what
        is written later says so in their place."""
        monkeypatch.setattr(line_writer, "MAX_CHARS", 4)
        writer = LineWriter(sink, note)
        writer.put("a\n")
        assert sink.reached.wait(TIMEOUT)
        for line in ("b\n", "c\n", "d\n", "e\n"):
            writer.put(line)
        sink.gate.set()
        assert writer.close(TIMEOUT)
        assert ["a\n", "b\nc\n2 dropped\n"] == sink.texts
        assert 2 == writer.num_dropped

    def test_close_has_a_deadline(self, sink):
        """R-22: an end that is held up says so; the thread writes on when it can."""
        writer = LineWriter(sink, note)
        writer.put("a\n")
        assert sink.reached.wait(TIMEOUT)
        assert not writer.close(0)
        assert not sink.is_closed
        sink.gate.set()
        assert writer.close(TIMEOUT)
        assert sink.is_closed

    def test_unused_writer_has_no_thread(self, sink):
        """A log that is off costs nothing; its sink is closed once."""
        before = threading.active_count()
        writer = LineWriter(sink, note)
        assert before == threading.active_count()
        assert writer.close(0)
        assert sink.is_closed

    def test_line_behind_the_end_is_lost(self, sink):
        """What comes too late starts no thread and touches no closed file."""
        writer = LineWriter(sink, note)
        writer.close(0)
        writer.put("a\n")
        assert [] == sink.texts

    def test_thread_of_a_writer_that_nobody_keeps_ends(self, sink):
        """A log that was dropped without an end leaves no thread."""
        sink.gate.set()
        writer = LineWriter(sink, note)
        writer.put("a\n")
        thread = writer._buffer._thread
        del writer
        gc.collect()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        assert ["a\n"] == sink.texts

    def test_thread_that_cannot_be_had_is_tried_again(self, sink, monkeypatch):
        """A process that has reached its limit of threads loses nothing by it."""

        def refuse(_):
            raise RuntimeError("can't start new thread")

        sink.gate.set()
        writer = LineWriter(sink, note)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            writer.put("a\n")
        writer.put("b\n")
        assert writer.close(TIMEOUT)
        assert "a\nb\n" == "".join(sink.texts)

    def test_line_is_made_at_intervals_although_nobody_logs(self, sink):
        """R-72: it is due also where the thread waits for a line already, and nothing is
        written where there is nothing to say."""
        said = iter(("", "one\n", "two\n"))
        is_over = threading.Event()

        def make():
            if line := next(said, None):
                return line
            if line is None:
                is_over.set()
            return ""

        sink.gate.set()
        writer = LineWriter(sink, note)
        writer.put("a\n")
        assert sink.reached.wait(TIMEOUT)
        writer.every(0.001, make)
        assert is_over.wait(TIMEOUT)
        assert writer.close(TIMEOUT)
        assert ["a\n", "one\n", "two\n"] == sink.texts

    def test_lines_that_a_disk_does_not_take_are_told(self):
        """R-73: a disk that is full for a while costs its lines; the next one that it takes
        says how many, and no more."""

        class Disk(GatedSink):
            lost = 0

            def write(self, text):
                if self.lost:
                    refused.put(text)
                    return text.count("\n")
                return super().write(text)

        refused, disk = queue.SimpleQueue(), Disk()
        disk.gate.set()
        writer = LineWriter(disk, note)
        disk.lost = True
        for line in ("a\n", "b\n", "c\n"):
            writer.put(line)
            assert refused.get(timeout=TIMEOUT).startswith(line)
        disk.lost = False
        writer.put("d\n")
        assert writer.close(TIMEOUT)
        assert ["d\n3 dropped\n"] == disk.texts
        assert 3 == writer.num_dropped

    def test_forked_child_writes_its_own_lines_only(self, sink):
        """R-22: a child that was forked while a write hung, and the buffer was in use,
        neither waits for the parent's thread nor repeats its lines."""
        reader, writer_end = os.pipe()
        writer = LineWriter(sink, note)
        writer.put("hangs\n")
        assert sink.reached.wait(TIMEOUT)
        writer.put("parent\n")
        with writer._buffer._changed:  # as if another thread were in the middle of it
            child = os.fork()
            if not child:
                writer._buffer._sink = DescriptorSink(writer_end, is_ours=True)
                writer.put("child\n")
                os._exit(0 if writer.close(TIMEOUT) else 1)
        os.close(writer_end)
        assert 0 == os.waitpid(child, 0)[1]
        with os.fdopen(reader) as lines:
            assert "child\n" == lines.read()
        sink.gate.set()
        assert writer.close(TIMEOUT)
        assert ["hangs\n", "parent\n"] == sink.texts


class TestSinks:
    def test_descriptor_that_is_ours_is_closed_and_no_other(self, tmp_path):
        """The host's standard error outlives our log."""
        for is_ours in (True, False):
            descriptor = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
            sink = DescriptorSink(descriptor, is_ours=is_ours)
            sink.write("a\n")
            sink.close()
            if is_ours:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(descriptor)
            else:
                os.close(descriptor)
        assert "a\n" == (tmp_path / "log").read_text()

    def test_closed_pipe_and_full_disk_are_nobodys_problem(self):
        """Lines that cannot be written are lost; whoever logs does not notice."""
        reader, writer = os.pipe()
        os.close(reader)
        sink = DescriptorSink(writer, is_ours=True)
        assert 2 == sink.write("a\nb\n")
        sink.close()
        sink.close()

        class Full(io.StringIO):
            def write(self, _):
                raise OSError(errno.ENOSPC, "no space left")

        assert 1 == TextSink(Full()).write("a\n")
        closed = io.StringIO()
        closed.close()
        TextSink(closed).write("a\n")

    def test_pipe_that_does_not_block_is_waited_for(self):
        """R-22: somebody has made the pipe non-blocking; what did not fit is written
        when it is read."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        text = "x" * (1 << 20) + "\n"
        sink = DescriptorSink(writer, is_ours=True)

        def write():
            sink.write(text)
            sink.close()

        thread = threading.Thread(target=write)
        thread.start()
        with os.fdopen(reader) as lines:
            assert text == lines.read()
        thread.join(TIMEOUT)
