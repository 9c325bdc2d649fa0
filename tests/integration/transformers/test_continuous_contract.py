# SPDX-License-Identifier: Apache-2.0
"""The contract of doors, held by continuous batching of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.e2e.models import LLAMA
from tests.integration.transformers.batching import LIMIT_S, Engine
from tests.integration.transformers.kit import OTHER, fetched_blocks, model_of
from ucm.testing.door import POOL, ROOM, Ability, Door, Prompts, Setting
from ucm.testing.door_contract import DoorContract


class ContinuousDoor(Door):
    """A manager of transformers, asked at once."""

    block_tokens = 16
    cannot: Mapping[Ability, str] = MappingProxyType(
        {Ability.KILL: "it is a thread of the test's; the chat server's test kills one"}
    )

    def start(self, slab: Path, setting: Setting) -> None:
        """Start a manager."""
        block_bytes = 16 * 4 * 2 * 2 * 32 * 4
        self._engine = Engine(
            _model_of(setting),
            slab.parent,
            capacity=str(ROOM * block_bytes if setting is Setting.SMALL else 64 << 20),
            num_blocks=POOL if setting is Setting.TIGHT else 400,
            tiers=self.tiers,
        )
        self._preempted: list[str] = []
        paged = self._engine.paged
        freed = paged.free_blocks

        def free_blocks(request_id: str, no_cache: bool = False) -> None:
            if no_cache:  # for another request
                self._preempted.append(request_id)
            freed(request_id, no_cache)

        paged.free_blocks = free_blocks

    def stop(self) -> None:
        """Stop it, with saves under way."""
        self._engine.stop()

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Ask for all at once."""
        return self._engine.ask(*prompts, num_tokens=num_tokens)

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Cancel one at once, and others as they have said so many tokens."""
        manager = self._engine.manager
        for count, prompt in enumerate(prompts):
            asked = manager.add_request(prompt, max_new_tokens=400, streaming=True)
            said: Any = None
            while count and (said is None or len(said.generated_tokens) < count):
                said = manager.get_result(timeout=LIMIT_S)
                said = said if said.request_id == asked else None
            manager.cancel_request(asked)
        self._engine.ask([1, 2, 3])  # it has heard of all when it has answered

    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Ask one with a cache of its own only, one prompt after another."""
        with Engine(_model_of(setting)) as engine:
            return [engine.ask(each, num_tokens=num_tokens)[0] for each in prompts]

    def loaded_blocks(self) -> int:
        """Return how many there were since the start."""
        return self._engine.loaded()

    def fetched_blocks(self) -> int:
        """Return how many there were since the start."""
        return fetched_blocks(self._engine.prompts)

    def settle(self) -> None:
        """Wait for all saves."""
        self._engine.prompts.cache.flush()

    def forget(self) -> None:
        """Empty its cache, and what is staged for it."""
        self._engine.forget()

    def preemptions(self) -> int:
        """Return how often it has taken its blocks from a request."""
        return len(self._preempted)

    def left(self) -> Mapping[str, int]:
        """Return transfers that do not end, and blocks that nobody has."""
        self.settle()
        sizes = {
            "open_transfers": len(self._engine.prompts.cache._core.open_transfers()),
            "lost_blocks": self._engine.lost_blocks(),
        }
        return {name: size for name, size in sizes.items() if size}

    def blocks_of(self, prompt: list[int]) -> int:
        """Return its whole blocks but that of the last token, which is computed."""
        return (len(prompt) - 1) // self.block_tokens


def _model_of(setting: Setting) -> Any:
    return model_of(OTHER if setting is Setting.FOREIGN else LLAMA)


@pytest.mark.slow
class TestContinuousDoor(DoorContract):
    """R-81: requests that are batched as they come, whatever happens to the store."""

    @classmethod
    def make_door(cls) -> Door:
        """Return what drives it."""
        return ContinuousDoor()
