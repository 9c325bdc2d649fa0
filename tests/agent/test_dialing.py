# SPDX-License-Identifier: Apache-2.0
"""Whose a connection to the agent is."""

import asyncio
import contextlib
import gc
import os
import socket
from pathlib import Path

import pytest

from ucm.agent.dialing import dial
from ucm.agent.protocol import SOCKET_NAME
from ucm.errors import MessageError

LIMIT_S = 60.0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_connection_ends_with_its_process_whatever_that_has_forked(
    tmp_path: Path,
) -> None:
    """An agent hears of its host's end while a child lives; no file of the child's is closed
    where the connection was."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()
        is_over, goes_on = os.pipe()

        async def host() -> tuple[int, socket.socket]:
            _, writer = await dial(tmp_path)
            fd = writer.get_extra_info("socket").fileno()
            if not (child := os.fork()):
                os.close(goes_on)
                with contextlib.suppress(OSError):
                    os.fstat(fd)
                    os._exit(1)
                os.dup2(is_over, fd)  # the number is free, and somebody else's now
                writer.transport.abort()
                del writer
                gc.collect()
                os.read(fd, 1)
                os._exit(0)
            peer, _ = listener.accept()
            writer.write(b"host")
            writer.close()
            await writer.wait_closed()
            return child, peer

        child, peer = asyncio.run(host())
        with peer:
            peer.settimeout(LIMIT_S)
            assert (b"host", b"") == (peer.recv(8), peer.recv(8))
        assert (0, 0) == os.waitpid(child, os.WNOHANG)
        os.close(goes_on)
        assert 0 == os.waitpid(child, 0)[1]
        os.close(is_over)


def test_agent_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else could make a socket there could say which blocks are in the slab."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(MessageError, match="another user"):
            asyncio.run(dial(tmp_path))
