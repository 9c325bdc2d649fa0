# SPDX-License-Identifier: Apache-2.0
"""An agent that gets no more of what the system has."""

import os
import resource

import pytest

from tests.agent.test_process import Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent.client import AgentClient
from ucm.testing.store_blocks import BLOCK_BYTES

pytestmark = pytest.mark.slow


class Log:
    """What an engine logs."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def info(self, event: str, **_: object) -> None:
        """Take a line."""

    def warning(self, event: str, error: str) -> None:
        """Take a line that says why."""
        self.errors.append(error)


def test_agent_without_descriptors_for_an_engine_serves_the_others(
    place: Place,
) -> None:
    """R-63: an engine whose class of slots it cannot open is told why, others lose nothing, and
    it is served as soon as there are some."""
    with (
        open_slab(place.slab, 64),
        place.agent("--linger", "-1") as agent,
        place.client() as client,
    ):
        used = {int(name) for name in os.listdir(f"/proc/{agent.pid}/fd")}
        free = sorted({*range(len(used) + 2)} - used)
        _, most = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
        # One for its connection, and none for what lies behind that.
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (free[0] + 1, most))
        log = Log()
        other = AgentClient(place.slab, 4 * BLOCK_BYTES, log)
        try:
            until(lambda: log.errors or agent.poll() is not None)
            assert agent.poll() is None
            (told,) = log.errors
            assert told.startswith("the agent cannot open the slab now: [Errno 24]")
            assert client.is_up
            resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (most, most))
            until(lambda: other.is_up)
        finally:
            other.close()
