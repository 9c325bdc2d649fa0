# SPDX-License-Identifier: Apache-2.0
"""Where slabs of tests lie."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Return a path in memory where nothing is, and leave nothing there."""
    path = Path(f"/dev/shm/ucm-test-{os.getpid()}-path")
    yield path
    shutil.rmtree(path, ignore_errors=True)
