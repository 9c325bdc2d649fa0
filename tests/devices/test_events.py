# SPDX-License-Identifier: Apache-2.0
"""Fences that devices hand out."""

import gc
import weakref

import pytest

from ucm.devices.events import DoneFence, FailedFence
from ucm.errors import DeviceFailedError


def test_a_done_fence_passes_without_waiting() -> None:
    """A fence behind finished work is done and needs none of its timeout."""
    fence = DoneFence()
    assert fence.is_done()
    assert fence.wait(0.0)


def test_a_failed_fence_keeps_nothing_alive_of_those_who_looked() -> None:
    """An error that is raised each time anew has no traceback that grows, and with it
    no engine's metadata or slots."""

    class Metadata:
        """Something large on the stack of whoever looks."""

    fence, called = FailedFence(DeviceFailedError("gone")), []
    kept = []

    def look() -> None:
        metadata = Metadata()
        kept.append(weakref.ref(metadata))
        for verb in (fence.is_done, lambda: fence.wait(1.0)):
            with pytest.raises(DeviceFailedError, match="gone"):
                verb()

    look()
    gc.collect()
    assert kept[0]() is None
    assert fence.call_when_over(lambda: called.append(True))
    assert [True] == called
