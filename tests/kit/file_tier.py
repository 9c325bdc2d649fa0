# SPDX-License-Identifier: Apache-2.0
"""
A tier that is a directory of files, for tests that need one across processes and machines.

One file per block, header first, under a temporary name until it is whole. It blocks the
loop, keeps everything, and is found by processes whose path begins with ``registration``.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import anyio

from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import Envelope
from ucm.blocks import PackedKey

__all__ = ["FileTier", "registration"]

_METADATA = "Metadata-Version: 2.1\nName: ucm-file-tier\nVersion: 0\n"
_POINTS = (
    "[ucm.backends]\n"
    "file-tier = tests.kit.file_tier:FileTier\n"
    "disk = ucm.backends.disk:DiskBackend\n"
    "yuanrong = ucm.backends.yuanrong:YuanrongBackend\n"
)
"""Ours also where this tree is on the path and not installed."""


def registration(directory: Path) -> Path:
    """Make a path entry by which ``file-tier`` and ``disk`` are known; return it."""
    info = directory / "ucm_file_tier-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_POINTS)
    return directory


class FileTier(Backend):
    """
    Keeps blocks in files.

    Args:
        root: Their directory.
        delay: Seconds that a put takes before it does anything.
        is_endless: Nobody can end one before, as with a call of native code.
        bug: What it raises something in: ``put``, or ``refusing``.
    """

    def __init__(
        self,
        root: Path,
        delay: float = 0.0,
        *,
        is_endless: bool = False,
        bug: str = "",
    ) -> None:
        self._root = root
        self._delay = delay
        self._bug = bug
        self._is_endless = is_endless
        self._is_attended = False
        root.mkdir(parents=True, exist_ok=True)

    @classmethod
    async def open_configured(cls, settings: dict[str, Any], key: str) -> Self:
        """Open the directory that a configuration names."""
        delay, is_endless = settings.get("delay", 0.0), settings.get("endless", False)
        bug = settings.get("bug", "")
        return cls(Path(settings["path"]), delay, is_endless=is_endless, bug=bug)

    def _fail_in(self, name: str) -> None:
        if self._bug == name:
            raise ZeroDivisionError("a bug")

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of files."""
        return BackendCapabilities(
            medium="file",
            shared=True,
            durable="process",
            max_block_bytes=1 << 30,
            batch_blocks=8,
            in_flight=2,
        )

    @property
    def away(self) -> list[str]:
        """Of files such as ``NAME.away``, once somebody attends to it."""
        found = self._root.glob("*.away") if self._is_attended else ()
        return [each.stem for each in found]

    @property
    def refusing(self) -> list[str]:
        """Of files such as ``NAME.refusing``."""
        self._fail_in("refusing")
        with contextlib.suppress(OSError):  # no descriptor for that: nobody knows
            return [each.stem for each in self._root.glob("*.refusing")]
        return []

    @property
    def trouble(self) -> str:
        """Always the same."""
        return "no reason"

    async def attend(self) -> None:
        """Have them told."""
        self._is_attended = True

    def _path(self, key: PackedKey) -> Path:
        return self._root / key.hex()

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look for files."""
        return [
            Presence.PRESENT if self._path(key).exists() else Presence.ABSENT
            for key in keys
        ]

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Read files."""
        return [self._get(*each) for each in zip(keys, targets, strict=True)]

    def _get(self, key: PackedKey, target: memoryview) -> Fetched:
        try:
            return Envelope.open(self._path(key).read_bytes(), key, target)
        except FileNotFoundError:
            return Fetched(Verdict.ABSENT)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Write files."""
        self._fail_in("put")
        with anyio.CancelScope(shield=self._is_endless):
            await anyio.sleep(self._delay)
        for block in blocks:
            header = Envelope(block.key, len(block.data), block.checksum).encode()
            temporary = self._root / f"{block.key.hex()}.{os.getpid()}"
            temporary.write_bytes(header + block.data)
            temporary.rename(self._path(block.key))
        return [Verdict.DONE] * len(blocks)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove files."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        return [Verdict.DONE] * len(keys)

    async def stats(self) -> BackendStats:
        """Count files."""
        blocks = len(list(self._root.iterdir()))
        return BackendStats(blocks=blocks)

    async def aclose(self) -> None:
        """Nothing is open."""
