# SPDX-License-Identifier: Apache-2.0
"""
Finds the log files of a directory and reads them line by line.

A file is read up to the size that it has when it is opened, in pieces of bounded size. A
line that is too long or no line of ours is counted and passed over, but for a whole line of
ours at its end; so is a file that is rotated away meanwhile.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import attrs

from ucm.errors import NoLogError
from ucm.story.lines import BEGIN, Line, SchemaError, parse

__all__ = ["MAX_FILES", "MAX_LINE", "LogFile", "Reading", "find_logs", "read_logs"]

MAX_LINE: Final = 1 << 20
"""Bytes of the longest line that is read."""
MAX_FILES: Final = 4096
"""Files that are read; of more, those that were written last."""
_NAME: Final = re.compile(
    r"ucm-([\w-]{1,64}?)-(\d{1,10})\.jsonl(?:\.(\d{1,6})|[.-]\d[\d-]{1,30})?"
    r"(\.gz|\.bz2|\.xz|\.zst)?",
    re.ASCII,
)
"""Others that rotate put a date behind it."""


@attrs.frozen
class LogFile:
    """
    One file of a log.

    Args:
        path: Where it is.
        process: Role and process id of who wrote it.
        age: How many times it was rotated; 0 if a date says when.
        nbytes: Its size when it was found.
        written_s: When it was written last, in Unix time.
        inode: Which it was then.
        is_packed: It is compressed, by its name, and not read.
    """

    path: Path
    process: str
    age: int
    nbytes: int
    written_s: float
    inode: int
    is_packed: bool = False


@attrs.define
class Reading:
    """
    What became of the lines that were read.

    Args:
        files: How many files were read.
        lines: Lines that were understood.
        garbage: Lines that are none of ours, or too long.
        other_schema: Lines of another version of the schema.
        unread_files: Files that vanished, could not be read, or were too many.
        packed_files: Files that are compressed.
    """

    files: int = 0
    lines: int = 0
    garbage: int = 0
    other_schema: int = 0
    unread_files: int = 0
    packed_files: int = 0

    def notes(self) -> list[str]:
        """Return what a reader has to know of what was passed over, as sentences."""
        told = {
            "line(s) are not of this log and were passed over": self.garbage,
            "line(s) are of another version of the schema": self.other_schema,
            "file(s) could not be read, were rotated away, or were too many": self.unread_files,
            "file(s) are compressed and were not read: unpack them first": self.packed_files,
        }
        return [f"{count} {text}" for text, count in told.items() if count]


def find_logs(path: Path) -> list[LogFile]:
    """
    Return the files of a log, of each process the oldest first.

    Args:
        path: A directory of logs, or one file.

    Raises:
        NoLogError: There is none.
        OSError: It cannot be looked at.
    """
    if not stat.S_ISDIR(path.stat().st_mode):
        match = _NAME.fullmatch(path.name)
        return list(_found(path, match)) or _none(path)
    found: list[LogFile] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if match := _NAME.fullmatch(entry.name):
                found.extend(_found(Path(entry.path), match))
    found.sort(key=lambda file: (file.process, -file.age, file.written_s))
    return found or _none(path)


def _found(path: Path, match: "re.Match[str] | None") -> Iterator[LogFile]:
    try:
        info = path.stat()
    except OSError:  # rotated away
        return
    if not stat.S_ISREG(info.st_mode):
        return
    process = f"{match[1]}-{match[2]}" if match else ""
    age = int(match[3] or 0) if match else 0
    file = LogFile(path, process, age, info.st_size, info.st_mtime, info.st_ino)
    yield attrs.evolve(file, is_packed=bool(match and match[4]))


def _none(path: Path) -> list[LogFile]:
    raise NoLogError(
        f"{path} has no log of ucm; set log.directory, and name that directory"
    )


def read_logs(
    files: Iterable[LogFile],
    reading: Reading,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    about: str = "",
) -> Iterator[Line]:
    """
    Yield what the lines of files say.

    Lines that are as we write them and do not have *about* are counted, and not looked into.

    Args:
        files: As ``find_logs`` returns them.
        reading: What became of them is counted here.
        on_bytes: Told how much was read, now and then.
        about: A request, or how it begins; lines of others may be left out.
    """
    word = about.encode(errors="backslashreplace")  # which no plain line has
    found = list(files)
    files = [file for file in found if not file.is_packed]
    reading.packed_files += len(found) - len(files)
    newest = sorted(files, key=lambda file: file.written_s)[-MAX_FILES:]
    kept = {id(file) for file in newest}
    reading.unread_files += len(files) - len(newest)
    for file in files:
        if id(file) in kept:
            yield from _read_file(file, reading, on_bytes, word)


def _read_file(
    file: LogFile, reading: Reading, on_bytes: Callable[[int], None], word: bytes
) -> Iterator[Line]:
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        reading.unread_files += 1
        return
    with open(descriptor, "rb") as stream:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            reading.unread_files += 1
            return
        reading.files += 1
        reading.unread_files += info.st_ino != file.inode  # rotated away meanwhile
        for raw in _raw_lines(stream, info.st_size, on_bytes):
            if raw is None:
                reading.garbage += 1
                continue
            if word and word not in raw and _is_plain(raw):
                reading.lines += 1
                continue
            try:
                line = parse(raw, file.process)
            except SchemaError:
                reading.other_schema += 1
                continue
            except ValueError:
                reading.garbage += 1
                if (behind := _behind(raw, file.process)) is None:
                    continue
                line = behind
            reading.lines += 1
            yield line


def _behind(raw: bytes, process: str) -> Line | None:
    """Return the whole line that stands behind a torn one, or behind another program's text; None if none does."""
    begin = raw.rfind(BEGIN, 1)
    with contextlib.suppress(ValueError):
        return parse(raw[begin:], process) if begin > 0 else None
    return None


def _is_plain(raw: bytes) -> bool:
    """Return whether a line is as we write them: whole, one only, and with nothing escaped."""
    is_whole = raw.startswith(BEGIN) and raw.endswith(b"}\n")
    return is_whole and b"\\" not in raw and raw.find(BEGIN, 1) < 0


def _raw_lines(
    stream: BinaryIO, nbytes: int, on_bytes: Callable[[int], None]
) -> Iterator[bytes | None]:
    """Yield lines up to a size; None for each that is too long, which is not kept."""
    is_inside = False
    while nbytes > 0:
        try:
            piece = stream.readline(min(MAX_LINE, nbytes))
        except OSError:
            return
        if not piece:
            return
        nbytes -= len(piece)
        on_bytes(len(piece))
        was_inside, is_inside = is_inside, not piece.endswith(b"\n")
        if is_inside and nbytes > 0 and not was_inside:
            yield None
        elif not was_inside and not piece.isspace():
            yield piece
