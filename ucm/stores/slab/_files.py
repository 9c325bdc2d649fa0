# SPDX-License-Identifier: Apache-2.0
"""
The directory of a slab and the files in it: whose they are, and how they are opened.

Contents::

    slab.json      what the slab is; gets this name last, so without it there is no slab
    slab.json.tmp  the same while the slab is being made: what else is there is ours
    data           the slots, one preallocated file
    index          see the index module; also carries the locks, see the locks module
    keyspaces/     the newest key spaces described, one file each

A directory that holds neither of the first two and is not empty belongs to somebody
else: nothing in it is changed. All files are opened relative to a descriptor of the
directory, so that one replaced meanwhile is not mixed up with it.
"""

import contextlib
import errno
import mmap
import os
import shlex
import stat
from pathlib import Path
from typing import Literal, Self

import attrs
import msgspec

from ucm.config import Durability
from ucm.errors import ConfigError

__all__ = [
    "DATA",
    "INDEX",
    "MANIFEST",
    "MARK",
    "Directory",
    "Geometry",
    "Manifest",
    "foreign",
    "is_in_memory",
    "map_file",
    "path_error",
]

_SCHEMA_VERSION = 2
MANIFEST = "slab.json"
MARK = "slab.json.tmp"
DATA = "data"
INDEX = "index"
_SLOT_ALIGNMENT = 4096
_MOST_TEXT = 1 << 20
_MAX_SLOTS = 2**31 - 1
_FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 64 << 20


@attrs.frozen
class Geometry:
    """How many slots of which size."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def fit(cls, capacity_bytes: int, block_bytes: int) -> Self:
        """
        Cut a capacity into slots.

        Raises:
            ConfigError: Not a single slot fits, or a size is no size.
        """
        if block_bytes < 1:
            raise ConfigError(
                "store.block_bytes",
                block_bytes,
                "a block has at least one byte",
                "Give the size of the layout's largest block.",
            )
        slot_bytes = -(-block_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        num_slots = capacity_bytes // slot_bytes
        if not 1 <= num_slots <= _MAX_SLOTS:
            raise ConfigError(
                "store.capacity",
                capacity_bytes,
                f"{capacity_bytes} bytes // {slot_bytes} bytes a slot (blocks of "
                f"{block_bytes}, rounded up to {_SLOT_ALIGNMENT}) = {num_slots} slots, "
                f"not 1 to {_MAX_SLOTS}",
                f"Give at least {slot_bytes} bytes; many times that is useful.",
            )
        return cls(num_slots, slot_bytes)

    @property
    def data_bytes(self) -> int:
        """Size of all slots."""
        return self.num_slots * self.slot_bytes


class _Head(msgspec.Struct, frozen=True):
    """What every release's ``slab.json`` says."""

    schema: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``slab.json`` says."""

    kind: Literal["ucm-slab"]
    schema: int
    slot_bytes: int
    num_slots: int
    durability: Durability

    @classmethod
    def of(cls, geometry: Geometry, durability: Durability) -> "Manifest":
        """Describe a new slab."""
        return cls(
            "ucm-slab",
            _SCHEMA_VERSION,
            geometry.slot_bytes,
            geometry.num_slots,
            durability,
        )

    def encode(self) -> bytes:
        """Return the text of ``slab.json``."""
        return msgspec.json.encode(self)

    @property
    def geometry(self) -> Geometry:
        """How the slab is cut."""
        return Geometry(self.num_slots, self.slot_bytes)

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
            raise path_error(root, f"{MANIFEST} cannot be opened: {exc}") from exc
        try:
            schema = msgspec.json.decode(text, type=_Head).schema
            if schema != _SCHEMA_VERSION:
                raise path_error(
                    root,
                    f"another release made it: its schema version is {schema}, not "
                    f"{_SCHEMA_VERSION}",
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as exc:
            raise foreign(root, f"its {MANIFEST} is not of a slab ({exc})") from exc

    def require(self, root: Path, wanted: Geometry, durability: Durability) -> None:
        """
        Make sure that the slab in *root* is what was asked for.

        Raises:
            ConfigError: It is not.
        """
        if self.slot_bytes != wanted.slot_bytes:
            raise path_error(
                root,
                f"its slots have {self.slot_bytes} bytes, this layout needs "
                f"{wanted.slot_bytes}",
            )
        if self.num_slots != wanted.num_slots:
            raise ConfigError(
                "store.capacity",
                wanted.data_bytes,
                f"the slab in {root} has {self.num_slots} slots of {self.slot_bytes} "
                f"= {self.num_slots * self.slot_bytes} bytes, asked for "
                f"{wanted.num_slots}",
                f"Ask for {self.num_slots * self.slot_bytes}, or stop all its users "
                "and remove the directory.",
            )
        if self.durability is not durability:
            raise ConfigError(
                "store.durability",
                durability.value,
                f"the slab in {root} was made for {self.durability.value!r}",
                f"Ask for {self.durability.value!r}, or use another path.",
            )


def path_error(root: Path, problem: str) -> ConfigError:
    """Return the error for a directory that cannot be used."""
    return ConfigError(
        "store.path",
        str(root),
        problem,
        "Use another path, or stop all its users and remove the directory.",
    )


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

    def allocate(self, name: str, nbytes: int, *, in_memory: bool) -> None:
        """
        Make a file whose every byte has its place, so that no store to it can fail.

        Raises:
            OSError: There is no room.
        """
        fd = self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, nbytes)
            if in_memory:
                # Through a mapping first: only so does memory come in huge pages.
                map_file(fd, in_memory=True).close()
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)

    def remove(self, *names: str) -> None:
        """Remove files, those that are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def _check_owner(self, info: os.stat_result, name: str) -> None:
        if info.st_uid != os.geteuid():
            raise path_error(self.root, f"{name} belongs to user {info.st_uid}")
        mode = stat.S_IMODE(info.st_mode)
        if mode & _FOREIGN_WRITE:
            who = "everybody" if mode & stat.S_IWOTH else f"group {info.st_gid}"
            raise ConfigError(
                "store.path",
                str(self.root),
                f"{name} has mode {mode:04o}: {who} may write to it, and could put "
                "blocks there that no model has computed",
                "If nobody else has used it, run: chmod -R go-w "
                f"{shlex.quote(str(self.root))}; otherwise remove it. An orchestrator "
                "that widens modes at each start has to leave it alone (Kubernetes: "
                "no fsGroup, or fsGroupChangePolicy: OnRootMismatch and a directory "
                "below the volume's)",
            )


def is_in_memory(fd: int) -> bool:
    """Return whether *fd* lies in a file system that is made of memory."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] == "tmpfs"
    return False


def map_file(fd: int, *, in_memory: bool) -> mmap.mmap:
    """
    Map a whole file, shared.

    Args:
        fd: Open for reading and writing.
        in_memory: Ask for huge pages, and touch every page now, so that none is
            missing later. Of a file on a disk both would read what is not asked for.

    Raises:
        OSError: ``EFAULT`` or ``ENOMEM`` if there is no memory for a page.
    """
    mapping = mmap.mmap(fd, 0)
    if not in_memory:
        return mapping
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    size = len(mapping)
    try:
        for start in range(0, size, _POPULATE_STEP):
            step = min(_POPULATE_STEP, size - start)
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
            mapping.close()
            raise
    return mapping
