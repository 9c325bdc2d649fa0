# SPDX-License-Identifier: Apache-2.0
"""
Locks that the kernel drops with the process that held them, whatever ended it.

All belong to files that their users keep open, never to a name in the directory: who
shares an index shares its locks, whatever has become of the paths. They do not depend
on process ids, so they hold across containers and survive the reuse of an id.

====================  =======  =======================================================
on                    lock     held
====================  =======  =======================================================
the directory         flock    while a process creates, joins or leaves the slab
the arena             flock    while an extent gets another owner; before an index
the arena, byte 0     range    by the process that populates memory
the arena, region C   range,   for life, by whoever uses class C, at the inode of its
                      shared   index: no two indexes share the extents of a class
an index              flock    for milliseconds, by whoever changes the index
an index, byte N      range    for life, by the process that joined as number N
the data, byte I      range,   for life, by whoever uses them under the arena whose
                      shared   inode has number I: no two arenas share one data file
====================  =======  =======================================================

The ranges are open file description locks, which a second opener in the same process
does not share and a forked child cannot keep once it has closed its copy.
"""

import contextlib
import fcntl
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ucm.errors import StoreUnavailableError, UCMError
from ucm.stores.slab._files import (
    Directory,
    forbidden,
    no_access,
    no_directory,
    no_parent,
    path_error,
    require_memory,
)

__all__ = [
    "FileLock",
    "Owners",
    "Turn",
    "are_bound",
    "entered",
    "holders_of",
    "is_bound",
    "taken_bytes",
]

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_TO_THE_END = 0
_REGION = 1 << 41
_ASTRAY = IndexError, OverflowError, ValueError


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise StoreUnavailableError(f"a lock of the slab failed: {exc}") from exc
    return True


def _take(fd: int, kind: int, at: int) -> bool:
    """Lock a byte for as long as the descriptor is open; return whether it was free."""
    wanted = struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise StoreUnavailableError(f"a range lock of the slab failed: {exc}") from exc
    return True


def _is_taken(fd: int, start: int, length: int) -> bool:
    """Return whether anybody but this very descriptor has a byte of the range."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        told = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    except OSError as exc:
        raise StoreUnavailableError(f"a range lock of the slab failed: {exc}") from exc
    return bool(struct.unpack(_FLOCK, told)[0] != fcntl.F_UNLCK)


def taken_bytes(fd: int) -> list[int]:
    """Return which bytes of a file, but the first, somebody has locked; in any order."""
    found, ranges = [], [(1, _REGION)]
    while ranges:
        start, stop = ranges.pop()
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
        kind, _, at, length, _ = struct.unpack(
            _FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
        )
        if kind == fcntl.F_UNLCK:
            continue
        found.append(max(at, start))  # each owner has one byte
        end = at + length if length else stop
        ranges += [(a, b) for a, b in ((start, at), (end, stop)) if a < b]
    return found


def holders_of(fd: int, table: Path) -> tuple[int, ...]:
    """
    Return the processes that hold the ``flock`` of a file, as far as one can see.

    Args:
        fd: The file.
        table: ``/proc/locks``; it shows those of this container, and of containers in it.
    """
    info = os.fstat(fd)
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return ()
    rows = [line.split() for line in lines]
    return tuple(
        int(row[4])
        for row in rows
        if len(row) > 5 and row[1] == "FLOCK" and row[5] == device
    )


def _nothing() -> None: ...


class FileLock:
    """
    Excludes processes and threads; waits no longer than told.

    Polls, because a blocking ``flock`` cannot be given a deadline, and its holder may
    be a stopped process.

    Args:
        fd: The file to lock; closed with the lock.
        name: Its name in messages.
        timeout: Longest wait in seconds.
    """

    def __init__(self, fd: int, name: Path, timeout: float) -> None:
        self.fd = fd
        self.timeout = timeout
        self._name = name
        self._threads = threading.Lock()
        self.on_taken: Callable[[], object] = _nothing
        """Called each time that the lock was taken, with it held; may raise."""

    def held(self) -> Self:
        """
        Return what holds the lock, as a context manager.

        Itself: one that contextlib makes costs as much as what is done under the lock.

        Raises, on entry:
            StoreUnavailableError: It was not free in time, or is closed.
        """
        return self

    def __enter__(self) -> None:
        deadline = time.monotonic() + self.timeout
        if not self._threads.acquire(timeout=self.timeout):
            raise StoreUnavailableError(f"{self._name} was held by a thread too long")
        whole = False
        try:
            if self.fd < 0:
                raise StoreUnavailableError(f"{self._name} is closed")
            if not _try_lock(self.fd):
                self._poll(deadline)
            whole = True
        finally:
            if not whole:
                self._threads.release()
        try:
            whole = False
            self.on_taken()
            whole = True
        finally:
            if not whole:
                self.__exit__(*sys.exc_info())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()
        if isinstance(exc, _ASTRAY) and not isinstance(exc, UCMError):
            raise self.damaged(exc) from exc

    def damaged(self, exc: BaseException) -> StoreUnavailableError:
        """Return the error for memory whose numbers lead nowhere: somebody wrote over it."""
        return StoreUnavailableError(
            f"{self._name} is damaged ({exc}): stop all its users and remove its directory"
        )

    def _poll(self, deadline: float) -> None:
        nap = _SHORTEST_NAP
        while not _try_lock(self.fd):
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"{self._name} was held by a process for {self.timeout} s"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def close(self) -> None:
        """Close the file; waits for the thread that holds the lock. Idempotent."""
        with self._threads:
            self.abandon()
            # Of an index that has us: its mapping has a descriptor of its own.
            self.on_taken = _nothing

    def abandon(self) -> None:
        """Close the file, whoever holds the lock. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Owners:
    """
    Who is using a slab: one locked byte of its index for each, at the owner's number.

    Asking takes no lock. An owner ends when its descriptor of the index is closed.

    Args:
        fd: The index, open for writing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.owner_id = 0

    def join(self, first_id: int) -> None:
        """Be an owner until the descriptor is closed; take the first number free."""
        self.owner_id = first_id
        while not _take(self._fd, fcntl.F_WRLCK, self.owner_id):
            self.owner_id += 1

    def are_others(self) -> bool:
        """Return whether anybody else is using the slab."""
        return _is_taken(self._fd, 1, _TO_THE_END)

    def find_dead(self, owner_ids: Iterable[int]) -> list[int]:
        """Return which of these owners are gone for good."""
        return [
            owner_id
            for owner_id in sorted(set(owner_ids) - {self.owner_id})
            if not _is_taken(self._fd, owner_id, 1)
        ]


def is_bound(fd: int, to_fd: int, region: int = 0) -> bool:
    """
    Tie a file to one that says who uses what of it, for as long as *fd* is open.

    Args:
        fd: The file.
        to_fd: The one that says so.
        region: Of several ties of one file: which.

    Returns:
        Whether nobody else uses it under another one. Of two that tie it at the same
        moment at least one is told so.
    """
    start, stop = _region(region)
    at = start + 1 + os.fstat(to_fd).st_ino % (_REGION - 2)
    return _take(fd, fcntl.F_RDLCK, at) and not (
        _is_taken(fd, start, at - start) or _is_taken(fd, at + 1, stop - at - 1)
    )


def are_bound(fd: int, region: int | None = None) -> bool:
    """Return whether anybody else has tied a region of the file, or any but the first."""
    start, stop = _region(1 if region is None else region)
    return _is_taken(fd, start, _TO_THE_END if region is None else stop - start)


def _region(number: int) -> tuple[int, int]:
    return number * _REGION, (number + 1) * _REGION


class Turn:
    """
    A task of which one process at a time has charge, until it is done or dies.

    Args:
        fd: A file that all of them have open; closed with this.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def take(self) -> bool:
        """Return whether the task is ours now."""
        return _take(self.fd, fcntl.F_WRLCK, 0)

    def close(self) -> None:
        """Leave the task to others. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def entered(
    root: Path, timeout: float, *, makes: bool = True
) -> Iterator[tuple[Directory, FileLock]]:
    """
    Open a directory, made if need be unless told not to, and hold its lock.

    The caller closes the lock, and with it the directory. One that was made here goes
    again if the body leaves nothing in it.

    Raises:
        ConfigError: The directory cannot be made, must not be used, or lies on a disk.
        StoreUnavailableError: Others were creating or joining for too long.
    """
    deadline = time.monotonic() + timeout
    made = False
    while time.monotonic() <= deadline:
        try:
            if makes or root.exists():
                require_memory(root)
            made |= makes and _make(root)
            fd = os.open(root, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            if makes and root.parent.is_dir():
                continue  # removed by another process whose creation was refused
            raise (
                no_parent(root) if makes else path_error(root, "it does not exist")
            ) from exc
        except NotADirectoryError as exc:
            raise no_directory(root) from exc
        except PermissionError as exc:
            raise forbidden(root, f"it cannot be made or opened: {exc}") from exc
        except OSError as exc:
            raise no_access(root, "it cannot be made or opened", exc) from exc
        directory, lock = Directory(root, fd), FileLock(fd, root, timeout)
        with contextlib.ExitStack() as unused:
            unused.callback(lock.abandon)
            with lock.held():
                if not directory.is_in_place():
                    continue
                unused.pop_all()
                try:
                    yield directory, lock
                finally:
                    if made:
                        with contextlib.suppress(OSError):  # it is not empty
                            root.rmdir()
                return
    raise StoreUnavailableError(f"{root} is made and removed all the time")


def _make(root: Path) -> bool:
    try:
        root.mkdir(0o700)
    except FileExistsError:
        return False
    return True
