# SPDX-License-Identifier: Apache-2.0
"""A child that a host forks has its caches, and none of the threads that serve them."""

import os
import weakref
from typing import Final, Protocol

__all__ = ["WHY_CLOSED", "Served", "left_in_children"]

WHY_CLOSED: Final = "the cache was opened before this process was forked: open one here"


class Served(Protocol):
    """What threads of ours serve."""

    def leave(self) -> None:
        """Be closed; wait for nothing, and take no lock, which a thread may have held."""


_served: "weakref.WeakSet[Served]" = weakref.WeakSet()


def left_in_children(served: Served) -> None:
    """Have it left in each child that is forked from now on."""
    _served.add(served)


def _leave_all() -> None:
    for served in list(_served):
        served.leave()


os.register_at_fork(after_in_child=_leave_all)
