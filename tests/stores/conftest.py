# SPDX-License-Identifier: Apache-2.0
"""Where slabs of tests lie."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native_kit import by_python  # noqa: F401  a fixture
from tests.stores.index_kit import Index
from tests.stores.slab_killer import Killer
from ucm import native
from ucm.stores.slab import is_in_memory


@pytest.fixture(params=["native", "python"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an index be changed by native code, if that is built, and by Python."""
    if request.param == "python":
        monkeypatch.setattr(native, "LIBRARY", None)
    elif native.LIBRARY is None:
        pytest.skip("native code is not built")


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Return a directory on a disk; skip where there is none."""
    with tempfile.TemporaryDirectory(prefix="ucm-test-", dir="/var/tmp") as made:
        if is_in_memory(Path(made)):
            pytest.skip("/var/tmp is memory here")
        yield Path(made)


@pytest.fixture
def memory_path(tmp_path: Path) -> Path:
    """Return a path where nothing is."""
    return tmp_path / "memory"


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
            end.callback(made.index._lock.abandon)
            return made

        yield make
