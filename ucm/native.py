# SPDX-License-Identifier: Apache-2.0
"""
Many calls of a native function by one call from Python, where that is built.

Each call that gives up the interpreter lock waits for it again behind it. Beside an engine's
thread that computes in Python each of these waits may take as long as the switch interval,
5 ms: for the checksums of a prompt of 1024 blocks, or the copies of its 32768 pages, far
longer than the work. ``native.c`` makes such calls in a loop, and waits once. It calls what
it is given, xxhash's and CUDA's own functions, and has no other knowledge.

It is compiled where ucm is installed with a C compiler. Without it each call is made by
Python; what is done is the same.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "LIBRARY",
    "MOST_THREADS",
    "Native",
    "address_of",
    "addresses_of",
    "find_native",
]

MOST_THREADS: Final = 64
"""Whatever is set: ``native.c`` begins no more helpers, and its number has 32 bits."""

_VERSION = 14
_SIZE, _ADDRESS, _NUMBER = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_TIME = ctypes.c_int64


class Native:
    """
    The functions of ``native.c``; see there.

    Args:
        path: Of what was compiled.

    Raises:
        OSError: There is no such library, or none that this machine takes.
        AttributeError: It lacks a function.
        ValueError: It was built of another release's source.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.ucm_version() != _VERSION:
            raise ValueError(f"{path} is of another release")
        self.digests: Callable[..., Any] = library.ucm_digests
        library.ucm_digests.restype = None
        library.ucm_digests.argtypes = (
            *(_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _NUMBER),
        )
        # One function twice: called without the interpreter lock, and with it.
        brief = ctypes.PyDLL(str(path))
        self.loads: Callable[..., Any] = library.ucm_loads
        self.brief_loads: Callable[..., Any] = brief.ucm_loads
        for loads in (library.ucm_loads, brief.ucm_loads):
            loads.restype = None
            loads.argtypes = (
                *library.ucm_digests.argtypes,
                *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS),
            )
        # 15 ns a page: to get the interpreter lock back would take longer for some thousands.
        self.pages: Callable[..., int] = brief.ucm_pages
        brief.ucm_pages.restype = _SIZE
        brief.ucm_pages.argtypes = (
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE),
            *(_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _TIME),
            *(_ADDRESS, _ADDRESS, _ADDRESS),
        )
        self.moves: Callable[..., Any] = library.ucm_moves
        self.brief_moves: Callable[..., Any] = brief.ucm_moves
        for moves in (library.ucm_moves, brief.ucm_moves):
            moves.restype = None
            moves.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _NUMBER)
        self.copies: Callable[..., int] = library.ucm_copies
        library.ucm_copies.restype = _NUMBER
        library.ucm_copies.argtypes = (
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        )
        self.await_events: Callable[..., Any] = library.ucm_await_events
        library.ucm_await_events.restype = None
        library.ucm_await_events.argtypes = (
            *(_ADDRESS, _ADDRESS, _SIZE, _NUMBER, _ADDRESS, _NUMBER),
            *(_TIME, _TIME, _TIME),
        )
        self.leave: Callable[..., Any] = library.ucm_leave
        library.ucm_leave.restype = None
        library.ucm_leave.argtypes = (_ADDRESS,)
        self.read_files: Callable[..., Any] = library.ucm_read_files
        library.ucm_read_files.restype = None
        library.ucm_read_files.argtypes = (
            *(_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS),
            *(_ADDRESS, _ADDRESS, _SIZE, _ADDRESS),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        )
        self.write_files: Callable[..., Any] = library.ucm_write_files
        library.ucm_write_files.restype = None
        library.ucm_write_files.argtypes = (
            *(_ADDRESS, _SIZE, _ADDRESS, _SIZE),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        )
        self.find_files: Callable[..., Any] = library.ucm_find_files
        library.ucm_find_files.restype = None
        library.ucm_find_files.argtypes = (_ADDRESS, _SIZE, _ADDRESS)
        self.receive: Callable[..., int] = library.ucm_receive
        library.ucm_receive.restype = _SIZE
        library.ucm_receive.argtypes = (
            *(_NUMBER, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
            *(ctypes.c_char_p, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS),
        )
        self._open_slab(brief)

    def _open_slab(self, brief: ctypes.PyDLL) -> None:
        """Have the functions of ``native_slab.c``."""
        # Some microseconds each, most of them within a lock that others wait for.
        self.slab_hash: Callable[..., Any] = brief.ucm_slab_hash
        brief.ucm_slab_hash.restype = None
        brief.ucm_slab_hash.argtypes = (
            *(_ADDRESS, ctypes.c_char_p, _SIZE, ctypes.c_uint64, _ADDRESS),
        )
        self.slab_find: Callable[..., Any] = brief.ucm_slab_find
        self.slab_look: Callable[..., Any] = brief.ucm_slab_look
        for look in (brief.ucm_slab_find, brief.ucm_slab_look):
            look.restype = None
            look.argtypes = (_ADDRESS, ctypes.c_char_p, _ADDRESS, _SIZE, _ADDRESS)
        self.slab_reserve: Callable[..., int] = brief.ucm_slab_reserve
        brief.ucm_slab_reserve.restype = _TIME
        brief.ucm_slab_reserve.argtypes = (
            *(_ADDRESS, ctypes.c_char_p, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        )
        self.slab_publish: Callable[..., int] = brief.ucm_slab_publish
        brief.ucm_slab_publish.restype = _NUMBER
        brief.ucm_slab_publish.argtypes = (
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE),
            *(ctypes.c_uint64, ctypes.c_uint32),
        )


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array begins, at a third of what ``array.ctypes.data`` costs."""
    address: int = array.__array_interface__["data"][0]
    return address


def addresses_of(memory: Iterable[memoryview]) -> list[int]:
    """Return where pieces of memory begin, of which there is some."""
    arrays = map(np.frombuffer, memory, itertools.repeat(np.uint8))
    return [each.__array_interface__["data"][0] for each in arrays]


def find_native(directory: Path) -> Native | None:
    """Return what *directory* has that was compiled for this machine, if anything."""
    for path in sorted(directory.glob("_native*.so")):
        try:
            return Native(path)
        except (OSError, AttributeError, ValueError):
            continue
    return None


LIBRARY = find_native(Path(__file__).parent)
"""None where it was not built."""
