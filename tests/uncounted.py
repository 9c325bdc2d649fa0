# SPDX-License-Identifier: Apache-2.0
"""
Engines, and what repeats the same over many seeds, count for no coverage.

Whoever counts lines makes an engine half as fast and a simulation a third. Other tests
have to reach all lines without them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

try:
    from coverage import Coverage
except ImportError:  # not installed, so nobody counts
    Coverage = None

_REPEATING = (
    "test_accelerator_world.py",
    "test_connector_world.py",
    "test_driver_world.py",
    "test_host.py",
    "test_host_layerwise.py",
    "test_host_runners.py",
    "test_many.py",
    "test_pipeline_world.py",
    "test_served_world.py",
    "test_tiers_world.py",
    "test_topology_host.py",
    "test_weights_world.py",
)
"""Where slow tests are worlds of many acts, or ten thousand of the same."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Stop counting for an engine, and for a slow test that repeats."""
    repeats = item.path.name in _REPEATING and item.get_closest_marker("slow")
    if Coverage is None or not (repeats or item.get_closest_marker("engine")):
        return (yield)
    with _uncounted():
        return (yield)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Stop all who count, of whom a process of several side by side has two."""
    stopped = []
    while (counting := Coverage.current()) is not None:
        counting.stop()
        stopped.append(counting)
    try:
        yield
    finally:
        for each in reversed(stopped):
            each.start()
