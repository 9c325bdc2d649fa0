# SPDX-License-Identifier: Apache-2.0
"""The tier that engines of the contract of doors have in common, seen past its backend."""

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path

from ucm.agent.protocol import SOCKET_NAME, within
from ucm.testing.slab_damage import stored

__all__ = ["await_spilled", "damage_files", "end_agent", "tiers_at"]

_LIMIT_S = 120.0
"""For a hang; a busy machine's."""
_PAUSE_S = 0.005


def tiers_at(root: Path) -> list[dict[str, object]]:
    """Return the setting ``tiers`` of an engine that keeps blocks in this directory."""
    return [{"type": "files", "path": str(root), "capacity": "64MiB"}]


def await_spilled(slab: Path, root: Path) -> None:
    """Wait until the tier has what the slab has."""
    until = time.monotonic() + _LIMIT_S
    while not {key.hex() for key in stored(slab)} <= {
        each.name for each in _files(root)
    }:
        assert time.monotonic() < until, f"{root} has {len(_files(root))} blocks"
        time.sleep(_PAUSE_S)


def damage_files(root: Path) -> int:
    """Change a byte in the middle of each block of the tier; return how many there are."""
    paths = _files(root)
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)
    return len(paths)


def end_agent(slab: Path) -> None:
    """Kill the agent of a slab, which stays for a while behind its last engine."""
    with contextlib.ExitStack() as opened:
        asked = opened.enter_context(socket.socket(socket.AF_UNIX))
        try:
            fd = os.open(slab, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            asked.connect(str(within(fd, SOCKET_NAME)))
        except (ConnectionError, FileNotFoundError):
            return  # there is none
        told = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        with contextlib.suppress(ProcessLookupError):
            os.kill(struct.unpack("3i", told)[0], signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            asked.recv(1)  # until it is gone


def _files(root: Path) -> list[Path]:
    return [*root.glob("blocks/*/*/*")]
