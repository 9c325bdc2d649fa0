# SPDX-License-Identifier: Apache-2.0
"""Coroutines as tests: they run on the loop that ``both_loops`` names."""

import pytest


@pytest.fixture
def anyio_backend(loop: str) -> str:
    """Name the loop to anyio's own plugin of pytest."""
    return loop
