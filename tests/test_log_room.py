# SPDX-License-Identifier: Apache-2.0
"""A log whose disk is full for a while: what was lost is counted, and what comes then is whole."""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ucm.line_writer import DescriptorSink, LineWriter, Sink
from ucm.log_file import RotatingFile

TIMEOUT = 60.0


def opened(path: Path) -> Sink:
    """Return what the host's own stream is written to, where it is a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return DescriptorSink(descriptor, is_ours=True)


def rotating(path: Path) -> Sink:
    """Return what a directory of logs is written to."""
    return RotatingFile(path, max_bytes=1 << 20, files=2)


@contextlib.contextmanager
def room(path: Path, nbytes: int) -> Iterator[None]:
    """Let a file have so many bytes more."""
    files = resource.RLIMIT_FSIZE
    before = resource.getrlimit(files)
    resource.setrlimit(files, (path.stat().st_size + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(files, before)


@pytest.mark.parametrize("make", [opened, rotating])
def test_lines_behind_a_cut_one_are_whole_and_the_others_counted(
    tmp_path: Path, make: Callable[[Path], Sink]
) -> None:
    """R-22: the first line behind a full disk stood beside what was left of the last one, which
    no tool reads, and was counted as written; or one too few was counted as lost."""
    path = tmp_path / "log"
    sink = make(path)
    assert 0 == sink.write("a\n")
    with room(path, 5):
        assert 2 == sink.write("bb\nccc\nd\n")
    with room(path, 0):
        assert 1 == sink.write("ee\n")
    with room(path, 5):
        assert 1 == sink.write("ff\ngg\n")
    assert 0 == sink.write("hh\n")
    sink.close()
    assert ["a", "bb", "cc", "ff", "g", "hh"] == path.read_text().splitlines()


def test_lines_that_were_the_last_ones_are_told_of(tmp_path: Path) -> None:
    """R-22: nothing said that a log's end was lost, where no line came behind it."""
    path = tmp_path / "log"
    writer = LineWriter(opened(path), "{} lost\n".format)
    with room(path, 0):
        writer.put("a\n")
        until = time.monotonic() + TIMEOUT
        while not writer.num_dropped:
            assert until > time.monotonic()
    assert writer.close(TIMEOUT)
    assert "1 lost\n" == path.read_text()
