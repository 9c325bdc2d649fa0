# SPDX-License-Identifier: Apache-2.0
"""Doors to a SGLang that is not there."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.sglang.kit import Kit
from tests.integration.sglang.test_tiers import Machines


@pytest.fixture
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """Doors over a slab of the test's own."""
    with ExitStack() as opened:
        yield Kit(tmp_path_factory.mktemp("sglang"), opened)


@pytest.fixture
def machines(kit: Kit, tmp_path: Path) -> Iterator[Machines]:
    """Return them; the slabs' paths are short."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        made = Machines(kit, Path(shm), tmp_path / "share")
        yield made
        made.end()
