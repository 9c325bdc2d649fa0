# SPDX-License-Identifier: Apache-2.0
"""Fences that devices hand out."""

from ucm.devices.events import DoneFence


def test_a_done_fence_passes_without_waiting() -> None:
    """A fence behind finished work is done and needs none of its timeout."""
    fence = DoneFence()
    assert fence.is_done()
    assert fence.wait(0.0)
