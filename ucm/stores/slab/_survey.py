# SPDX-License-Identifier: Apache-2.0
"""
A slab looked at from outside, by a command: nothing is joined, locked, mapped or changed.

All files are opened for reading and read with ``pread``: one that is cut meanwhile is an
error and not the end of the process, and no page of the slab becomes this process's. What
is read of the index is taken at one moment, part by part; if others change it without a
pause, the last look counts. Whoever reads a block's bytes finds out whether its slot still
holds it.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ucm.blocks import KeySpace, PackedKey
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    ConfigError,
    StoreError,
    StoreUnavailableError,
)
from ucm.seals import block_checksum
from ucm.stores.slab._arena import Arena
from ucm.stores.slab._chains import unpack_key
from ucm.stores.slab._extents import MOST_SLOT_BYTES, Geometry
from ucm.stores.slab._files import (
    ARENA,
    DATA,
    MANIFEST,
    Directory,
    Manifest,
    foreign,
    path_error,
)
from ucm.stores.slab._index import MAGIC
from ucm.stores.slab._keyspaces import read_all
from ucm.stores.slab._layout import COMMITTED, MOST, NEVER, IndexLayout, Word
from ucm.stores.slab._tenants import tenants_at

__all__ = ["Blocks", "ClassSurvey", "SlabSurvey", "told_as_store_error"]

_ATTEMPTS = 8


@attrs.frozen(eq=False)
class Blocks:
    """
    Some committed blocks of one class.

    Args:
        slots: ``[n]`` where they are.
        records: ``[n]`` what the index says of each: of the fields ``key``, ``hash``,
            ``generation``, ``nbytes``, ``checksum`` and ``owner``.
        ages_ns: ``[n]`` how long ago each was used; below 0 if it is retained.
        places: ``[n]`` for which tenant each is counted: a place in the table of
            tenants, 0 for nobody.
    """

    slots: npt.NDArray[np.int64]
    records: npt.NDArray[Any]
    ages_ns: npt.NDArray[np.int64]
    places: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def fields(self) -> npt.NDArray[np.uint8]:
        """``[n, 88]`` the keys, filled up with zeros; the last byte is a key's length."""
        return np.ascontiguousarray(self.records["key"]).view(np.uint8)

    @property
    def tenants(self) -> npt.NDArray[np.uint32]:
        """``[n]`` a tenant that has the same share; 0: nobody."""
        return tenants_at(self.places)

    def key(self, at: int) -> PackedKey:
        """Return one key."""
        return unpack_key(self.records["key"][at])

    def where(self, chosen: npt.NDArray[Any]) -> "Blocks":
        """Return some of them, by a mask or by positions."""
        return Blocks(
            self.slots[chosen],
            self.records[chosen],
            self.ages_ns[chosen],
            self.places[chosen],
        )


class ClassSurvey:
    """
    The index of one size of slots, and the bytes that it tells of.

    Args:
        name: Of the index file.
        fd: The same, open for reading; closed by the caller.
        data_fd: The slab's data, likewise.
        geometry: How the data are cut for it.
    """

    def __init__(
        self,
        name: str,
        fd: int,
        data_fd: int,
        geometry: Geometry,
    ) -> None:
        self.name = name
        self.fd = fd
        self.geometry = geometry
        self._data_fd = data_fd
        self._place = IndexLayout(geometry.num_slots).place()
        header = self.header()
        self.seed = int(header[Word.SEED])
        self._now = time.monotonic_ns()

    def header(self) -> npt.NDArray[np.int64]:
        """Return the words of the header; see ``Word``."""
        return self.read("header", 0, self._place["header"][2])

    def read(self, name: str, start: int, count: int) -> npt.NDArray[Any]:
        """
        Read a part of one of the index's arrays; see ``IndexLayout``.

        Raises:
            StoreUnavailableError: The file was shortened.
        """
        offset, dtype, length = self._place[name]
        count = max(0, min(count, length - start))
        at, nbytes = offset + dtype.itemsize * start, dtype.itemsize * count
        data = os.pread(self.fd, nbytes, at)
        if len(data) != nbytes:
            raise StoreUnavailableError(f"{self.name} was shortened while it was read")
        return np.frombuffer(data, dtype)

    def blocks(self) -> Iterator[Blocks]:
        """Yield all that is committed, at most 4096 at a time."""
        for start in self._starts():
            stop = min(start + MOST, self.geometry.num_slots)
            if (self.read("states", start, stop - start) == COMMITTED).any():
                yield self._look(start, stop)

    def at(self, slot: int) -> Blocks:
        """Return what is committed in one slot: one block, or none."""
        return self._look(slot, slot + 1)

    def fetch(self, blocks: Blocks, at: int, into: memoryview) -> memoryview:
        """
        Read the bytes of one block, and compare them with its checksum.

        Args:
            blocks: What was seen.
            at: Which of them.
            into: At least as long as a slot.

        Returns:
            The part of *into* that has the bytes.

        Raises:
            BlockCorruptError: They, or the record, are not what was saved.
            BlockNotFoundError: The slot holds it no more, so whatever was read is none
                of it.
        """
        record, key = blocks.records[at], blocks.key(at)
        nbytes, slot = int(record["nbytes"]), int(blocks.slots[at])
        problem = self._doubt(record, key)
        if not problem:
            view = into[:nbytes]
            offset = slot * self.geometry.slot_bytes
            if os.preadv(self._data_fd, [view], offset) != nbytes:
                raise StoreUnavailableError(f"{DATA} was shortened while it was read")
            found = block_checksum(key, view)
            if found == int(record["checksum"]):
                problem = ""
            else:
                problem = f"checksum {found:016x} is not {int(record['checksum']):016x}"
        if not self._holds(slot, int(record["generation"])):
            raise BlockNotFoundError(key)
        if problem:
            raise BlockCorruptError(key, problem)
        return view

    def _holds(self, slot: int, generation: int) -> bool:
        """Return whether a slot still has the content of that number."""
        if self.read("states", slot, 1)[0] != COMMITTED:
            return False
        return int(self.read("records", slot, 1)["generation"][0]) == generation

    def _doubt(self, record: Any, key: PackedKey) -> str:  # noqa: ANN401 - numpy's
        """Return what is wrong with a record; empty if nothing is."""
        if xxh3_64_intdigest(key, self.seed) != int(record["hash"]):
            return "its record has the hash of another key"
        if not 1 <= int(record["nbytes"]) <= self.geometry.slot_bytes:
            return f"its record says {int(record['nbytes'])} bytes"
        return ""

    def _starts(self) -> range:
        return range(0, self.geometry.num_slots, MOST)

    def _look(self, start: int, stop: int) -> Blocks:
        count = stop - start
        for _ in range(_ATTEMPTS):
            version = int(self.read("header", Word.VERSION, 1)[0])
            states = self.read("states", start, count)
            stamps = self.read("stamps", start, count)
            payers = self.read("payers", start, count)
            records = self.read("records", start, count)
            is_even = version % 2 == 0
            if is_even and version == int(self.read("header", Word.VERSION, 1)[0]):
                break
        at = np.flatnonzero(states == COMMITTED)
        ages = np.where(stamps[at] == NEVER, 0, self._now - stamps[at])
        return Blocks(at + start, records[at], ages, payers[at])


class SlabSurvey:
    """
    A slab's directory, held open for reading.

    Args:
        path: The directory.

    Raises:
        StoreUnavailableError: There is no slab of this release that is this user's; says
            what there is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        with contextlib.ExitStack() as undo, told_as_store_error(self.path):
            self.fd = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            undo.callback(os.close, self.fd)
            self.directory = Directory(self.path, self.fd)
            self.directory.check()
            manifest = Manifest.read(self.directory)
            if manifest is None:
                raise foreign(self.path, f"it has no {MANIFEST}")
            self.manifest = manifest
            self._data_fd = self._open(DATA, undo)
            self.arena_fd = self._open(ARENA, undo)
            self._check_cut(manifest)
            self.classes = tuple(self._find_classes(undo))
            self._end = undo.pop_all()

    @property
    def cut(self) -> Geometry:
        """How the data are cut into extents, for no class in particular."""
        size = self.manifest.extent_bytes
        return Geometry(self.manifest.data_bytes, size, size)

    def keyspaces(self) -> tuple[dict[bytes, KeySpace], str]:
        """Return the key spaces that are described, by digest, and what prevents it."""
        try:
            return read_all(self.directory), ""
        except StoreError as exc:
            return {}, str(exc)

    def arena(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return who has each extent, and which of them have their memory."""
        count = self.cut.num_extents
        if os.fstat(self.arena_fd).st_size == Arena.nbytes(count):
            data = os.pread(self.arena_fd, Arena.nbytes(count), 0)
            if len(data) == Arena.nbytes(count):
                return Arena.decode(data, count)
        raise StoreUnavailableError(f"{ARENA} has another size than it should")

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, undo: contextlib.ExitStack) -> int:
        fd = self.directory.open(name, os.O_RDONLY)
        undo.callback(os.close, fd)
        return fd

    def _check_cut(self, manifest: Manifest) -> None:
        if not 0 < manifest.extent_bytes <= min(manifest.data_bytes, MOST_SLOT_BYTES):
            raise foreign(self.path, f"its {MANIFEST} is not of a slab (sizes)")
        if os.fstat(self._data_fd).st_size < manifest.data_bytes:
            raise path_error(self.path, f"{DATA} has another size than it should")
        self.cut.check(manifest.data_bytes)

    def _find_classes(self, undo: contextlib.ExitStack) -> Iterator[ClassSurvey]:
        for name, geometry in self.manifest.classes(self.directory):
            fd = self._open(name, undo)
            if os.fstat(fd).st_size != IndexLayout(geometry.num_slots).nbytes:
                raise path_error(self.path, f"{name} has another size than it should")
            found = ClassSurvey(name, fd, self._data_fd, geometry)
            if found.header()[Word.MAGIC] != MAGIC:
                raise path_error(self.path, f"{name} is no index")
            yield found


@contextlib.contextmanager
def told_as_store_error(path: Path) -> Iterator[None]:
    """Say that what was named cannot be read: no setting of ours is wrong."""
    try:
        yield
    except ConfigError as exc:
        raise StoreUnavailableError(str(exc)) from exc
    except OSError as exc:
        raise StoreUnavailableError(
            f"{path} cannot be read as a slab: {exc.strerror}"
        ) from exc
