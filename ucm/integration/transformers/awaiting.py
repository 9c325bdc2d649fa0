# SPDX-License-Identifier: Apache-2.0
"""
``DynamicCache`` of transformers, saved and restored by prefix, with ``await``.

    async with PromptCache(config, model) as prompts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        past, _ = await prompts.restore(ids)
        done = await to_thread(generate, model, ids, past)
        await prompts.save(done.sequences, done.past_key_values)

Tensors have to be copied, and no loop can be held for that: so each verb is that of the
other face, whole, on a thread of the host's. It goes there and back once.

Threading: the loop that entered it.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import torch
from transformers import DynamicCache, PreTrainedModel

from ucm.cache.sync import Cache
from ucm.config import UCMConfig
from ucm.integration.transformers.dynamic import BlockingPromptCache, Restored

__all__ = ["PromptCache"]


class PromptCache(contextlib.AbstractAsyncContextManager["PromptCache"]):
    """
    Caches of one model for hosts on asyncio or trio; entered before use.

    A verb that is cancelled ends first, within its deadlines.

    Args:
        config: Settings, as of ``ucm.open``.
        model: Ready to generate; looked at when this is entered.
        lanes: How many verbs, and threads, go on at once; others wait in line.
        options: All others of ``BlockingPromptCache``.

    Raises:
        ConfigError: See there; on entering.
    """

    def __init__(
        self,
        config: UCMConfig | Mapping[str, object],
        model: PreTrainedModel,
        *,
        lanes: int = 4,
        **options: Any,  # noqa: ANN401 - the other face says what they are
    ) -> None:
        self._open = partial(BlockingPromptCache, config, model, lanes=lanes, **options)
        self._limiter = anyio.CapacityLimiter(lanes)
        self._prompts: BlockingPromptCache

    async def __aenter__(self) -> Self:
        self._prompts = await anyio.to_thread.run_sync(self._open)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._prompts.close)

    @property
    def cache(self) -> Cache:
        """What it stands on; its verbs but ``measure`` block for up to their deadlines."""
        return self._prompts.cache

    async def restore(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
    ) -> Restored:
        """Return a cache of the longest stored prefix; see ``BlockingPromptCache``."""
        verb = partial(self._prompts.restore, input_ids, attention_mask, salt=salt)
        return await anyio.to_thread.run_sync(verb, limiter=self._limiter)

    async def save(
        self,
        input_ids: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
    ) -> int:
        """Save what is stored nowhere yet; see ``BlockingPromptCache``."""
        verb = partial(
            self._prompts.save, input_ids, past_key_values, attention_mask, salt=salt
        )
        return await anyio.to_thread.run_sync(verb, limiter=self._limiter)
