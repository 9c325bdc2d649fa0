# SPDX-License-Identifier: Apache-2.0
"""
The directory of a slab: who may use it, what is in it, and how it comes to be.

Contents::

    slab.json      what the slab is; written last, so without it there is no slab
    data           the slots, one preallocated file
    index          see the index module
    index.lock     held for microseconds, by whoever changes the index
    open.lock      held while a process creates, joins or leaves the slab
    owners/N.lock  held for life by the process that joined as number N
    keyspaces/     one file for each key space described

Locks are ``flock``: the kernel drops them with the process, whatever ended it.
"""

import contextlib
import errno
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Self

import attrs
import msgspec

from ucm.config import Durability
from ucm.errors import ConfigError

__all__ = [
    "DATA",
    "INDEX",
    "INDEX_LOCK",
    "KEYSPACES",
    "MANIFEST",
    "OPEN_LOCK",
    "OWNERS",
    "Geometry",
    "Manifest",
    "allocate",
    "check_directory",
    "is_in_memory",
    "map_file",
    "open_file",
    "path_error",
    "write_whole",
]

_SCHEMA_VERSION = 1
MANIFEST = "slab.json"
DATA = "data"
INDEX = "index"
INDEX_LOCK = "index.lock"
OPEN_LOCK = "open.lock"
OWNERS = "owners"
KEYSPACES = "keyspaces"
_SLOT_ALIGNMENT = 4096
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


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``slab.json`` says."""

    schema: int
    slot_bytes: int
    num_slots: int
    durability: Durability

    @classmethod
    def of(cls, geometry: Geometry, durability: Durability) -> "Manifest":
        """Describe a new slab."""
        return cls(_SCHEMA_VERSION, geometry.slot_bytes, geometry.num_slots, durability)

    def encode(self) -> bytes:
        """Return the text of ``slab.json``."""
        return msgspec.json.encode(self)

    @property
    def geometry(self) -> Geometry:
        """How the slab is cut."""
        return Geometry(self.num_slots, self.slot_bytes)

    @classmethod
    def read(cls, root: Path) -> "Manifest | None":
        """
        Return what the slab in *root* is, None where there is none.

        Raises:
            ConfigError: The file is not ours or of another version.
        """
        try:
            fd = open_file(root / MANIFEST, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise path_error(root, f"{MANIFEST} cannot be opened: {exc}") from exc
        with open(fd, "rb") as file:
            text = file.read()
        try:
            found = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as exc:
            raise path_error(root, f"its {MANIFEST} cannot be read: {exc}") from exc
        if found.schema != _SCHEMA_VERSION:
            raise path_error(
                root, f"its schema version is {found.schema}, not {_SCHEMA_VERSION}"
            )
        return found

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


def open_file(path: Path, flags: int) -> int:
    """
    Open one of our files; never through a link, never somebody else's.

    Raises:
        ConfigError: It is not a plain file of ours.
        OSError: As ``os.open``.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise path_error(path.parent, f"{path.name} is a symbolic link") from exc
        raise
    info = os.fstat(fd)
    if (
        not stat.S_ISREG(info.st_mode)
        or info.st_uid != os.geteuid()
        or info.st_mode & _FOREIGN_WRITE
    ):
        os.close(fd)
        raise path_error(path.parent, f"{path.name} is not a file of only this user")
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Put *data* at *path*, all of it or nothing, and on the disk."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(open_file(temporary, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_directory(root: Path) -> None:
    """
    Make sure that only this user can have put something into *root*.

    Raises:
        ConfigError: It is a link, no directory, or open to others.
        FileNotFoundError: There is nothing.
    """
    info = root.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise path_error(root, "it is not a directory")
    if info.st_uid != os.geteuid():
        raise path_error(root, f"it belongs to user {info.st_uid}")
    if info.st_mode & _FOREIGN_WRITE:
        raise path_error(root, "others may write to it")


def is_in_memory(path: Path) -> bool:
    """Return whether *path* lies in a file system that is made of memory."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in {"tmpfs", "ramfs", "hugetlbfs"}
    return False


def map_file(fd: int, *, populate: bool) -> mmap.mmap:
    """
    Map a whole file, shared, in huge pages where the kernel has them.

    Args:
        fd: Open for reading and writing.
        populate: Touch every page now, so that none is missing later.

    Raises:
        OSError: ``EFAULT`` or ``ENOMEM`` if there is no memory for a page.
    """
    mapping = mmap.mmap(fd, 0)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if populate:
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


def allocate(path: Path, nbytes: int) -> None:
    """
    Make a file whose every byte has its place, so that no store to it can fail.

    Raises:
        OSError: There is no room.
    """
    fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, nbytes)
        if is_in_memory(path):
            # Through a mapping first: only so does memory come in huge pages.
            map_file(fd, populate=True).close()
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)
