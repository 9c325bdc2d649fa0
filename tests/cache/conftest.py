# SPDX-License-Identifier: Apache-2.0
"""Coroutines as tests: they run on asyncio, or on each loop of ``both_loops``."""

import pytest


@pytest.fixture
def loop() -> str:
    """Return the loop of tests that do not ask for both."""
    return "asyncio"


@pytest.fixture
def anyio_backend(loop: str) -> str:
    """Name the loop to anyio's own plugin of pytest."""
    return loop
