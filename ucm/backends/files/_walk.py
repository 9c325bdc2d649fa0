# SPDX-License-Identifier: Apache-2.0
"""
What lies in a share, and what of it was used longest ago.

A share may have millions of blocks, and whoever walks through it shares a process with a loop
that serves engines. Of each block some 26 bytes are kept, in arrays, which numpy sorts without
the interpreter lock; else nothing takes longer than a directory. Names are not kept: what is to
go is found again in its directory, by a digest of its name.

Threading: any thread, one at a time; everything may hang.
"""

import errno
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

__all__ = ["AWAY", "Walk", "entries_of"]

AWAY = {
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""Errors of a mount whose server is away."""
_PLACE = re.compile("[0-9a-f]{2}")
"""A directory of blocks, and one of such."""
_KEY = re.compile("(?:[0-9a-f]{2}){29,85}")
"""A block's file: its packed key in hex. Whatever else lies there is not ours to remove."""
_LATEST_NS = 1 << 62
"""In the year 2116: what is later is told as if it were then."""


class Walk:
    """
    What a walk has found; walks when it is made.

    Args:
        root: The directory of blocks.
        alive: Called for each directory of blocks, whatever is done with it.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, root: str, alive: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._alive = alive
        self._used, self._sizes = array("q"), array("q")
        self._digests, self._places = array("Q"), array("H")
        self.nbytes = 0
        """Of what is left."""
        for first in _places_in(root):
            for second in _places_in(f"{root}/{first}"):
                self._look(int(first + second, 16))
        self.num_files = len(self._used)
        """That are left."""

    def _look(self, place: int) -> None:
        for entry in self._blocks_in(place):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            self._used.append(_kept(info.st_mtime_ns))
            self._sizes.append(info.st_size)
            self._digests.append(_digest(entry.name))
            self._places.append(place)
            self.nbytes += info.st_size

    def evict(self, wanted_bytes: int, now_ns: int | None = None) -> int:
        """
        Remove the oldest until the rest has no more than so many bytes; once for a walk.

        Args:
            wanted_bytes: So many.
            now_ns: By the share's clock, which may have been set back: what was used at a time
                to come is as old as that is far. None: nobody knows, and the latest use is now.

        Returns:
            How many were removed; what another machine was faster with is none of them.

        Raises:
            OSError: The mount's server is away.
        """
        used = np.asarray(self._used)
        now_ns = used.max(initial=0) if now_ns is None else _kept(now_ns)
        oldest = np.argsort(-np.abs(used - now_ns), kind="stable")
        ends = np.cumsum(np.asarray(self._sizes)[oldest])
        num_evicted = at = done = 0
        while self.nbytes > wanted_bytes and at < len(oldest):
            upto = int(np.searchsorted(ends, done + self.nbytes - wanted_bytes)) + 1
            num_evicted += self._remove(oldest[at:upto])  # some may stay
            at = min(upto, len(oldest))
            done = int(ends[at - 1])
        return num_evicted

    def _remove(self, files: npt.NDArray[np.int64]) -> int:
        """Remove files, directory by directory."""
        of_files = np.asarray(self._places)[files]
        files = files[np.argsort(of_files, kind="stable")]
        places, counts = np.unique(of_files, return_counts=True)
        num_removed = at = 0
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            here, at = files[at : at + count], at + count
            digests = np.asarray(self._digests)[here].tolist()
            sizes = np.asarray(self._sizes)[here].tolist()
            num_removed += self._remove_in(
                place, dict(zip(digests, sizes, strict=True))
            )
        return num_removed

    def _remove_in(self, place: int, sizes: dict[int, int]) -> int:
        num_removed = 0
        for entry in self._blocks_in(place):
            nbytes = sizes.pop(_digest(entry.name), None)
            if nbytes is None:
                continue
            try:
                os.unlink(entry.path)
                num_removed += 1
            except FileNotFoundError:
                pass  # another machine was faster
            except OSError as exc:
                if exc.errno in AWAY:
                    raise
                continue  # it stays, and takes its room
            self._forget(nbytes)
        for nbytes in sizes.values():  # another machine was faster with these
            self._forget(nbytes)
        return num_removed

    def _forget(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.num_files -= 1

    def _blocks_in(self, place: int) -> Iterator[os.DirEntry[str]]:
        name = f"{place:04x}"
        self._alive()
        for entry in entries_of(f"{self._root}/{name[:2]}/{name[2:]}"):
            if _KEY.fullmatch(entry.name) is not None:
                yield entry


def entries_of(path: str | Path) -> list[os.DirEntry[str]]:
    """Return what lies in a directory."""
    with os.scandir(path) as entries:  # whatever is raised, nothing is left open
        return list(entries)


def _kept(time_ns: int) -> int:
    """Return a time of a share's as an array and differences have room for it, wherever its clock was."""
    return max(0, min(time_ns, _LATEST_NS))


def _digest(name: str) -> int:
    return xxh3_64_intdigest(name.encode())


def _places_in(path: str) -> list[str]:
    return [
        entry.name
        for entry in entries_of(path)
        if _PLACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
