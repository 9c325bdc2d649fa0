# SPDX-License-Identifier: Apache-2.0
"""A counter with a race in it, for the line-by-line preemption to find."""


class Counter:
    """Adds one in three steps."""

    def __init__(self):
        self.value = 0

    def add(self):
        """Read, think, write."""
        seen = self.value
        thought = seen + 1
        self.value = thought
