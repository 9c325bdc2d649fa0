# SPDX-License-Identifier: Apache-2.0
"""
Processes that compute in turn, so that what slows the machine slows all of them alike.

An engine beside the same engine an hour later differs by a fifth here, whatever is changed:
other machines share the hardware. Of engines that take turns every second each sees the
same hour. Only who has the baton computes; a byte through a pipe hands it on.
"""

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Baton", "conduct", "in_turn"]

_GO, _PAUSED, _OVER = b"g", b"p", b"o"
_DEADLINE_S = 600.0


class Baton:
    """
    One process's end; made by ``conduct``'s process first, with *is_new*.

    Args:
        path: Of its two pipes, without their endings.
        is_new: Whether to make them.
    """

    def __init__(self, path: str, *, is_new: bool = False) -> None:
        names = [Path(f"{path}.go"), Path(f"{path}.told")]
        if is_new:
            for name in names:
                os.mkfifo(name, 0o600)
        # For both directions, or opening one waits for the other end.
        self._go, self._told = (os.open(name, os.O_RDWR) for name in names)

    def take(self) -> None:
        """Wait until it is this process's turn."""
        _read(self._go)

    def pause(self) -> None:
        """Let the others compute, and wait for the next turn."""
        os.write(self._told, _PAUSED)
        self.take()

    def end(self) -> None:
        """Let the others compute for good."""
        os.write(self._told, _OVER)

    def close(self) -> None:
        """Close the pipes."""
        os.close(self._go)
        os.close(self._told)

    def give(self, is_alive: Callable[[], bool]) -> bool:
        """Let it compute for a while; return whether it will want to again."""
        os.write(self._go, _GO)
        while is_alive():
            if select.select([self._told], [], [], 1.0)[0]:
                return os.read(self._told, 1) == _PAUSED
        return False


def _read(pipe: int) -> None:
    if not select.select([pipe], [], [], _DEADLINE_S)[0]:
        raise TimeoutError(f"no turn within {_DEADLINE_S} s")
    os.read(pipe, 1)


@contextmanager
def in_turn(path: str) -> Iterator[Callable[[], None] | None]:
    """Compute in turn with others; yield what pauses. Without a *path* nobody else does."""
    if not path:
        yield None
        return
    baton = Baton(path)
    baton.take()
    try:
        yield baton.pause
    finally:
        baton.end()


def conduct(batons: dict[Baton, Callable[[], bool]]) -> None:
    """Give each of them its turn, round after round, until all have ended."""
    while batons:
        batons = {
            baton: is_alive
            for baton, is_alive in batons.items()
            if baton.give(is_alive)
        }
