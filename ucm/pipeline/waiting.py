# SPDX-License-Identifier: Apache-2.0
"""How the loop waits for a device fence."""

import asyncio
import contextlib

import anyio

from ucm.devices.abc import Fence
from ucm.errors import DeviceError

__all__ = ["fence_passed", "has_passed"]

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.005


def has_passed(fence: Fence) -> bool:
    """Return whether *fence* has passed; False also if it never will."""
    try:
        return fence.is_done()
    except DeviceError:
        return False


async def fence_passed(fence: Fence) -> None:
    """
    Return when *fence* has passed; the caller's cancel scope is the deadline.

    The fence calls back where it can; otherwise it is looked at, at growing intervals.

    Raises:
        DeviceError: It never will.
    """
    if fence.is_done():
        return
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(over.set)

    if fence.call_when_over(wake):
        await over.wait()
    pause = _FIRST_POLL_S
    while not fence.is_done():
        await anyio.sleep(pause)
        pause = min(pause * 2, _LAST_POLL_S)
