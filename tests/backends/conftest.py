# SPDX-License-Identifier: Apache-2.0
"""Where tiers of tests lie."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a directory on a disk: memory takes whatever a disk refuses."""
    with tempfile.TemporaryDirectory(prefix="ucm-test-", dir="/var/tmp") as made:
        yield Path(made)
