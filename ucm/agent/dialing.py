# SPDX-License-Identifier: Apache-2.0
"""
How a client comes by a connection to the agent, which is its process's alone, and reads from it.

A child that is forked off a host has the host's sockets as well. An agent would take it for the
host behind the host's end: it would never go, and keep what the host had wanted.
"""

import asyncio
import contextlib
import os
import socket
import weakref
from pathlib import Path
from typing import Final

import attrs
import msgspec

from ucm.agent.protocol import (
    FRAME_HEADER,
    SOCKET_NAME,
    FromAgent,
    Welcome,
    decode_frame,
    frame_bytes,
    within,
)
from ucm.errors import MessageError
from ucm.status import peer_uid

__all__ = ["Agents", "dial", "own_alone", "receive", "why_lost"]

_DECODER: "Final[msgspec.msgpack.Decoder[FromAgent]]" = msgspec.msgpack.Decoder(
    FromAgent
)

_in_this_process: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


@attrs.define
class Agents:
    """Those of a node, as a client meets one after the other; again and again the same, too."""

    count: int = 0
    _nonce: str = ""

    def met(self, welcome: Welcome) -> None:
        """Count who says so, unless it is the one that was there before."""
        if not self.count or welcome.nonce != self._nonce:
            self.count, self._nonce = self.count + 1, welcome.nonce


def own_alone(own: socket.socket) -> socket.socket:
    """Have a forked child have no part in a socket; return it."""
    _in_this_process.add(own)
    return own


async def dial(directory: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """
    Connect to the agent of a slab's directory; a forked child has no part in the connection.

    Raises:
        OSError: Nobody listens there.
        MessageError: It is another user's.
    """
    own = own_alone(socket.socket(socket.AF_UNIX))
    with contextlib.ExitStack() as undo:
        undo.callback(own.close)
        own.setblocking(False)
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = str(within(fd, SOCKET_NAME))
            await asyncio.get_running_loop().sock_connect(own, path)
        finally:
            os.close(fd)
        if peer_uid(own) != os.geteuid():
            raise MessageError("the agent belongs to another user")
        connected = await asyncio.open_unix_connection(sock=own)
        undo.pop_all()
    return connected


async def receive(reader: asyncio.StreamReader) -> FromAgent:
    """
    Return what the agent says next.

    Raises:
        EOFError: It is gone.
        MessageError: It is nothing that an agent says.
    """
    header = await reader.readexactly(FRAME_HEADER.size)
    payload = await reader.readexactly(frame_bytes(header))
    return decode_frame(payload, _DECODER)


def why_lost(problem: BaseException) -> str:
    """Return why an agent is lost in words; what its socket says stands behind them."""
    if isinstance(problem, EOFError | ConnectionError):
        return f"it has ended, or closed the connection ({problem})"
    if isinstance(problem, TimeoutError):
        return "it does not answer in time"
    return str(problem)


def _leave_all() -> None:
    for own in list(_in_this_process):
        if (fd := own.detach()) >= 0:  # who closes it later closes nothing
            os.close(fd)


os.register_at_fork(after_in_child=_leave_all)
