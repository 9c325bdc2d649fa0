# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of a small model, started and asked by tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.integration.transformers.kit import (
    BLOCK,
    await_tiers,
    config_of,
    loaded_blocks,
)
from ucm.integration.transformers.continuous import ContinuousPrompts

LIMIT_S = 120.0
PATIENCE_S = 60.0
"""A busy machine's; a test that waits for longer hangs."""


def manager_of(model: Any, num_blocks: int = 400, **settings: Any) -> Any:
    """Return a manager that is not started yet."""
    return model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(
            **{
                "page_size": BLOCK,
                "num_blocks": num_blocks,
                "max_batch_tokens": 512,
                "use_cuda_graph": False,
                "use_async_batching": False,
                **settings,
            }
        ),
    )


def ask(
    manager: Any, prompts: Sequence[list[int]], num_tokens: int = 8
) -> list[list[int]]:
    """Ask for all at once; what is left of requests that were given up is passed over."""
    ids = manager.add_requests(list(prompts), max_new_tokens=num_tokens)
    said: dict[str, list[int]] = {}
    while not said.keys() >= set(ids):
        result = manager.get_result(timeout=LIMIT_S)
        assert result is not None, "the engine is gone, or hangs"
        assert result.error is None, result.error
        if result.is_finished():
            said[result.request_id] = result.generated_tokens
    return [said[each] for each in ids]


class Engine:
    """
    A manager that is started, with a store below its cache; without a directory it
    remembers nothing at all.

    Args:
        model: Ready to generate.
        directory: Where the store is.
        capacity: Of the store.
        num_blocks: Of the engine's own pool.
        tiers: Below the store.
        options: Of ``ContinuousPrompts``.
    """

    def __init__(
        self,
        model: Any,
        directory: Path | None = None,
        *,
        capacity: str = "64MiB",
        num_blocks: int = 400,
        tiers: Sequence[object] = (),
        **options: Any,
    ) -> None:
        shares = directory is not None
        self.manager = manager_of(model, num_blocks, allow_block_sharing=shares)
        self.prompts: Any = None
        if directory is not None:
            config = config_of(directory, capacity, tiers)
            options = {"patience": PATIENCE_S, **options}
            self.prompts = ContinuousPrompts(config, self.manager, **options)
            await_tiers(self.prompts)
            self.paged = self.manager.batch_processor.cache
            (self.allocator,) = self.paged.cache_allocators.values()
        self.manager.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it."""
        self.manager.stop(hard_stop=True)
        if self.prompts is not None:
            self.prompts.close()

    def ask(self, *prompts: list[int], num_tokens: int = 8) -> list[list[int]]:
        """Ask for all at once."""
        return ask(self.manager, prompts, num_tokens)

    def loaded(self) -> int:
        """Return how many blocks have come from the store."""
        return loaded_blocks(self.prompts)

    def forget(self) -> None:
        """Wait for all saves, and let only the store remember anything."""
        self.prompts.cache.flush()
        with self.manager.pause():
            self.paged.evict_cached_blocks()
            self.paged.pool.try_to_free_sectors()
            self.prompts._staged.forget()

    def lost_blocks(self) -> int:
        """Return how many blocks of its pool an idle engine will never use again."""
        allocator, pool = self.allocator, self.allocator.pool
        with self.manager.pause():
            free = pool.num_free_sectors * allocator.blocks_per_sector
            free += pool.count_free_blocks(allocator.index)
            return int(
                allocator.num_blocks - free - len(allocator.ledger.cached_blocks)
            )
