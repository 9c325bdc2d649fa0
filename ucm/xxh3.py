# SPDX-License-Identifier: Apache-2.0
"""
The functions of the library that Python's xxhash is, for native code to call.

A wheel of xxhash exports them; another build may not, or have others. What is found was compared
with what xxhash itself says.
"""

import contextlib
import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any, Final

from xxhash import xxh3_64_intdigest

__all__ = ["DIGESTER", "Digester", "find_digester", "find_whole"]

_WHOLE: Final = ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed")
"""The first one picks the CPU's widest way."""
_CREATE, _DESTROY, _RESET = (
    "XXH3_createState",
    "XXH3_freeState",
    "XXH3_64bits_reset_withSeed",
)
_UPDATE: Final = ("XXH3_64bits_update_dispatch", "XXH3_64bits_update")
_TELL: Final = "XXH3_64bits_digest"
_SEED: Final = 2**63 + 7
_LENGTHS: Final = (0, 1, 100, 200, 241, 1024, 5000)
"""Of what is digested for a comparison: xxhash takes each in another way."""


class Digester:
    """
    Functions that digest bytes part by part, as ``struct digester`` of ``native.c`` has them.

    Raises:
        ImportError: xxhash is no package of a library.
        OSError: Its library is not where it should be.
        ValueError: It lacks a function, or they say something else.
    """

    def __init__(self) -> None:
        library = _open_library()
        self._functions = [
            _find(library, *names)
            for names in ((_CREATE,), (_DESTROY,), (_RESET,), _UPDATE, (_TELL,))
        ]
        address = ctypes.c_void_p
        self.addresses = (address * len(self._functions))(
            *[ctypes.cast(each, address).value for each in self._functions]
        )
        """Given as they lie in memory; constant."""
        self._check()

    def _check(self) -> None:
        create, destroy, reset, update, tell = self._functions
        create.restype, tell.restype = ctypes.c_void_p, ctypes.c_uint64
        state = ctypes.c_void_p(create())
        if state.value is None:
            raise OSError("there is no memory for a digest")
        data = bytes(range(251)) * 20
        try:
            for nbytes in _LENGTHS:
                reset(state, ctypes.c_uint64(_SEED))
                for part in (data[: nbytes // 3], data[nbytes // 3 : nbytes]):
                    update(state, part, ctypes.c_size_t(len(part)))
                if tell(state) != xxh3_64_intdigest(data[:nbytes], _SEED):
                    raise ValueError(f"the digest of {nbytes} bytes is not xxhash's")
        finally:
            destroy(state)


def find_whole() -> Callable[..., Any]:
    """
    Return the function that digests bytes at once, with a seed; who calls it compares.

    Raises:
        ImportError: xxhash is no package of a library.
        OSError: Its library is not where it should be.
        ValueError: It does not export the function.
    """
    return _find(_open_library(), *_WHOLE)


def _open_library() -> ctypes.CDLL:
    found = importlib.util.find_spec("xxhash._xxhash")
    return ctypes.CDLL(found.origin if found else None)


def _find(library: ctypes.CDLL, *names: str) -> "ctypes._NamedFuncPointer":
    """Return the first of these functions that there is."""
    for name in names:
        with contextlib.suppress(AttributeError):
            return library[name]
    raise ValueError(f"xxhash exports no {names[-1]}")


def find_digester() -> Digester | None:
    """Return what digests part by part, if it can be trusted."""
    try:
        return Digester()
    except (ImportError, OSError, ValueError):
        return None  # another build of xxhash


DIGESTER = find_digester()
"""None where there is none."""
