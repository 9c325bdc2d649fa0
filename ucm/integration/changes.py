# SPDX-License-Identifier: Apache-2.0
"""When files were changed, and since when an engine's process runs: on one clock, the time of day."""

import multiprocessing
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["engine_began_ns", "last_change_ns", "links_made_ns"]

_STARTED = 19
"""Of the fields behind the name in ``/proc/<pid>/stat`` (proc(5)): ticks since the boot."""


def engine_began_ns(name: str = "") -> int | None:
    """
    Return when this process began, to a hundredth of a second; None where it is a host's own.

    Args:
        name: With which those of an engine begin that ``multiprocessing`` starts.
    """
    own = multiprocessing.current_process().name
    if multiprocessing.parent_process() is None or not own.startswith(name):
        return None
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started = int(fields[_STARTED]) * 10**9 // os.sysconf("SC_CLK_TCK")
    ago = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started
    return time.time_ns() - ago


def last_change_ns(directory: Path, files: Iterable[Path]) -> int:
    """
    Return when the last of some files of a directory was changed, or put in another's place.

    That is also when a symbolic link on the way to one was made, or the directory renamed. What
    else comes and goes in the directory does not count.
    """
    paths = list(files)
    times = [os.stat(path).st_ctime_ns for path in paths]
    own = os.stat(directory)
    if own.st_ctime_ns != own.st_mtime_ns:  # not by an entry
        times.append(own.st_ctime_ns)
    return max(times + [at for path in paths for at in links_made_ns(path)], default=0)


def links_made_ns(path: Path) -> Iterator[int]:
    """Yield when each symbolic link on the way to a file was made."""
    for step in (*reversed(path.parents), path):
        status = os.lstat(step)
        if stat.S_ISLNK(status.st_mode):
            yield status.st_ctime_ns
            target = step.parent / os.readlink(step)
            yield from links_made_ns(target / path.relative_to(step))
            return
