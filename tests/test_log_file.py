# SPDX-License-Identifier: Apache-2.0
"""Files of lines are put aside when they are full, and made anew when they are gone."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from ucm.log_file import RotatingFile


@pytest.fixture
def path(tmp_path):
    """Return where the present file is."""
    return tmp_path / "logs" / "ucm.jsonl"


@pytest.fixture
def opened(path):
    """Return what opens files of ten bytes, which are closed behind the test."""
    files = []

    def call(max_bytes=10, number=3):
        files.append(RotatingFile(path, max_bytes=max_bytes, files=number))
        return files[-1]

    yield call
    for file in files:
        file.close()


def texts(path):
    """Return what is in the files, the newest first."""
    names = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, 9))]
    return [name.read_text() for name in names if name.exists()]


@contextmanager
def path_of_another(path):
    """Have another process write to a file, and keep it, until it is killed."""
    code = (
        "import sys; from pathlib import Path; from ucm.log_file import RotatingFile;"
        "file = RotatingFile(Path(sys.argv[1]), max_bytes=10, files=3);"
        "file.write('theirs\\n'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as process:
        assert b"\n" == process.stdout.readline()
        yield process


class TestRotation:
    @pytest.mark.parametrize("together", [True, False])
    @pytest.mark.parametrize(
        ("number", "left"),
        [
            (1, ["7777\n8888\n"]),
            (2, ["7777\n8888\n", "5555\n6666\n"]),
            (9, ["7777\n8888\n", "5555\n6666\n", "3333\n4444\n", "1111\n2222\n"]),
        ],
    )
    def test_lines_stay_whole_and_the_oldest_file_goes(
        self, path, opened, number, left, together
    ):
        """Whether they come in one go or one by one."""
        lines = [f"{each}" * 4 + "\n" for each in range(1, 9)]
        file = opened(number=number)
        for text in ["".join(lines)] if together else lines:
            assert 0 == file.write(text)
        assert left == texts(path)

    def test_line_that_is_longer_than_a_file_has_one_of_its_own(self, path, opened):
        """It is not cut, and nothing waits for room that there will never be."""
        file = opened()
        for text in ("a\n", "b" * 20 + "\n", "c\n"):
            file.write(text)
        assert ["c\n", "b" * 20 + "\n", "a\n"] == texts(path)

    def test_what_a_former_process_left_counts(self, path, opened):
        """A container's process has the same number each time."""
        opened().write("12345678\n")
        opened().write("9\na\n")
        assert ["9\na\n", "12345678\n"] == texts(path)

    def test_two_logs_of_a_process_share_their_files(self, path, opened):
        """Each sees that the other one has put the file aside."""
        first, second = opened(), opened()
        for number in range(4):
            first.write(f"f{number}\n")
            second.write(f"s{number}\n")
        lines = "".join(reversed(texts(path))).split()
        assert [f"{who}{number}" for number in range(4) for who in "fs"] == lines

    def test_process_of_the_same_number_in_another_container_has_files_of_its_own(
        self, path, opened
    ):
        """Of two that put the same files aside, one removed lines that the other had just written."""
        with path_of_another(path) as other:
            file = opened()
            for line in ("aaaaaaaa\n", "bbbbbbbb\n"):
                assert 0 == file.write(line)
            own = path.with_name("ucm-1.jsonl")
            assert ["bbbbbbbb\n", "aaaaaaaa\n"] == texts(own)
            assert ["theirs\n"] == texts(path)
            other.kill()
        opened().write("cccccccc\n")
        assert ["cccccccc\n", "theirs\n"] == texts(path)

    @pytest.mark.parametrize("number", [1, 3])
    def test_files_are_private(self, path, opened, number):
        """Only their owner reads them, whatever the process's mask is."""
        before = os.umask(0)
        try:
            file = opened(number=number)
            for _ in range(4):
                file.write("12345678\n")
        finally:
            os.umask(before)
        modes = {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
        assert {0o600} == modes


class TestLoss:
    @pytest.mark.parametrize("is_moved", [True, False])
    def test_file_that_vanished_is_made_anew(self, path, opened, is_moved):
        """Somebody's own rotation, or cleaning, costs no line that comes later."""
        file = opened(max_bytes=1000)
        file.write("a\n")
        path.rename(path.with_suffix(".kept")) if is_moved else path.unlink()
        assert 0 == file.write("b\n")
        assert "b\n" == path.read_text()

    def test_directory_that_vanished_is_made_anew(self, path, opened):
        """As the file is."""
        file = opened()
        shutil.rmtree(path.parent)
        assert 0 == file.write("b\n")
        assert "b\n" == path.read_text()

    def test_lines_without_a_file_are_counted(self, path, opened):
        """R-73: where none can be made they are lost, until one can."""
        file = opened()
        path.unlink()
        path.mkdir()
        assert 2 == file.write("a\nb\n")
        path.rmdir()
        assert 0 == file.write("c\n")
        assert "c\n" == path.read_text()

    def test_symlink_is_not_followed(self, path, opened):
        """Nobody makes us append to a file of theirs, at a rotation either."""
        file = opened()
        victim = path.with_name("victim")
        victim.write_text("mine\n")
        path.unlink()
        path.symlink_to(victim)
        assert 1 == file.write("a\n")
        assert "mine\n" == victim.read_text()

    def test_line_behind_one_that_was_cut_stands_alone(self, path, opened, monkeypatch):
        """R-73: a disk that is full in the middle of a line spoils no other one."""
        write, calls = os.write, []

        def half(descriptor, data):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "no space left")
            return write(descriptor, data[:3])

        file = opened(max_bytes=1000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            assert 2 == file.write("abcdef\nghi\n")
        assert 0 == file.write("jkl\n")
        assert "abc\njkl\n" == path.read_text()

    def test_line_at_which_a_former_process_was_killed_spoils_no_other_one(
        self, path, opened
    ):
        """A container's process has the same number each time: the first line of the next stands alone."""
        opened(max_bytes=1000).write("a\n")
        opened(max_bytes=1000).write("b\n")
        with path.open("a") as file:
            file.write("cut o")
        opened(max_bytes=1000).write("c\n")
        assert "a\nb\ncut o\nc\n" == path.read_text()

    def test_closed_file_is_closed_once(self, opened):
        """X-07: and its number, which may be another file's by then, left alone."""
        file = opened()
        before = set(os.listdir("/proc/self/fd"))
        file.close()
        file.close()
        assert 1 == len(before - set(os.listdir("/proc/self/fd")))
