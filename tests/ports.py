# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that tests start."""

import contextlib
import random
import socket

__all__ = ["free_ports"]

_FIRST, _LAST = 10_000, 22_000
"""They and their relatives are below what outgoing connections are given: in between no
client of anybody takes one that a server is about to listen at."""
_RELATIVE = 10_000
_DICE = random.SystemRandom()  # who else runs tests here must not draw the same


def free_ports(count: int) -> list[int]:
    """Return loopback ports at which nobody listens, nor at their relatives."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = _DICE.randrange(_FIRST, _LAST)
            with contextlib.suppress(OSError):
                for each in (port, port + _RELATIVE):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", each))
                found.append(port)
    return found
