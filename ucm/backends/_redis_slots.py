# SPDX-License-Identifier: Apache-2.0
"""
Whose slots of a cluster are, by servers that can know.

redis-py asks any server that it knows, and takes the word of one that is cut off from the others. Such a server
names itself for what another one has by now.
"""

import contextlib
from collections.abc import Collection
from typing import Any

import anyio

from ucm.backends._redis_answers import ERRORS

__all__ = ["Slots"]


class Slots:
    """
    What redis-py knows of a cluster.

    Args:
        client: redis-py's, of a cluster.
        seconds: That asking takes at most.
    """

    def __init__(self, client: Any, seconds: float) -> None:  # noqa: ANN401 - redis-py's
        self._client = client
        self._seconds = seconds
        self._turn = anyio.Lock()
        self._scopes: set[anyio.CancelScope] = set()
        self._is_open = True

    async def learn(self, names: Collection[str]) -> None:
        """Ask servers of these names, one after the other until one answers; what is known stays if none does."""
        if not self._is_open:
            return
        with anyio.move_on_after(self._seconds) as scope, contextlib.suppress(*ERRORS):
            self._scopes.add(scope)
            try:
                async with self._turn:
                    await self._read(names)
            finally:
                self._scopes.discard(scope)

    def close(self) -> None:
        """Ask no more, and have who asks have no answer."""
        self._is_open = False
        for scope in self._scopes:
            scope.cancel()

    async def _read(self, names: Collection[str]) -> None:
        nodes = self._client.nodes_manager
        before = nodes.startup_nodes
        asked = {name: node for name, node in before.items() if name in names}
        if not asked:
            return
        nodes.startup_nodes = asked
        try:
            await nodes.initialize()
        finally:
            # It closes those that it has there; and adds what it has learned of.
            nodes.startup_nodes = asked | before
