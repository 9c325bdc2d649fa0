# SPDX-License-Identifier: Apache-2.0
"""
Locks that the kernel drops with the process that held them, whatever ended it.

All are ``flock`` on a file of the slab's directory. They do not depend on process ids,
so they hold across containers and survive the reuse of an id.
"""

import contextlib
import fcntl
import io
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ucm.errors import StoreUnavailableError
from ucm.stores.slab._files import (
    MANIFEST,
    OPEN_LOCK,
    check_directory,
    open_file,
    path_error,
)

__all__ = ["FileLock", "Owners", "entered"]

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise StoreUnavailableError(f"a lock of the slab failed: {exc}") from exc
    return True


class FileLock:
    """
    Excludes processes and threads; waits no longer than told.

    Polls, because a blocking ``flock`` cannot be given a deadline, and its holder may
    be a stopped process.

    Args:
        path: The file to lock; made if need be.
        timeout: Longest wait in seconds.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.file = io.FileIO(open_file(path, os.O_RDWR | os.O_CREAT), "r+")
        self._timeout = timeout
        self._path = path
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """
        Hold the lock.

        Raises:
            StoreUnavailableError: It was not free in time, or is closed.
        """
        deadline = time.monotonic() + self._timeout
        if not self._threads.acquire(timeout=self._timeout):
            raise StoreUnavailableError(f"{self._path} was held by a thread too long")
        try:
            if self.file.closed:
                raise StoreUnavailableError(f"{self._path} is closed")
            nap = _SHORTEST_NAP
            while not _try_lock(self.file.fileno()):
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"{self._path} was held by a process for {self._timeout} s"
                    )
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            try:
                yield
            finally:
                fcntl.flock(self.file.fileno(), fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        """Let go of the file; waits for the thread that holds the lock."""
        with self._threads:
            self.file.close()

    def abandon(self) -> None:
        """Let go of the file, whoever holds the lock."""
        self.file.close()


class Owners:
    """
    Who is using the slab: one locked file for each, named by a number.

    To be called under ``open.lock`` or the index lock only: looking takes a lock for
    a moment and must not be mistaken for life.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine: FileLock | None = None
        self._my_path = directory
        self.owner_id = 0

    def join(self, owner_id: int) -> None:
        """Be the owner of that number until ``leave`` or death."""
        self.owner_id = owner_id
        self._my_path = self._path(owner_id)
        self._mine = FileLock(self._my_path, 0.0)
        if not _try_lock(self._mine.file.fileno()):
            raise StoreUnavailableError(f"{self._my_path} is locked by somebody else")

    def leave(self) -> None:
        """Stop being an owner; remove the file."""
        if self._mine is not None:
            self._my_path.unlink(missing_ok=True)
            self._mine.close()
            self._mine = None

    def abandon(self) -> None:
        """Let go of the file but leave it there, as a death does."""
        if self._mine is not None:
            self._mine.abandon()

    def known(self) -> list[int]:
        """Return all owners but us, dead or alive."""
        return [
            int(path.stem)
            for path in self._directory.glob("*.lock")
            if path.stem.isdecimal() and int(path.stem) != self.owner_id
        ]

    def find_dead(self, owner_ids: Iterable[int]) -> list[int]:
        """Return which of these owners are gone for good."""
        others = {int(owner_id) for owner_id in owner_ids} - {self.owner_id}
        return sorted(filter(self._is_dead, others))

    def bury(self, owner_ids: Iterable[int]) -> None:
        """Remove the files of dead owners."""
        for owner_id in owner_ids:
            self._path(owner_id).unlink(missing_ok=True)

    def _path(self, owner_id: int) -> Path:
        return self._directory / f"{owner_id}.lock"

    def _is_dead(self, owner_id: int) -> bool:
        try:
            fd = open_file(self._path(owner_id), os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            return _try_lock(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def entered(root: Path, timeout: float, *, make: bool) -> Iterator[None]:
    """
    Hold ``open.lock`` of the directory.

    With *make* it is made if need be, and goes again if the body leaves no slab in it.

    Raises:
        ConfigError: The directory cannot be made or must not be used.
        StoreUnavailableError: Others were creating or joining for too long.
    """
    deadline = time.monotonic() + timeout
    made = False
    while True:
        left = deadline - time.monotonic()
        if left < 0:
            raise StoreUnavailableError(f"{root} is made and removed all the time")
        try:
            made |= make and _make(root)
            check_directory(root)
            lock = FileLock(root / OPEN_LOCK, left)
        except FileNotFoundError as exc:
            if make and root.parent.is_dir():
                continue  # removed by another process whose creation was refused
            raise path_error(root, "it or its parent does not exist") from exc
        except OSError as exc:
            raise path_error(root, f"it cannot be made or written: {exc}") from exc
        with contextlib.closing(lock), lock.held():
            if not _is_same(root / OPEN_LOCK, lock):
                continue
            try:
                yield
            finally:
                if made and not (root / MANIFEST).exists():
                    (root / OPEN_LOCK).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        root.rmdir()
            return


def _make(root: Path) -> bool:
    try:
        root.mkdir(0o700)
    except FileExistsError:
        return False
    return True


def _is_same(path: Path, lock: FileLock) -> bool:
    try:
        return path.stat().st_ino == os.fstat(lock.file.fileno()).st_ino
    except FileNotFoundError:
        return False
