# SPDX-License-Identifier: Apache-2.0
"""Where slabs of tests lie."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.index_kit import Index
from tests.stores.slab_killer import Killer


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Return a path in memory where nothing is, and leave nothing there."""
    path = Path(f"/dev/shm/ucm-test-{os.getpid()}-path")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    """Return what runs processes that are killed."""
    with Killer() as made:
        yield made


@pytest.fixture
def make_index(tmp_path):
    """Make indexes, whose locks are closed at the end."""
    with contextlib.ExitStack() as end:

        def make(num_slots: int, data: bytes | None = None) -> Index:
            made = Index(tmp_path / "lock", num_slots, data)
            end.callback(made.index._lock.close)
            return made

        yield make
