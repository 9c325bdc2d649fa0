# SPDX-License-Identifier: Apache-2.0
"""
In which pages shared memory lies while a benchmark runs.

A slab in small pages is read, written and moved by devices at half the speed of what other caches keep
in huge pages of one process's own. ``ucm doctor`` tells operators how to have them; a benchmark has
them by a mount of its own, which nobody else sees and which ends with its last process.
"""

import os
import subprocess
import sys
from pathlib import Path

from ucm.stores.slab._memory import mount_of

__all__ = ["PAGES", "enter"]

PAGES = ("huge", "small")
_MOUNTED = Path("/dev/shm")
_MARK = "BENCHMARKS_SHARED_MEMORY"
_LIMIT_S = 20.0


def enter(wanted: str) -> str:
    """
    Begin this process anew where shared memory has huge pages, if that can be had.

    Args:
        wanted: One of ``PAGES``; *small* leaves all as it is.

    Returns:
        Where it does not begin anew: how shared memory is mounted.
    """
    told = mount_of(_MOUNTED).options
    if wanted == "huge" and "huge=" not in told and _MARK not in os.environ:
        room = os.statvfs(_MOUNTED)
        options = f"huge=within_size,mode=1777,size={room.f_blocks * room.f_frsize}"
        mount = f"mount -t tmpfs -o {options} tmpfs {_MOUNTED}"
        who = [] if os.geteuid() == 0 else ["--map-root-user"]
        alone = ["unshare", "--mount", *who, "sh", "-c"]
        if _works([*alone, mount]):
            os.environ[_MARK] = wanted  # whatever it is told there: never twice
            again = [sys.executable, *sys.orig_argv[1:]]
            os.execvp(alone[0], [*alone, f'{mount} && exec "$@"', "sh", *again])
    return told


def _works(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, timeout=_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
