# SPDX-License-Identifier: Apache-2.0
"""Every simulated world by name."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from tests.simulation.connector_world import ConnectorWorld
from tests.simulation.pipeline_world import PipelineWorld


class World(Protocol):
    """One simulated run."""

    seen: Counter[str]

    def run(self) -> None:
        """Run to the end."""


WORLDS: dict[str, Callable[[int, int], World]] = {
    "connector": ConnectorWorld,
    "pipeline": PipelineWorld,
}
