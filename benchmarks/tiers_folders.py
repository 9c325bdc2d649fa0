# SPDX-License-Identifier: Apache-2.0
"""
Folders of ``benchmarks.tiers`` in which nobody pays for what was deleted before.

ext4 without a journal gives no inode away for minutes after its file was deleted, and whoever
makes a file passes over each of them in its group, which takes up to eighty times as long as the
rest. So each sample writes to a folder of its own, and what is not needed any more is emptied and
not deleted, until the process ends. Folders side by side are spread over the groups of the file
system, as those at its top are, where it can be told so; and where a file takes long to be made, as
somebody else has deleted some there, another folder is taken.
"""

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Folders", "empty", "folder_in"]

_GET_FLAGS, _SET_FLAGS, _TOP = 0x80086601, 0x40086602, 0x00020000
"""``FS_IOC_GETFLAGS``, ``FS_IOC_SETFLAGS`` and ``FS_TOPDIR_FL``."""

_QUICK_S, _MOST = 40e-6, 32
"""CPU time of making a file that passes over few deleted ones, and folders to look at."""


class Folders:
    """
    A folder for each sample of each side, one after the other.

    Args:
        home: Where they are.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: dict[str, Path] = {}
        self._numbers = itertools.count()
        spread(home)

    def renew(self, side: str) -> Path:
        """Return a new folder of a side, where ``link`` leads; empty the files of the last one."""
        if side in self._last:
            empty(self._last[side])
        folder = min(self._made(side), key=lambda made: made[0])[1]
        new = self._home / f"{side}.new"
        new.symlink_to(folder)
        new.rename(self.link(side))
        self._last[side] = folder
        return folder

    def _made(self, side: str) -> Iterator[tuple[float, Path]]:
        """Make folders until files are made quickly there; yield them, with how long that takes."""
        for _ in range(_MOST):
            outer = self._home / f"{side}-{next(self._numbers)}"
            inner = outer / "blocks"
            inner.mkdir(parents=True)
            seconds = _seconds_of_a_file(outer)
            yield seconds, inner
            if seconds < _QUICK_S:
                return

    def link(self, side: str) -> Path:
        """Return the name that leads to a side's last folder."""
        return self._home / side

    def files(self) -> Iterator[Path]:
        """Yield what the last folders of all sides have."""
        for folder in self._last.values():
            yield from _files_in(folder)


def spread(home: Path) -> None:
    """Have a file system spread the folders of this one, if it can."""
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            flags = bytearray(8)
            fcntl.ioctl(fd, _GET_FLAGS, flags)
            told = int.from_bytes(flags, "little") | _TOP
            fcntl.ioctl(fd, _SET_FLAGS, told.to_bytes(8, "little"))
    finally:
        os.close(fd)


def _seconds_of_a_file(folder: Path) -> float:
    """Return the CPU time that it takes to make a file; leaves some behind."""
    taken = []
    for number in range(3):
        began = time.thread_time()
        os.close(os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        taken.append(time.thread_time() - began)
    return min(taken)


def empty(folder: Path) -> None:
    """Have the files of a folder take no room."""
    for path in _files_in(folder):
        os.truncate(path, 0)


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


@contextlib.contextmanager
def folder_in(directory: Path) -> Iterator[Path]:
    """Give a folder; it is deleted when the process ends, and takes no room from now on."""
    folder = Path(tempfile.mkdtemp(prefix="ucm-tier-", dir=_home(directory)))
    try:
        yield folder
    finally:
        empty(folder)


@functools.cache
def _home(directory: Path) -> Path:
    home = Path(tempfile.mkdtemp(prefix="ucm-tiers-", dir=directory))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    spread(home)
    return home
