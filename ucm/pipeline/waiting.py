# SPDX-License-Identifier: Apache-2.0
"""How the loop waits for a device fence."""

import anyio

from ucm.devices.abc import Fence

__all__ = ["fence_passed"]

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.005


async def fence_passed(fence: Fence) -> None:
    """
    Return when *fence* has passed; the caller's cancel scope is the deadline.

    Polls at growing intervals. A device with its own poller thread wakes the loop
    instead, once there is such a device.
    """
    pause = _FIRST_POLL_S
    while not fence.is_done():
        await anyio.sleep(pause)
        pause = min(pause * 2, _LAST_POLL_S)
