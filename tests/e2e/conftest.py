# SPDX-License-Identifier: Apache-2.0
"""Marks for every test that drives the real engine, and its models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.engine_imports  # noqa: F401 - its import is what counts
from tests.e2e import models
from tests.kit.lockstep import TraceViolationError, check_trace, read_traces
from tests.traces import logs_closed, traces_of

HERE = Path(__file__).parent
ENGINE_WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning")
"""The engine and its libraries warn about each other; ours stay errors elsewhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this directory: engine, slow, and with time for a start."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))
        for warning in ENGINE_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def llama() -> Path:
    """Full attention, one KV cache group."""
    return models.make_model(models.LLAMA)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Sliding windows beside full attention, three KV cache groups."""
    return models.make_model(models.GEMMA3)


@pytest.fixture(scope="session")
def deepseek() -> Path:
    """Multi-head latent attention."""
    return models.make_model(models.DEEPSEEK)


@pytest.fixture
def killed() -> None:
    """Say that the test kills an engine, so that a trace may end anywhere."""


@pytest.fixture(autouse=True, scope="session")
def _logs() -> Iterator[None]:
    """Close the logs of engines in this process."""
    with logs_closed():
        yield


@pytest.fixture(autouse=True)
def _traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Check what every engine of the test has logged."""
    yield
    is_whole = "killed" not in request.fixturenames
    try:
        check_trace(read_traces(traces_of(tmp_path / "slab")), is_whole=is_whole)
    except TraceViolationError as exc:  # of its long text perhaps the end alone is kept
        exc.add_note(f"{request.node.nodeid}: {exc.why}")
        raise
