# SPDX-License-Identifier: Apache-2.0
"""
One process's hold on a slab: joining, what it maps, and leaving.

Everything that decides who is first, who is last and what can be trusted happens
under ``open.lock``, one process at a time.
"""

import contextlib
import errno
import mmap
import os
import shutil
import threading
import uuid
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.config import Durability
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.stores.slab._files import (
    DATA,
    INDEX,
    INDEX_LOCK,
    KEYSPACES,
    MANIFEST,
    OWNERS,
    Geometry,
    Manifest,
    allocate,
    is_in_memory,
    map_file,
    open_file,
    path_error,
    write_whole,
)
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout, Word
from ucm.stores.slab._locks import FileLock, Owners, entered

__all__ = ["OpenedSlab"]

_SPARE_BYTES = 1 << 20  # directories, manifest and locks
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFAULT, errno.ENOMEM, errno.EFBIG}
_in_this_process: "weakref.WeakSet[OpenedSlab]" = weakref.WeakSet()


class OpenedSlab:
    """
    A slab that this process has joined.

    Args:
        root: Its directory; made, with a slab in it, if need be.
        geometry: How it is cut.
        durability: What its blocks survive.
        index_only: Leave the slots unmapped, and take a slab of any size that is there.
        open_timeout: Longest wait for others that create, join or leave, in seconds.
        lock_timeout: Longest wait for the index lock, in seconds.

    Raises:
        ConfigError: The directory or the slab in it cannot be used as asked.
        StoreUnavailableError: Others held a lock for too long.
    """

    def __init__(
        self,
        root: Path,
        geometry: Geometry,
        durability: Durability,
        *,
        index_only: bool,
        open_timeout: float,
        lock_timeout: float,
    ) -> None:
        self.root = root
        self.geometry = geometry
        self.durability = durability
        self.pool: npt.NDArray[np.uint8] | None = None
        self._open_timeout = open_timeout
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self.is_open = False
        with contextlib.ExitStack() as undo, entered(root, open_timeout, make=True):
            found = Manifest.read(root)
            if found is None:
                _create(root, geometry, durability)
            else:
                if index_only:
                    self.geometry = found.geometry
                found.require(root, self.geometry, durability)
            self._owners = Owners(root / OWNERS)
            self._lock = FileLock(root / INDEX_LOCK, lock_timeout)
            undo.callback(self._lock.close)
            self._index_fd = self._open(INDEX)
            undo.callback(os.close, self._index_fd)
            self._data_fd = self._open(DATA)
            undo.callback(os.close, self._data_fd)
            self.index = self._map_index()
            self._join()
            undo.callback(self._owners.leave)
            if not index_only:
                self.pool = self._map_data()
            undo.pop_all()
        self.is_open = True
        _in_this_process.add(self)

    @property
    def owner_id(self) -> int:
        """Our number among all that ever joined."""
        return self._owners.owner_id

    def check(self) -> None:
        """
        Make sure that the slab may be used here and now.

        Raises:
            StoreUnavailableError: It was closed, or opened before this process forked.
        """
        if os.getpid() != self._pid:
            raise StoreUnavailableError("the slab was opened before this fork")
        if not self.is_open:
            raise StoreUnavailableError("the slab is closed")

    def sync_data(self) -> None:
        """Wait until all slots are on the disk, where the slab promises that."""
        if self.durability is Durability.POWER:
            self._sync(self._data_fd)

    def sync_index(self) -> None:
        """Wait until the index is on the disk, where the slab promises that."""
        if self.durability is Durability.POWER:
            self._sync(self._index_fd)

    def close(self) -> None:
        """Leave; the last one out writes everything down. Idempotent."""
        with self._closing:
            if not self.is_open:
                return
            self.is_open = False
        try:
            # A directory that somebody removed needs no last words.
            with (
                contextlib.suppress(ConfigError),
                entered(self.root, self._open_timeout, make=False),
            ):
                self._leave()
        finally:
            self._owners.leave()
            self._lock.close()
            self._let_go()

    def abandon(self) -> None:
        """Let go of all files without leaving, as a death does."""
        if self.is_open:
            self.is_open = False
            self._owners.abandon()
            self._lock.abandon()
            self._let_go()

    # -- joining and leaving, under open.lock ------------------------------------

    def _open(self, name: str) -> int:
        try:
            return open_file(self.root / name, os.O_RDWR)
        except OSError as exc:
            raise path_error(self.root, f"{name} cannot be opened: {exc}") from exc

    def _map(self, name: str, fd: int, nbytes: int) -> mmap.mmap:
        if os.fstat(fd).st_size != nbytes:
            raise path_error(self.root, f"{name} has another size than it should")
        try:
            return map_file(fd, populate=is_in_memory(self.root))
        except OSError as exc:
            raise path_error(self.root, f"{name} cannot be mapped: {exc}") from exc

    def _map_index(self) -> SlotIndex:
        layout = IndexLayout(self.geometry.num_slots)
        buffer = memoryview(self._map(INDEX, self._index_fd, layout.nbytes))
        index = SlotIndex(buffer, layout, self._lock, self._owners.find_dead)
        if not index.is_formatted():
            raise path_error(self.root, "its index is no index")
        return index

    def _map_data(self) -> npt.NDArray[np.uint8]:
        mapping = self._map(DATA, self._data_fd, self.geometry.data_bytes)
        return np.frombuffer(mapping, dtype=np.uint8).reshape(
            self.geometry.num_slots, self.geometry.slot_bytes
        )

    def _join(self) -> None:
        known = self._owners.known()
        dead = self._owners.find_dead(known)
        index = self.index
        boot = _boot_words()
        rebooted = index.header[Word.BOOT : Word.BOOT + 2].tolist() != boot
        if rebooted and dead == sorted(known):
            self._trust_or_empty()
        with index.locked():
            owner_id = max(known, default=0)
            owner_id = max(owner_id, int(index.header[Word.OWNER])) + 1
            index.header[Word.OWNER] = owner_id
            self._owners.join(owner_id)
            index.reclaim(self._owners.find_dead(index.reserving_owners()))
            self._owners.bury(dead)
            was_clean = bool(index.header[Word.CLEAN])
            index.header[Word.CLEAN] = 0
            index.header[Word.BOOT : Word.BOOT + 2] = boot
        if was_clean or rebooted:
            self._sync(self._index_fd)

    def _trust_or_empty(self) -> None:
        """Decide what an index that comes from before a reboot is worth."""
        index = self.index
        if not index.header[Word.CLEAN]:
            if self.durability is Durability.POWER:
                index.distrust()
            else:
                index.empty()
        index.start_clock()

    def _leave(self) -> None:
        with self.index.locked():
            self.index.reclaim([self.owner_id])
        others = self._owners.known()
        if self._owners.find_dead(others) == sorted(others):
            self._sync(self._data_fd)
            self._sync(self._index_fd)
            self.index.header[Word.CLEAN] = 1
            self._sync(self._index_fd)
            self._owners.bury(others)

    def _let_go(self) -> None:
        # Views of the mappings may be in use by a copy; they go with the last view.
        self.pool = None
        os.close(self._index_fd)
        os.close(self._data_fd)
        _in_this_process.discard(self)

    def _sync(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as exc:
            raise StoreUnavailableError(f"the slab cannot be synced: {exc}") from exc


def _abandon_all() -> None:
    # A child that inherits the files would keep the locks of a parent that died.
    for slab in list(_in_this_process):
        slab.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _boot_words() -> list[int]:
    data = uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    return [int(word) for word in np.frombuffer(data, dtype=np.int64)]


def _remove(root: Path) -> None:
    """Remove what a creation made; the manifest first, so that no slab is left."""
    for name in (MANIFEST, DATA, INDEX, INDEX_LOCK):
        (root / name).unlink(missing_ok=True)
    for temporary in root.glob("*.tmp"):
        temporary.unlink()
    for name in (OWNERS, KEYSPACES):
        shutil.rmtree(root / name, ignore_errors=True)


def _create(root: Path, geometry: Geometry, durability: Durability) -> None:
    """
    Make a slab in an entered directory, in place of one that was half made.

    Raises:
        ConfigError: There is no room or no permission; nothing is left behind.
    """
    layout = IndexLayout(geometry.num_slots)
    try:
        _remove(root)
        _check_room(root, geometry, layout)
        (root / OWNERS).mkdir(0o700)
        (root / KEYSPACES).mkdir(0o700)
        allocate(root / INDEX, layout.nbytes)
        allocate(root / DATA, geometry.data_bytes)
        fd = open_file(root / INDEX, os.O_RDWR)
        with contextlib.closing(FileLock(root / INDEX_LOCK, 0.0)) as lock:
            try:
                buffer = memoryview(map_file(fd, populate=False))
                index = SlotIndex(buffer, layout, lock, list)
                index.format()
                index.header[Word.BOOT : Word.BOOT + 2] = _boot_words()
                os.fsync(fd)
            finally:
                os.close(fd)
        write_whole(root / MANIFEST, Manifest.of(geometry, durability).encode())
    except OSError as exc:
        _remove(root)
        if exc.errno in _NO_ROOM:
            raise _no_room(root, geometry, layout, str(exc)) from exc
        raise path_error(root, f"a slab cannot be made in it: {exc}") from exc
    except ConfigError:
        _remove(root)
        raise


def _check_room(root: Path, geometry: Geometry, layout: IndexLayout) -> None:
    system = os.statvfs(root)
    free = system.f_bavail * system.f_frsize
    if free < geometry.data_bytes + layout.nbytes + _SPARE_BYTES:
        raise _no_room(root, geometry, layout, f"free are {free} bytes")


def _no_room(
    root: Path, geometry: Geometry, layout: IndexLayout, found: str
) -> ConfigError:
    needed = geometry.data_bytes + layout.nbytes + _SPARE_BYTES
    return ConfigError(
        "store.capacity",
        geometry.data_bytes,
        f"{geometry.num_slots} slots of {geometry.slot_bytes} bytes + index "
        f"{layout.nbytes} + {_SPARE_BYTES} = {needed} bytes needed in {root}, but "
        f"{found}",
        "Ask for less, free some, or use a path on a larger file system.",
    )
