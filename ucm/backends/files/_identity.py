# SPDX-License-Identifier: Apache-2.0
"""How a process is named on a share for ever, and whether one of that name still runs."""

import contextlib
import os
import secrets
from pathlib import Path

from xxhash import xxh3_128_hexdigest

__all__ = ["identity", "is_alive"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ABSENT = FileNotFoundError, PermissionError, ProcessLookupError
"""What the system does not show; of whom it could not be asked, for want of a descriptor, nothing is known."""
_NOWHERE = secrets.token_hex()
"""Stands for a boot that is not told: others are as on another machine, where ages alone say who has ended."""


def identity(pid: int) -> str:
    """
    Name a process for ever: boot and container as one word, id and when it was started.

    In containers of one machine that start together processes have the same ids.

    Raises:
        OSError: The system cannot be asked now.
    """
    where = _NOWHERE
    with contextlib.suppress(*_ABSENT):  # systemd has ProcSubset=pid
        where = _BOOT.read_text()
    with contextlib.suppress(OSError):  # of a kernel that has no containers
        where += os.readlink("/proc/self/ns/pid")
    return f"{xxh3_128_hexdigest(where.encode())}.{pid}.{_started(pid)}"


def _started(pid: int) -> str:
    """Return when a process was started; empty if there is none."""
    try:
        told = Path(f"/proc/{pid}/stat").read_bytes()  # its name may be no UTF-8
        return told.rpartition(b")")[2].split()[19].decode()
    except _ABSENT:
        return ""


def is_alive(owner: str) -> bool:
    """Return whether a process of that name runs here, in this container; raises OSError, as ``identity`` does."""
    pid = owner.split(".")[1:2]
    return bool(pid) and pid[0].isdecimal() and identity(int(pid[0])) == owner
