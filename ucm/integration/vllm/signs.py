# SPDX-License-Identifier: Apache-2.0
"""
What an engine's processes leave for its front end, for when no step tells of them.

Small files in memory, in a directory of this user's own, named after the engine's id,
which the engine and its front end both know. What is in them is taken as numbers only.
A file has its name when it is whole, and goes when its process ends; what the killed have
left is swept away by a later one.
"""

import contextlib
import hashlib
import itertools
import os
import re
import stat
from pathlib import Path
from typing import Final

import msgspec

__all__ = [
    "DIRECTORY",
    "VERSION",
    "Sign",
    "leave",
    "name_of",
    "read_signs",
    "sweep",
    "sweep_former",
]

DIRECTORY: Final = Path(f"/dev/shm/ucm-vitals-{os.getuid()}")
VERSION: Final = 1
_SWEEP_S: Final = 600.0
_FORMER_S: Final = 15.0
"""Without a word for so long is none that lives; sooner than it would count as hung."""
_MOST_BYTES: Final = 64 << 10
_MOST_FILES: Final = 4096
_NUMBERS = itertools.count()
_NAME: Final = re.compile("[0-9a-f]{16}-[a-z0-9-]{1,64}-[0-9]+-[0-9]+([.]new)?")
"""Of ours, as ``name_of`` makes them; nothing else is swept away."""


class Sign(msgspec.Struct, frozen=True):
    """
    What one process left.

    Args:
        v: Version of the format.
        at: On the machine's monotonic clock, in seconds.
        gauges: By the texts of ``sample_key``.
    """

    v: int
    at: float
    gauges: dict[str, float]


def name_of(engine_id: str, role: str) -> str:
    """Return a name for what a process leaves; an engine may have a connector twice."""
    return f"{_prefix(engine_id)}-{role}-{os.getpid()}-{next(_NUMBERS)}"


def _prefix(engine_id: str) -> str:
    return hashlib.sha256(engine_id.encode("utf-8", "replace")).hexdigest()[:16]


def _is_ours(directory: Path) -> bool:
    """Return whether only this user can have put something there."""
    try:
        info = directory.lstat()
    except OSError:
        return False
    is_closed = not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and is_closed


def read_signs(engine_id: str, directory: Path = DIRECTORY) -> list[Sign]:
    """Return what the processes of an engine left; what makes no sense is passed over."""
    signs = map(_read, _files(directory, _prefix(engine_id)))
    return [sign for sign in signs if sign is not None and sign.v == VERSION]


def _files(directory: Path, prefix: str) -> list[Path]:
    """Return what lies there of an engine; nothing of a directory open to others."""
    if not _is_ours(directory):
        return []
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        names.extend(entry.name for entry in itertools.islice(entries, _MOST_FILES))
    return [
        directory / name
        for name in names
        if name.startswith(prefix) and not name.endswith(".new")
    ]


def _read(path: Path) -> Sign | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=Sign)
    except (OSError, msgspec.DecodeError):
        return None


def leave(path: Path, sign: Sign) -> None:
    """
    Put a file in its place; a reader sees the former one or this.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(path.parent):
        return
    new = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(sign))
    new.replace(path)


def sweep(path: Path) -> None:
    """Take away what is older than *path* by far; who lives leaves a new one at once."""
    if not _is_ours(path.parent):
        return
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        now = path.stat().st_mtime
        for entry in itertools.islice(entries, _MOST_FILES):
            is_ours = _NAME.fullmatch(entry.name) is not None
            if is_ours and entry.stat(follow_symlinks=False).st_mtime < now - _SWEEP_S:
                os.unlink(entry.path)


def sweep_former(path: Path, began: float, now: float) -> None:
    """
    Take away what an engine of the same id left that was killed.

    An id may be a setting, and then the next engine has it as well: a sign of the dead
    would say for good that it hangs. One that hangs itself has left one since it began.

    Args:
        path: Of a process of the engine that lives.
        began: When that began, on the clock of ``Sign.at``.
        now: On the same clock.
    """
    for other in _files(path.parent, path.name.partition("-")[0]):
        sign = _read(other)
        if sign is not None and sign.at < min(began, now - _FORMER_S):
            with contextlib.suppress(OSError):
                other.unlink()
