# SPDX-License-Identifier: Apache-2.0
"""A wall clock that processes have instead of the machine's, and that a test moves."""

import shutil
import struct
import subprocess
from pathlib import Path

__all__ = ["WallClock"]

_SOURCE = Path(__file__).with_suffix(".c")
_SECONDS = struct.Struct("=q")
COMPILER = shutil.which("cc") or ""
"""Without one there is no such clock."""


class WallClock:
    """
    Builds it.

    Args:
        folder: Where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ahead"
        self._file.write_bytes(_SECONDS.pack(0))
        library = folder / "wall_clock.so"
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)],
            check=True,
        )
        self.env = {
            "LD_PRELOAD": str(library),
            "WALL_CLOCK_AHEAD": str(self._file),
        }
        """What a process has it by."""

    def jump(self, seconds: int) -> None:
        """Have it so many seconds ahead of the machine's, or behind."""
        with self._file.open("r+b") as file:
            file.write(_SECONDS.pack(seconds))
