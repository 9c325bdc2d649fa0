# SPDX-License-Identifier: Apache-2.0
"""
One process's hold on a slab: joining, what it maps, and leaving.

Everything that decides who is first, who is last and what can be trusted happens
under the directory's lock, one process at a time.

Loss. Files that are removed, moved, replaced or shortened under their users are safe
from mixing blocks up, because locks belong to the files and not to the path (see the
locks module), but who goes on with them is alone. ``check`` stands before each verb and
looks: at the size of the files each time, every quarter of a second at whether they are
still what the path leads to. A slab once lost stays lost. What no look can prevent is that
a file is shortened between the look and the copy: the kernel then ends the process
(``SIGBUS``).
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.config import HugePages
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.stores.abc import StoreGrowth
from ucm.stores.slab import _creation
from ucm.stores.slab._arena import Arena, Supply, drop_what_others_own, region_of
from ucm.stores.slab._classes import (
    ClassIndex,
    make_index,
    map_again,
    map_whole,
)
from ucm.stores.slab._creation import find_or_create, making, require_room
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._fates import make_fates
from ucm.stores.slab._files import ARENA, DATA, no_access, path_error, seek
from ucm.stores.slab._layout import IndexLayout, Word
from ucm.stores.slab._locks import FileLock, are_bound, entered, is_bound
from ucm.stores.slab._memory import MemoryWishes, map_aligned
from ucm.stores.slab._populate import Populator
from ucm.stores.slab._settle import settle

__all__ = ["OpenedSlab"]

_LOOK_EVERY_S = 0.25
_NO_WISHES = MemoryWishes()
_File = tuple[str, int, int, str]
"""Name, descriptor, size and path."""

_in_this_process: "weakref.WeakSet[OpenedSlab]" = weakref.WeakSet()


class OpenedSlab:
    """
    A slab that this process has joined.

    Args:
        root: Its directory; made, with a slab in it, if need be.
        wanted: How it is cut if it is made, and for which blocks.
        index_only: Leave the slots unmapped, and take a slab of any size that is there.
        open_timeout: Longest wait for others that create, join or leave, in seconds.
        lock_timeout: Longest wait for a lock, in seconds, once it is open.
        wishes: What is asked of its memory.
        joins_only: Make no slab and cut none anew, take one that is there as it is.

    Raises:
        ConfigError: The directory or the slab in it cannot be used as asked.
        StoreUnavailableError: Others held a lock for too long, or no thread is to be had.
    """

    def __init__(
        self,
        root: Path,
        wanted: Geometry,
        *,
        index_only: bool,
        open_timeout: float,
        lock_timeout: float,
        wishes: MemoryWishes = _NO_WISHES,
        joins_only: bool = False,
    ) -> None:
        self.root = root = root.absolute()
        self.pool: npt.NDArray[np.uint8] | None = None
        self.is_open = False
        self.caveat = ""
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._lost = ""
        self._look_at = 0.0
        self.most_hashing = 1
        """Threads of the process that may compute checksums at once."""
        self.populator: Populator | None = None
        wishes.check(root, _creation.SYSTEM)
        with (
            contextlib.ExitStack() as undo,
            entered(root, open_timeout, makes=not joins_only) as (
                self.directory,
                self._door,
            ),
        ):
            undo.callback(self._door.close)
            self.directory.check()
            self._manifest = find_or_create(
                self.directory, None if joins_only else wanted
            )
            self._data_fd = self._open(DATA)
            undo.callback(os.close, self._data_fd)
            arena_lock = FileLock(self._open(ARENA), root / ARENA, open_timeout)
            undo.callback(arena_lock.close)
            self._tie(self._data_fd, arena_lock.fd, ARENA)
            self._settle(wanted, arena_lock.fd, takes_it=index_only or joins_only)
            self.geometry = self._geometry_of(wanted)
            self._class = self._open_class(open_timeout)
            undo.callback(self._class.lock.close)
            self._tie(arena_lock.fd, self._class.lock.fd, self._class.name)
            self.index = self._class.index
            self._files = self._list_files(arena_lock.fd)
            self.arena = self._map_arena(arena_lock)
            self.supply = Supply(
                self.directory, self._manifest, self.arena, self._class
            )
            self._join()
            if not index_only:
                self._map_data(wishes)
            for lock in (self._class.lock, self.arena.lock, self._door):
                lock.timeout = lock_timeout
            undo.pop_all()
        self.is_open = True
        _in_this_process.add(self)
        self._fill(wishes)

    @property
    def owner_id(self) -> int:
        """Our number among all that ever joined."""
        return self._class.owners.owner_id

    def check(self, *, looks: bool = False) -> None:
        """
        Make sure that the slab may be used here and now.

        Args:
            looks: At the paths as well, whenever they were looked at before.

        Raises:
            StoreUnavailableError: It was closed, opened before this process forked, or
                its files are not what or where they were.
        """
        if os.getpid() != self._pid:
            raise StoreUnavailableError("the slab was opened before this fork")
        if not self.is_open:
            raise StoreUnavailableError("the slab is closed")
        self._lost = self._lost or self._find_loss(looks=looks)
        if self._lost:
            raise StoreUnavailableError(
                f"{self.root} is no longer served: {self._lost}; start the engine again "
                "to use what is there now"
            )

    def check_index(self) -> None:
        """
        Make sure of what ``check`` does, for a look-up; in few calls where all is well.

        The data, which that does not touch, are looked at only every quarter of a second.

        Raises:
            StoreUnavailableError: As ``check`` does.
        """
        _, fd, nbytes, _ = self._files[0]
        if (
            not self.is_open  # nor is it behind a fork
            or self._lost
            or time.monotonic() >= self._look_at
            or seek(fd, 0, os.SEEK_END) < nbytes
        ):
            self.check()

    def _find_loss(self, *, looks: bool) -> str:
        looks |= (now := time.monotonic()) >= self._look_at
        try:
            for name, fd, nbytes, _ in self._files:
                size = seek(fd, 0, os.SEEK_END)
                if size < nbytes:
                    return f"{name} was shortened to {max(0, size)} bytes"
            if not looks:
                return ""
            for name, fd, _, path in self._files:
                info = os.fstat(fd)
                if not info.st_nlink:
                    return f"{name} was removed"
                if not os.path.samestat(info, os.lstat(path)):
                    return f"{name} was replaced"
        except OSError as exc:
            return f"its files were removed or moved ({exc})"
        self._look_at = now + _LOOK_EVERY_S
        return ""

    def watch(self, tell: Callable[[StoreGrowth], None]) -> None:
        """Have *tell* called as memory comes; a slab that nobody populates has it all."""
        if self.populator is not None:
            self.populator.watch(tell)
        else:
            tell(StoreGrowth(0, 0))

    def close(self) -> None:
        """Leave. Idempotent."""
        with self._closing:
            if not self.is_open:
                return
            self.is_open = False
        if self.populator is not None:
            self.populator.close()
        try:
            # Who stands in the door may be stopped: we are gone then as by a death.
            with contextlib.suppress(StoreUnavailableError), self._door.held():
                if not (self._lost or self._find_loss(looks=True)):
                    self._leave()
        finally:
            self._class.lock.close()
            self.arena.lock.close()
            self._door.close()
            self._let_go()

    def abandon(self) -> None:
        """Let go of all files without leaving, as a death does."""
        if self.is_open:
            self.is_open = False
            if self.populator is not None:
                self.populator.abandon()
            self._class.lock.abandon()
            self.arena.lock.abandon()
            self._door.abandon()
            self._let_go()

    # -- joining and leaving, under the directory's lock -------------------------

    def _open(self, name: str) -> int:
        try:
            return self.directory.open(name)
        except OSError as exc:
            raise no_access(self.root, f"{name} cannot be opened", exc) from exc

    def _tie(self, fd: int, to_fd: int, name: str) -> None:
        region = 0 if name == ARENA else region_of(self.geometry.slot_bytes)
        if not is_bound(fd, to_fd, region):
            raise path_error(self.root, f"its data are in use under another {name}")

    def _settle(self, wanted: Geometry, arena_fd: int, *, takes_it: bool) -> None:
        """Put a slab that nobody uses in order; say if one in use is of another size."""
        found = self._manifest
        if not are_bound(arena_fd):
            self._manifest = settle(
                self.directory,
                found,
                None if takes_it else wanted,
                self._data_fd,
                arena_fd,
            )
        elif not takes_it and found.data_bytes != wanted.data_bytes:
            self.caveat = (
                f"The slab in {self.root} is in use with {found.data_bytes} bytes, not "
                f"the {wanted.data_bytes} of store.capacity: stop all its users, and "
                "the first one to start will change that."
            )

    def _geometry_of(self, wanted: Geometry) -> Geometry:
        geometry = self._manifest.of_class(wanted.slot_bytes)
        if geometry is None:
            raise path_error(
                self.root,
                f"its extents have {self._manifest.extent_bytes} bytes, and a slot of "
                f"this layout {wanted.slot_bytes}",
            )
        geometry.check(geometry.data_bytes)
        return geometry

    def _open_class(self, timeout: float) -> ClassIndex:
        geometry, directory = self.geometry, self.directory
        name = self._manifest.index_of(geometry.slot_bytes)
        if name not in directory.names():
            nbytes = IndexLayout(geometry.num_slots).nbytes
            require_room(directory, nbytes)
            with making(directory, geometry):
                make_index(directory, name, geometry)
        make_fates(directory, geometry.num_slots)
        return ClassIndex.open(directory, name, geometry, timeout, at_once=True)

    def _list_files(self, arena_fd: int) -> tuple[_File, ...]:
        files = (
            (self._class.name, self._class.lock.fd, self.index.layout.nbytes),
            (ARENA, arena_fd, Arena.nbytes(self.geometry.num_extents)),
            (DATA, self._data_fd, self.geometry.data_bytes),
        )
        return tuple((*each, str(self.root / each[0])) for each in files)

    def _map_arena(self, lock: FileLock) -> Arena:
        _, fd, nbytes, _ = self._files[1]
        make = partial(map_whole, at_once=True)
        memory = map_again(self.directory, ARENA, fd, nbytes, make)
        return Arena(memory, self.geometry.num_extents, lock)

    def _map_data(self, wishes: MemoryWishes) -> None:
        geometry = self.geometry
        mapped = map_again(
            self.directory, DATA, self._data_fd, geometry.data_bytes, map_aligned
        )
        memory = np.frombuffer(mapped, dtype=np.uint8)
        nbytes = geometry.num_slots * geometry.slot_bytes
        self.pool = memory[:nbytes].reshape(geometry.num_slots, geometry.slot_bytes)
        wishes.tell(memory, _creation.SYSTEM)
        with making(self.directory, geometry):
            check = partial(self.check, looks=True)
            self.populator = Populator(
                *(self.directory, geometry, self.arena, memory, check),
                collapses=wishes.huge_pages is not HugePages.OFF,
            )

    def _join(self) -> None:
        index, owners = self.index, self._class.owners
        if not owners.are_others():
            with self.arena.lock.held():
                drop_what_others_own(self._class, self.arena.owners)
        with index.locked():
            owners.join(int(index.header[Word.OWNER]) + 1)
            index.header[Word.OWNER] = self.owner_id
            index.reclaim(owners.find_dead(index.reserving_owners()))
        with self.arena.lock.held():
            self.supply.admit_own()

    def _fill(self, wishes: MemoryWishes) -> None:
        populator = self.populator
        if populator is None:
            return
        try:
            populator.begin()
            wishes.verify(populator.memory, self.root, _creation.SYSTEM)
        except (ConfigError, StoreUnavailableError):
            self.close()
            raise

    def _leave(self) -> None:
        # If somebody is at it all the time: what we reserved is the next one's to free.
        with contextlib.suppress(StoreUnavailableError), self.index.locked():
            self.index.reclaim([self.owner_id])

    def _let_go(self) -> None:
        # Views of the mappings may be in use by a copy; they go with the last view.
        self.pool = None
        os.close(self._data_fd)
        _in_this_process.discard(self)


def _abandon_all() -> None:
    # A child that inherits the files would keep the locks of a parent that died.
    for slab in list(_in_this_process):
        slab.abandon()


os.register_at_fork(after_in_child=_abandon_all)
