# SPDX-License-Identifier: Apache-2.0
"""Doors to a SGLang that is not there."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.sglang.kit import Kit


@pytest.fixture
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """Doors over a slab of the test's own."""
    with ExitStack() as opened:
        yield Kit(tmp_path_factory.mktemp("sglang"), opened)
