# SPDX-License-Identifier: Apache-2.0
"""The contract of doors, held by prompts of transformers that are asked at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import torch

from tests.e2e.models import LLAMA
from tests.integration.transformers.kit import (
    OTHER,
    await_tiers,
    config_of,
    fetched_blocks,
    generate,
    loaded_blocks,
    model_of,
)
from ucm.integration.transformers import PromptCache
from ucm.testing.door import ROOM, Ability, Door, Prompts, Setting
from ucm.testing.door_contract import DoorContract


class TransformersDoor(Door):
    """A server in small: prompts are restored and saved at once, and computed in turn."""

    block_tokens = 16
    cannot: Mapping[Ability, str] = MappingProxyType(
        {
            Ability.KILL: "it has no process; the chat server's test kills one",
            Ability.PREEMPT: "transformers keeps what it computes",
        }
    )

    def __init__(self) -> None:
        self._portals: Any = None
        self._prompts: Any = None

    def start(self, slab: Path, setting: Setting) -> None:
        """Open a cache, on a loop of its own."""
        self._model = model_of(OTHER if setting is Setting.FOREIGN else LLAMA)
        block_bytes = 16 * 4 * 2 * 2 * 32 * 4
        capacity = ROOM * block_bytes if setting is Setting.SMALL else 64 << 20
        config = config_of(slab.parent, str(capacity), self.tiers)
        self._portals = anyio.from_thread.start_blocking_portal()
        self._portal = self._portals.__enter__()
        opening = PromptCache(config, self._model, lane_tokens=96)  # 6 blocks
        self._open = self._portal.wrap_async_context_manager(opening)
        self._prompts = self._open.__enter__()
        await_tiers(self._prompts)
        self._computing = self._portal.call(anyio.Semaphore, 1)

    def stop(self) -> None:
        """Close it."""
        self._open.__exit__(None, None, None)
        self._portals.__exit__(None, None, None)

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Prompts:
        """Ask for all at once."""
        answers: dict[int, list[int]] = {}

        async def ask(at: int) -> None:
            answers[at] = await self._answer(prompts[at], num_tokens)

        async def main() -> None:
            async with anyio.create_task_group() as group:
                for at in range(len(prompts)):
                    group.start_soon(ask, at)

        self._portal.call(main)
        return [answers[at] for at in range(len(prompts))]

    async def _answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        past, _ = await self._prompts.restore(ids)
        async with self._computing:
            done = await anyio.to_thread.run_sync(
                generate, self._model, ids, past, None, num_tokens
            )
        await self._prompts.save(done.sequences, done.past_key_values)
        said: list[int] = done.sequences[0, len(prompt) :].tolist()
        return said

    def abandon(self, prompts: Sequence[list[int]]) -> None:
        """Cancel each, one at once and others some turns of the loop later."""

        async def main() -> None:
            async with anyio.create_task_group() as group:
                for turns, prompt in enumerate(prompts):
                    group.start_soon(self._answer, prompt, 8)
                    for _ in range(20 * turns):
                        await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()

        self._portal.call(main)

    def baseline(
        self, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
    ) -> Prompts:
        """Ask the model alone."""
        model = model_of(OTHER if setting is Setting.FOREIGN else LLAMA)
        return [
            generate(model, torch.tensor([each]), num_tokens=num_tokens)
            .sequences[0, len(each) :]
            .tolist()
            for each in prompts
        ]

    def loaded_blocks(self) -> int:
        """Return how many there were since the start."""
        return loaded_blocks(self._prompts)

    def fetched_blocks(self) -> int:
        """Return how many there were since the start."""
        return fetched_blocks(self._prompts)

    def settle(self) -> None:
        """Wait for all saves."""
        self._prompts.cache.flush()

    def forget(self) -> None:
        """Do nothing: between two prompts nothing is kept."""

    def left(self) -> Mapping[str, int]:
        """Return transfers that are not over."""
        count = len(self._prompts.cache._core.open_transfers())
        return {"open_transfers": count} if count else {}


@pytest.mark.slow
class TestTransformersDoor(DoorContract):
    """R-81: restored by prefix, whatever happens to the store."""

    @classmethod
    def make_door(cls) -> Door:
        """Return what drives it."""
        return TransformersDoor()
