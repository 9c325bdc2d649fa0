# SPDX-License-Identifier: Apache-2.0
"""
One process's hold on a slab: joining, what it maps, and leaving.

Everything that decides who is first, who is last and what can be trusted happens
under the directory's lock, one process at a time.

Loss. Files that are removed, moved, replaced or shortened under their users are safe
from mixing blocks up, because locks belong to the files and not to the path (see the
locks module), but who goes on with them is alone. ``check`` stands before each verb and
looks: at the files themselves each time, at what the path leads to every quarter of a
second. A slab once lost stays lost. What no look can prevent is that a file is
shortened between the look and the copy: the kernel then ends the process (``SIGBUS``).
"""

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.config import Durability
from ucm.errors import StoreUnavailableError
from ucm.stores.slab._creation import boot_words, create
from ucm.stores.slab._files import (
    DATA,
    INDEX,
    Geometry,
    Manifest,
    is_in_memory,
    map_file,
    path_error,
)
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout, Word
from ucm.stores.slab._locks import FileLock, Owners, entered, is_bound

__all__ = ["OpenedSlab"]

_LOOK_EVERY_S = 0.25
_File = tuple[str, int, int]
"""Name, descriptor and size."""

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
        self.root = root = root.absolute()
        self.geometry = geometry
        self.durability = durability
        self.pool: npt.NDArray[np.uint8] | None = None
        self.is_open = False
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._lost = ""
        self._look_at = 0.0
        with (
            contextlib.ExitStack() as undo,
            entered(root, open_timeout) as (self.directory, self._door),
        ):
            undo.callback(self._door.close)
            self.directory.check()
            found = Manifest.read(self.directory)
            if found is None:
                create(self.directory, geometry, durability)
            else:
                if index_only:
                    self.geometry = found.geometry
                found.require(root, self.geometry, durability)
            self.in_memory = is_in_memory(self.directory.fd)
            layout = IndexLayout(self.geometry.num_slots)
            self._lock = FileLock(self._open(INDEX), root / INDEX, lock_timeout)
            undo.callback(self._lock.close)
            self._data_fd = self._open(DATA)
            undo.callback(os.close, self._data_fd)
            self._files = (
                (INDEX, self._lock.fd, layout.nbytes),
                (DATA, self._data_fd, self.geometry.data_bytes),
            )
            if not is_bound(self._data_fd, self._lock.fd):
                raise path_error(root, "its data are in use under another index")
            self._owners = Owners(self._lock.fd)
            self.index = self._map_index(layout)
            self._join()
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
            StoreUnavailableError: It was closed, opened before this process forked, or
                its files are not what or where they were.
        """
        self._check(self._files)

    def check_index(self) -> None:
        """
        Make sure that the index may be read here and now.

        Of the data, which a look-up does not touch, only every quarter of a second.

        Raises:
            StoreUnavailableError: As ``check`` does.
        """
        self._check(self._files[:1])

    def _check(self, files: Sequence[_File]) -> None:
        if os.getpid() != self._pid:
            raise StoreUnavailableError("the slab was opened before this fork")
        if not self.is_open:
            raise StoreUnavailableError("the slab is closed")
        self._lost = self._lost or self._find_loss(files)
        if self._lost:
            raise StoreUnavailableError(
                f"{self.root} is no longer served: {self._lost}; start the engine again "
                "to use what is there now"
            )

    def _find_loss(self, files: Sequence[_File]) -> str:
        looks = (now := time.monotonic()) >= self._look_at
        try:
            for name, fd, nbytes in self._files if looks else files:
                info = os.fstat(fd)
                if not info.st_nlink:
                    return f"{name} was removed"
                if info.st_size < nbytes:
                    return f"{name} was shortened to {info.st_size} bytes"
                if looks and not os.path.samestat(info, os.lstat(self.root / name)):
                    return f"{name} was replaced"
        except OSError as exc:
            return f"its files were removed or moved ({exc})"
        if looks:
            self._look_at = now + _LOOK_EVERY_S
        return ""

    def sync_data(self) -> None:
        """Wait until all slots are on the disk, where the slab promises that."""
        if self.durability is Durability.POWER:
            self._sync(self._data_fd)

    def sync_index(self) -> None:
        """Wait until the index is on the disk, where the slab promises that."""
        if self.durability is Durability.POWER:
            self._sync(self._lock.fd)

    def close(self) -> None:
        """Leave; the last one out writes everything down. Idempotent."""
        with self._closing:
            if not self.is_open:
                return
            self.is_open = False
        try:
            with self._door.held():
                self._look_at = 0.0
                if not (self._lost or self._find_loss(self._files)):
                    self._leave()
        finally:
            self._lock.close()
            self._door.close()
            self._let_go()

    def abandon(self) -> None:
        """Let go of all files without leaving, as a death does."""
        if self.is_open:
            self.is_open = False
            self._lock.abandon()
            self._door.abandon()
            self._let_go()

    # -- joining and leaving, under the directory's lock -------------------------

    def _open(self, name: str) -> int:
        try:
            return self.directory.open(name)
        except OSError as exc:
            raise path_error(self.root, f"{name} cannot be opened: {exc}") from exc

    def _map(self, name: str, held_fd: int, nbytes: int) -> mmap.mmap:
        fd = self._open(name)  # anew: a mapping keeps its descriptor, locks and all
        try:
            info = os.fstat(fd)
            if info.st_size != nbytes or not os.path.samestat(info, os.fstat(held_fd)):
                raise path_error(self.root, f"{name} has another size than it should")
            return map_file(fd, in_memory=self.in_memory)
        except OSError as exc:
            raise path_error(self.root, f"{name} cannot be mapped: {exc}") from exc
        finally:
            os.close(fd)

    def _map_index(self, layout: IndexLayout) -> SlotIndex:
        buffer = memoryview(self._map(*self._files[0]))
        index = SlotIndex(buffer, layout, self._lock, self._owners.find_dead)
        if not index.is_formatted():
            raise path_error(self.root, "its index is no index")
        return index

    def _map_data(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map(*self._files[1]), dtype=np.uint8).reshape(
            self.geometry.num_slots, self.geometry.slot_bytes
        )

    def _join(self) -> None:
        index = self.index
        boot = boot_words()
        rebooted = index.header[Word.BOOT : Word.BOOT + 2].tolist() != boot
        if rebooted and not self._owners.are_others():
            self._trust_or_empty()
        with index.locked():
            self._owners.join(int(index.header[Word.OWNER]) + 1)
            index.header[Word.OWNER] = self.owner_id
            index.reclaim(self._owners.find_dead(index.reserving_owners()))
            was_clean = bool(index.header[Word.CLEAN])
            index.header[Word.CLEAN] = 0
            index.header[Word.BOOT : Word.BOOT + 2] = boot
        if was_clean or rebooted:
            self._sync(self._lock.fd)

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
        if not self._owners.are_others():
            self._sync(self._data_fd)
            self._sync(self._lock.fd)
            self.index.header[Word.CLEAN] = 1
            self._sync(self._lock.fd)

    def _let_go(self) -> None:
        # Views of the mappings may be in use by a copy; they go with the last view.
        self.pool = None
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
