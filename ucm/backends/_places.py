# SPDX-License-Identifier: Apache-2.0
"""
Directories that a backend may fill: made by us, or marked as ours, else left alone.

A directory is ours by a small file, its *manifest*, which is written before anything else. In
a directory that has other things and no manifest nothing is changed (R-24). Several processes,
of whatever machines, may come to one at the same time: the first one's manifest counts for all.
"""

import errno
import fcntl
import os
import secrets
import shlex
import stat
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep
from typing import TypeVar

import msgspec

from ucm.decoding import DECODE_ERRORS
from ucm.errors import ConfigError

__all__ = ["Head", "claim", "give_name", "is_claimed", "lock", "path_error"]

_MOST_TEXT = 1 << 16
_TRIES, _PAUSE_S = 4, 0.05
"""To read a manifest that another machine may just have written."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Head(msgspec.Struct, frozen=True):
    """What every manifest says: whose directory it is, and how what is in it is to be read."""

    kind: str
    schema: int


_M = TypeVar("_M", bound=Head)


def path_error(key: str, path: Path, problem: str, remedy: str = "") -> ConfigError:
    """Return the error for a directory that cannot be used."""
    return ConfigError(key, str(path), problem, remedy or "Use another directory.")


def claim(path: Path, name: str, mine: _M, key: str, left: Collection[str] = ()) -> _M:
    """
    Make sure that a directory is ours; make it where there is none.

    Args:
        path: The directory.
        name: Of its manifest, such as ``ucm-disk.json``.
        mine: What a new one says.
        key: The setting that named the directory.
        left: Names that are ours without a manifest, as it had one before.

    Returns:
        What the manifest says.

    Raises:
        ConfigError: It belongs to somebody else.
        OSError: It cannot be used.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_claimed(path, name, key, left):
        _write_new(path / name, msgspec.json.encode(mine))
    return _read(path / name, mine, key)


def is_claimed(path: Path, name: str, key: str, left: Collection[str] = ()) -> bool:
    """
    Return whether a directory has its manifest; False: it is free, or ours as ``claim`` says.

    Changes nothing.

    Raises:
        ConfigError: It belongs to somebody else.
        OSError: It cannot be used.
    """
    _check_owner(path, key)
    if _has(path / name):
        return True
    there = os.listdir(path)
    others = [each for each in there if not each.startswith(name) and each not in left]
    if others and name not in there and not _has(path / name):  # nor came meanwhile
        raise path_error(
            key,
            path,
            f"it has {min(others)!r}, but no {name}: nothing in it was changed",
            f"Give it a directory of its own, such as {path / 'ucm'}.",
        )
    return False


def give_name(temporary: Path | str | bytes, path: Path | str | bytes) -> bool:
    """
    Let a file that is whole be found, in one step.

    It has its temporary name behind that, too, unless the file system has no links: then it
    takes the place of one that is there.

    Returns:
        False if a file with that name was there, and has stayed.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)
    return True


def lock(path: Path, names: Iterable[str], key: str) -> list[int]:
    """
    Lock files of a directory that is ours for as long as their descriptors are open.

    Raises:
        ConfigError: Another process, or another part of this one, has one.
    """
    fds = list[int]()
    with ExitStack() as undo:
        for name in names:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fds.append(os.open(path / name, flags, 0o600))
            undo.callback(os.close, fds[-1])
            try:
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                problem = f"somebody else uses it ({exc})"
                raise path_error(key, path, problem, "Give each one its own.") from exc
        undo.pop_all()
    return fds


def _has(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode) if path.exists() else False


def _write_new(path: Path, data: bytes) -> None:
    """
    Make a file, all of it or nothing; somebody else's that came first stays.

    A loss of power takes nothing of it along: what outlasts that would be nobody's.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o644), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            give_name(temporary, path)
            _keep_names(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _keep_names(folder: Path) -> None:
    """Have names outlast a loss of power, where the file system can do so."""
    with suppress(OSError):  # some take no such call, and some may not be read
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _read(path: Path, mine: _M, key: str) -> _M:
    """Read a manifest; one that is not whole again, as whoever made it may be writing."""
    for _ in range(_TRIES - 1):
        try:
            return _read_once(path, mine, key)
        except (FileNotFoundError, *DECODE_ERRORS):
            sleep(_PAUSE_S)
    try:
        return _read_once(path, mine, key)
    except DECODE_ERRORS as exc:
        raise path_error(
            key, path.parent, f"its {path.name} is not ours ({exc})"
        ) from exc


def _read_once(path: Path, mine: _M, key: str) -> _M:
    with path.open("rb") as file:
        text = file.read(_MOST_TEXT)
    head = msgspec.json.decode(text, type=Head)
    if head.kind == mine.kind and head.schema != mine.schema:
        raise path_error(
            key,
            path.parent,
            f"another release made it: its schema is {head.schema}, not {mine.schema}",
            "Use another directory, or remove this one.",
        )
    told = msgspec.json.decode(text, type=type(mine))
    if head.kind != mine.kind:
        raise path_error(key, path.parent, f"its {path.name} is of a {head.kind!r}")
    return told


def _check_owner(path: Path, key: str) -> None:
    info = path.stat()
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        raise path_error(key, path, f"it belongs to user {info.st_uid}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise path_error(
            key,
            path,
            f"it has mode {mode:04o}: others may write to it, and could put blocks there "
            "that no model has computed",
            f"If nobody else has used it, run: chmod go-w {shlex.quote(str(path))}.",
        )
