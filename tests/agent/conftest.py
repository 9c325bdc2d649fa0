# SPDX-License-Identifier: Apache-2.0
"""What tests of the agent share."""

import tempfile
from pathlib import Path

import pytest

from tests.agent.test_process import Place


@pytest.fixture
def place(tmp_path):
    """Return where it all is; the slab's path is short."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        yield Place(tmp_path, Path(shm))
