# SPDX-License-Identifier: Apache-2.0
"""Where engines find a slab's agent: the name of its socket, for as long as it is the agent's own."""

import contextlib
import os
from pathlib import Path

import anyio
from anyio.abc import SocketListener

from ucm.agent.protocol import SOCKET_NAME, within

__all__ = ["Address"]


class Address:
    """
    A socket's name in a slab's directory.

    Args:
        directory: The slab's, which there is.

    Raises:
        OSError: It is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / SOCKET_NAME
        self._fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._own: os.stat_result | None = None

    async def listen(self) -> SocketListener:
        """
        Listen there, in the place of whoever did.

        Raises:
            FileNotFoundError: The slab was removed since it was found.
        """
        name = within(self._fd, SOCKET_NAME)
        listener = await anyio.create_unix_listener(name, mode=0o600)
        try:
            self._own = os.lstat(name)
        except FileNotFoundError:
            await listener.aclose()
            raise
        return listener

    def why_lost(self) -> str:
        """Return why nobody who comes finds us there any more; empty while they do."""
        try:
            found = os.lstat(self._path)
        except OSError as exc:
            return f"its socket is gone: {exc}"
        assert self._own is not None
        is_own = os.path.samestat(found, self._own)
        return "" if is_own else f"{self._path} is the socket of another agent"

    def close(self) -> None:
        """Take the name away, unless it is another's by now."""
        with contextlib.suppress(FileNotFoundError):  # the slab is gone, and it with it
            name = within(self._fd, SOCKET_NAME)
            if self._own and os.path.samestat(os.lstat(name), self._own):
                os.unlink(name)
        os.close(self._fd)
