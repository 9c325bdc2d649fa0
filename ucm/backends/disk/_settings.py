# SPDX-License-Identifier: Apache-2.0
"""Settings of a tier on drives."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from ucm.backends.disk._stamp import PAGE, Geometry
from ucm.config import Durability
from ucm.errors import ConfigError
from ucm.settings import check_path, field, read_size

__all__ = ["DiskSettings"]

_LEAST_CAPACITY = 16 * 3 * PAGE


def _read_paths(key: str, value: object) -> tuple[Path, ...]:
    paths = [value] if isinstance(value, str) else value
    if isinstance(paths, list) and paths and all(isinstance(one, str) for one in paths):
        found = tuple(Path(one).absolute() for one in paths)
        if all(paths) and len(set(found)) == len(found):
            for one in paths:
                check_path(key, one)
            return found
    raise ConfigError(
        key, value, "no directory", "Give one, or a list of several, one on each drive."
    )


@attrs.frozen(kw_only=True)
class DiskSettings:
    """Settings of a tier on drives."""

    path: tuple[Path, ...] = field(
        (),
        "A directory of its own, or one for each of several drives.",
        read=_read_paths,
    )
    capacity: int = field(
        64 << 30, "Of all drives together.", read=read_size, least=_LEAST_CAPACITY
    )
    durability: Durability = field(Durability.PROCESS, "What blocks outlast.")
    threads: int = field(32, "Requests to the drives at a time.", least=1)

    @property
    def geometry(self) -> Geometry:
        """How the file of each drive is cut, unless there is one."""
        return Geometry.fit(self.capacity // max(1, len(self.path)))

    def geometry_of(self, sizes: Sequence[int], key: str) -> Geometry:
        """
        Return how the files of all drives are cut, whose extents have these sizes.

        Raises:
            ConfigError: They were made to be cut in different ways.
        """
        geometry = Geometry.fit(self.capacity // len(sizes), min(sizes))
        if len(set(sizes)) > 1 or not geometry.num_extents:
            raise ConfigError(
                key,
                self.capacity,
                f"the drives were made with extents of {sorted(set(sizes))} bytes",
                "Give the capacity that they were made with, or remove what is there.",
            )
        return geometry

    @property
    def max_block_bytes(self) -> int:
        """The largest block that the tier takes."""
        return self.geometry.max_block_bytes

    def check(self, prefix: str) -> None:
        """Refuse a capacity of which no drive has enough for a block."""
        least = _LEAST_CAPACITY * len(self.path)
        if self.capacity < least:
            raise ConfigError(
                f"{prefix}capacity",
                self.capacity,
                f"too little for {len(self.path)} drives",
                f"Give at least {least}, or fewer drives.",
            )
