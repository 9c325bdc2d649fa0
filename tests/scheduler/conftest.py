# SPDX-License-Identifier: Apache-2.0
"""Adapters that must be consistent when their test ends."""

from collections.abc import Iterator

import pytest

from tests.kit.consistency import validate
from tests.scheduler.model import ONE_FULL, SetIndex, make_adapter
from ucm.scheduler.adapter import SchedulerAdapter


@pytest.fixture
def index() -> SetIndex:
    """Return an empty index."""
    return SetIndex()


@pytest.fixture
def adapter(index: SetIndex) -> Iterator[SchedulerAdapter]:
    """Return an adapter for one group and rank that must end consistent."""
    adapter = make_adapter(ONE_FULL, index)
    yield adapter
    validate(adapter)


@pytest.fixture
def on_two(index: SetIndex) -> Iterator[SchedulerAdapter]:
    """Return an adapter for two ranks that must end consistent."""
    adapter = make_adapter(ONE_FULL, index, num_ranks=2, shards=2)
    yield adapter
    validate(adapter)
