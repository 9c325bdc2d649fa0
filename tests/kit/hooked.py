# SPDX-License-Identifier: Apache-2.0
"""Calls about files that native code makes, which a test has fail, or does something before."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from tests.native_kit import build
from ucm.native import Native

__all__ = ["NOTHING", "Hooked"]

NOTHING = -1
"""In place of an error of ``writev``: it takes nothing, and tells none."""
_HOOKED = Path(__file__).with_name("hooked.h")
_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class Hooked:
    """Errors by call, the calls that were made, and what is done before each."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []
        self.before: Callable[[str], object] = lambda name: None
        self._hook = _HOOK(lambda name: self.meet(name.decode()))

    def meet(self, name: str) -> int:
        """Return the error of a call, 0 if it is to be made."""
        self.calls.append(name)
        self.before(name)
        return self.errors.get(name, 0)

    def build(self, home: Path) -> Native:
        """Compile native code in an empty directory; stand before its calls, for good."""
        library = build(home, "-include", str(_HOOKED))
        found = ctypes.CDLL(str(home / "_native.so"))
        hook = ctypes.c_void_p.in_dll(found, "test_hook")
        hook.value = ctypes.cast(self._hook, ctypes.c_void_p).value
        self._most = ctypes.c_size_t.in_dll(found, "test_most")
        return library

    def has(self, nbytes: int) -> None:
        """Have memory have so many bytes of each file."""
        self._most.value = nbytes
