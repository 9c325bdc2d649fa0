# SPDX-License-Identifier: Apache-2.0
"""
Whether there is room for a slab before its first page is touched.

Who fills a file in memory beyond a cgroup's limit is killed without a word, who fills it
beyond ``memory.high`` is slowed down until almost nothing moves, with all of the engine, as
there is nothing to give back; and who fills it beyond the machine's memory takes others
along. So all are asked first. All of this reads ``/proc`` and ``/sys`` below a root that a
test may choose.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs

from ucm.affinity import text_in

__all__ = ["Room", "memory_rooms", "mount_room"]

_UNLIMITED = 1 << 60  # version 1 says about 2**63 where there is no limit


@attrs.frozen
class Room:
    """Bytes that are left of something, and what it is."""

    left: int
    what: str


def mount_room(about: os.statvfs_result) -> Room:
    """Return what is left of a file system; a tmpfs without a limit tells of no blocks at all."""
    left = about.f_bavail * about.f_frsize if about.f_blocks else _UNLIMITED
    return Room(left, "the file system")


def memory_rooms(system: Path) -> list[Room]:
    """
    Return what is left of each limit on this process's memory.

    Args:
        system: Where ``proc`` and ``sys`` are: ``/``.
    """
    rooms = []
    available = _number_of(text_in(system / "proc/meminfo"), "MemAvailable:")
    if available is not None:
        rooms.append(Room(1024 * available, "the machine's available memory"))
    for limit_file, used_file, cache in _cgroups(system):
        limit = text_in(limit_file).strip()
        used = text_in(used_file).strip()
        if not (limit.isdecimal() and used.isdecimal()) or int(limit) >= _UNLIMITED:
            continue
        stat = text_in(limit_file.with_name("memory.stat"))
        # Pages of files on disks go when memory is short; those of memory do not.
        kept = int(used) - sum(_number_of(stat, name) or 0 for name in cache)
        rooms.append(
            Room(
                max(0, int(limit) - max(0, kept)),
                f"the limit of {limit} bytes in {limit_file}, of which "
                f"{max(0, kept)} are in use",
            )
        )
    return rooms


def _cgroups(system: Path) -> Iterator[tuple[Path, Path, tuple[str, str]]]:
    """Yield each limit that we may have, what is used of it, and what of that is cache."""
    mount = system / "sys/fs/cgroup"
    for line in text_in(system / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            limits, used = ["memory.max", "memory.high"], "memory.current"
            tops, cache = [mount, mount / "unified"], ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            limits, used = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
            cache = ("total_inactive_file", "total_active_file")
            tops = [mount / "memory"]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for step in (inner, *inner.parents):
                if ".." not in step.parts:  # above what this namespace shows
                    for limit in limits:
                        yield top / step / limit, top / step / used, cache


def _number_of(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
