# SPDX-License-Identifier: Apache-2.0
"""Where slabs of these tests lie, and one with blocks of two models."""

from pathlib import Path

import pytest

from tests.cli.store_kit import CHAT, CODE, TOKENS, keys_of
from tests.stores.conftest import disk_path, memory_path
from tests.stores.slab_kit import open_slab
from ucm.testing.store_blocks import save

__all__ = ["disk_path", "memory_path"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a slab with three blocks of one model and two of another."""
    path = tmp_path / "slab"
    with open_slab(path) as store:
        save(store, keys_of(CHAT, TOKENS))
        save(store, keys_of(CODE, TOKENS[:8]))
        store.describe(CHAT)
        store.describe(CODE)
    return path
