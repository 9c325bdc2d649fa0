# SPDX-License-Identifier: Apache-2.0
"""Every simulated world by name; a world is imported when it is made."""

import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

WORLDS = {
    "accelerator": "AcceleratorWorld",
    "connector": "ConnectorWorld",
    "pipeline": "PipelineWorld",
    "tiers": "TiersWorld",
}
"""Name to class; its module is ``<name>_world``."""


class World(Protocol):
    """One simulated run."""

    seen: Counter[str]

    def run(self) -> None:
        """Run to the end."""


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules of worlds."""
    return [f"tests.simulation.{name}_world" for name in names]


def make_world(name: str, seed: int, steps: int) -> World:
    """Return a world that has not run; others need not be importable."""
    (name_of_module,) = modules_of([name])
    module = importlib.import_module(name_of_module)
    world: World = getattr(module, WORLDS[name])(seed, steps)
    return world
