# SPDX-License-Identifier: Apache-2.0
"""
The directory of a slab and the files in it: whose they are, and how they are opened.

Contents::

    slab.json      what the slab is; gets this name last, so without it there is no slab
    slab.json.tmp  the same while the slab is being made: what else is there is ours
    data           the slots, one file
    arena          who has which part of the data, see the arena module
    index-S.R      of the slots of S bytes, see the index module; R: of which revision
    keyspaces/     the newest key spaces described, one file each
    fates          what became of blocks that are gone, for people; may be missing

A name that ends in ``.new`` is a file that was not finished.

A directory that holds neither of the first two and is not empty belongs to somebody
else: nothing in it is changed. All files are opened relative to a descriptor of the
directory, so that one replaced meanwhile is not mixed up with it.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ucm.config import HugePages
from ucm.decoding import DECODE_ERRORS
from ucm.errors import ConfigError
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._memory import Mount, advise, is_in_memory, mount_of, populate

__all__ = [
    "ARENA",
    "DATA",
    "FATES",
    "INDEX_NAME",
    "MANIFEST",
    "MARK",
    "NEW",
    "Directory",
    "Manifest",
    "forbidden",
    "foreign",
    "map_file",
    "no_access",
    "no_directory",
    "no_parent",
    "path_error",
    "require_memory",
    "seek",
    "too_short",
]

seek = ctypes.PyDLL(None).lseek
"""
Tells the size of an open file, at a third of what ``fstat`` costs.

Of memory it need not give up the interpreter lock, which nobody waits for long enough: to
have it back takes a thousand times as long beside a busy thread. A file that is not open
has a size below zero.
"""
seek.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_int)
seek.restype = ctypes.c_longlong

_SCHEMA_VERSION = 6
_REMOVE = "Use another path, or stop all its users and remove the directory."
_MORE_FILES = "Let this process, or the machine, have more files open (ulimit -n)."
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
MANIFEST = "slab.json"
MARK = "slab.json.tmp"
DATA = "data"
ARENA = "arena"
FATES = "fates"
NEW = ".new"
INDEX_NAME = re.compile(r"index-(\d{4,10})\.(\d+)(?:\.new)?")
"""Slot size and revision, of an index that may not be finished."""
_MOST_TEXT = 1 << 20
_FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Head(msgspec.Struct, frozen=True):
    """What every release's ``slab.json`` says."""

    schema: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``slab.json`` says."""

    kind: Literal["ucm-slab"]
    schema: int
    data_bytes: int
    extent_bytes: int
    revision: int
    """How often it was cut anew; part of the names of its indexes."""

    @classmethod
    def of(cls, geometry: Geometry, revision: int = 0) -> "Manifest":
        """Describe a slab."""
        return cls(
            "ucm-slab",
            _SCHEMA_VERSION,
            geometry.data_bytes,
            geometry.extent_bytes,
            revision,
        )

    def encode(self) -> bytes:
        """Return the text of ``slab.json``."""
        return msgspec.json.encode(self)

    def of_class(self, block_bytes: int) -> Geometry | None:
        """Return the slots for such blocks; None if no extent holds one."""
        return Geometry(self.data_bytes, self.extent_bytes, block_bytes).of_class(
            block_bytes
        )

    def is_class(self, slot_bytes: int) -> bool:
        """Return whether a class has slots of just that size; damaged memory may say anything."""
        geometry = self.of_class(slot_bytes) if slot_bytes > 0 else None
        return geometry is not None and geometry.slot_bytes == slot_bytes

    def index_of(self, slot_bytes: int) -> str:
        """Return the name of a class's index."""
        return f"index-{slot_bytes}.{self.revision}"

    def classes(self, directory: "Directory") -> Iterator[tuple[str, Geometry]]:
        """Yield the indexes that are there, by name, each with how its class is cut."""
        for name in sorted(directory.names()):
            match = INDEX_NAME.fullmatch(name)
            size = int(match[1]) if match else 0
            geometry = self.of_class(size) if size else None
            if geometry is not None and name == self.index_of(geometry.slot_bytes):
                yield name, geometry

    @classmethod
    def read(cls, directory: "Directory") -> "Manifest | None":
        """
        Return what the slab in *directory* is, None where there is none.

        Raises:
            ConfigError: The file is not ours or of another release.
        """
        root = directory.root
        try:
            text = directory.read(MANIFEST)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise no_access(root, f"{MANIFEST} cannot be opened", exc) from exc
        try:
            schema = msgspec.json.decode(text, type=_Head).schema
            if schema != _SCHEMA_VERSION:
                raise path_error(
                    root,
                    f"another release made it: its schema version is {schema}, not "
                    f"{_SCHEMA_VERSION}",
                )
            return msgspec.json.decode(text, type=cls)
        except DECODE_ERRORS as exc:
            raise foreign(root, f"its {MANIFEST} is not of a slab ({exc})") from exc


def path_error(root: Path, problem: str, remedy: str = _REMOVE) -> ConfigError:
    """Return the error for a directory that cannot be used."""
    return ConfigError("store.path", str(root), problem, remedy)


def no_access(root: Path, problem: str, exc: Exception) -> ConfigError:
    """Return the error for a directory of which something cannot be opened, made or used."""
    is_short = isinstance(exc, OSError) and exc.errno in _TOO_MANY
    remedy = _MORE_FILES if is_short else _REMOVE
    return path_error(root, f"{problem}: {exc}", remedy)


def no_parent(root: Path) -> ConfigError:
    """Return the error for a path below a directory that is not there."""
    remedy = f"Make {root.parent} first, or use another path."
    return path_error(root, "its parent does not exist", remedy)


def too_short(root: Path, name: str) -> ConfigError:
    """Return the error for a file of a slab that somebody has cut off."""
    return path_error(root, f"{name} has another size than it should")


def no_directory(root: Path) -> ConfigError:
    """Return the error for a path at which there is something else, or a link."""
    if root.is_symlink():
        remedy = f"Give what it leads to, {root.resolve()}, if that is yours."
        return path_error(root, "it is a symbolic link, not a directory", remedy)
    return path_error(root, "it is not a directory")


def forbidden(root: Path, problem: str) -> ConfigError:
    """Return the error for a path where this user may not make or open what is needed."""
    remedy = f"Use another path, or let user {os.geteuid()} write there."
    return path_error(root, problem, remedy)


def foreign(root: Path, problem: str) -> ConfigError:
    """Return the error for a directory that is somebody else's, for all we know."""
    return ConfigError(
        "store.path",
        str(root),
        f"{problem}: nothing in it was changed",
        f"Give the slab a directory of its own, such as {root / 'ucm'}; if all of this "
        "one is a slab that was damaged, remove it.",
    )


class Directory:
    """
    A slab's directory, held open: what happens to its path does not change which it is.

    Args:
        root: Its path.
        fd: The directory itself; closed by the caller.
    """

    def __init__(self, root: Path, fd: int) -> None:
        self.root = root
        self.fd = fd

    def check(self) -> None:
        """
        Make sure that only this user can have put something into it.

        Raises:
            ConfigError: It belongs to or is open to others.
        """
        self._check_owner(os.fstat(self.fd), "it")

    def is_in_place(self) -> bool:
        """Return whether the path still leads here."""
        try:
            return os.path.samestat(self.root.lstat(), os.fstat(self.fd))
        except OSError:
            return False

    def names(self) -> set[str]:
        """Return what is in it."""
        return set(os.listdir(self.fd))

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """
        Open one of our files; never through a link, never somebody else's.

        Raises:
            ConfigError: It is not a plain file of ours.
            OSError: As ``os.open``.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise path_error(self.root, f"{name} is a symbolic link") from exc
            raise
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise path_error(self.root, f"{name} is not a plain file")
            self._check_owner(info, name)
        except ConfigError:
            os.close(fd)
            raise
        return fd

    def read(self, name: str) -> bytes:
        """Return what a small file of ours holds; errors as those of ``open``."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read(_MOST_TEXT)

    def write(self, name: str, data: bytes) -> None:
        """Make a small file that is not there yet; errors as those of ``open``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(self.open(name, flags), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self.fd)

    def allocate(self, name: str, nbytes: int) -> None:
        """
        Make a file whose every byte has its place, so that no store to it can fail.

        Raises:
            OSError: There is no room.
        """
        fd = self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in the place of another, all of it or nothing."""
        self.remove(name + NEW)
        self.write(name + NEW, data)
        self.rename(name + NEW, name)
        os.fsync(self.fd)

    def rename(self, name: str, wanted: str) -> None:
        """Give a file another name, and the end to whatever had it."""
        os.rename(name, wanted, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, *names: str) -> None:
        """Remove files, those that are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def _check_owner(self, info: os.stat_result, name: str) -> None:
        if info.st_uid != os.geteuid():
            remedy = "Use another path, or run as that user."
            problem = f"{name} belongs to user {info.st_uid}"
            raise path_error(self.root, problem, remedy)
        mode = stat.S_IMODE(info.st_mode)
        if mode & _FOREIGN_WRITE:
            who = "everybody" if mode & stat.S_IWOTH else f"group {info.st_gid}"
            raise ConfigError(
                "store.path",
                str(self.root),
                f"{name} has mode {mode:04o}: {who} may write to it, and could put "
                "blocks there that no model has computed",
                _remedy(self.root, mode),
            )


def _remedy(root: Path, mode: int) -> str:
    """Return what to do about a directory that others may write to."""
    if mode & stat.S_ISVTX:  # such as /tmp: it is meant to be everybody's
        return "Name a directory of your own below it."
    return (
        f"If nobody else has used it, run: chmod -R go-w {shlex.quote(str(root))}; "
        "otherwise remove it. An orchestrator that widens modes at each start has to "
        "leave it alone (Kubernetes: no fsGroup, or fsGroupChangePolicy: OnRootMismatch "
        "and a directory below the volume's)"
    )


def require_memory(root: Path) -> None:
    """
    Make sure that a slab's directory lies in memory, or would if it were made.

    Raises:
        ConfigError: It lies on a disk, or on what is no place for files at all.
        OSError: It cannot be asked.
    """
    if not is_in_memory(root):
        mount = Mount()
        with contextlib.suppress(OSError):  # it need not be told
            mount = mount_of(root)
        raise ConfigError(
            "store.path",
            str(root),
            f"it lies on {mount.kind}, and a slab is memory",
            "Put it below /dev/shm, or on another tmpfs. What is to outlast the machine's "
            "memory goes to a tier below the slab, such as tiers: [{type: disk, path: ...}]",
        )


def map_file(fd: int, *, at_once: bool) -> mmap.mmap:
    """
    Map a whole file, shared.

    Args:
        fd: Open for reading and writing.
        at_once: Ask for huge pages, and touch every page now, so that none is
            missing later.

    Raises:
        OSError: ``EFAULT`` or ``ENOMEM`` if there is no memory for a page.
    """
    mapping = mmap.mmap(fd, 0)
    if at_once:
        memory = np.frombuffer(mapping, dtype=np.uint8)
        advise(memory, HugePages.AUTO)
        populate(memory, fd, 0)
    return mapping
