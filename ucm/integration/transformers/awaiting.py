# SPDX-License-Identifier: Apache-2.0
"""
``DynamicCache`` of transformers, saved and restored by prefix, with ``await``.

    async with PromptCache(config, model) as prompts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        past, _ = await prompts.restore(ids)
        done = await to_thread(generate, model, ids, past)
        await prompts.save(done.sequences, done.past_key_values)

Tensors have to be copied, and no loop can be held for that: so each verb is that of the
other face, whole, on a thread. It goes there and back once.

Threading: the loop that entered it.
"""

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import anyio.lowlevel
import torch
from transformers import DynamicCache, PreTrainedModel

from ucm.cache.host_loop import Lanes, to_its_end
from ucm.cache.sync import Cache
from ucm.config import UCMConfig
from ucm.integration.computing import casting, casts_here
from ucm.integration.transformers.dynamic import BlockingPromptCache, Restored

__all__ = ["PromptCache"]

_T = TypeVar("_T")


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
        self._make = partial(BlockingPromptCache, config, model, lanes=lanes, **options)
        self._lanes = Lanes(lanes)
        self._made = contextlib.ExitStack()
        self._prompts: BlockingPromptCache

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(to_its_end, self._made.close)
            await to_its_end(self._as_here(self._open))
            await anyio.lowlevel.checkpoint()  # it may have been cancelled meanwhile
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lanes.close()
        await to_its_end(self._made.close)

    def _open(self) -> None:
        self._prompts = self._made.enter_context(self._make())

    @staticmethod
    def _as_here(call: Callable[[], _T]) -> Callable[[], _T]:
        """Return a call that ``torch.autocast`` is as on this thread for, on whichever it is made."""
        casts = casts_here()

        def made() -> _T:
            with casting(casts):
                return call()

        return made

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
        return await self._lanes.call(
            self._as_here(
                partial(self._prompts.restore, input_ids, attention_mask, salt=salt)
            )
        )

    def save(
        self,
        input_ids: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
    ) -> Coroutine[Any, Any, int]:
        """
        Save what is stored nowhere yet; see ``BlockingPromptCache``.

        What the cache holds at the call counts, whenever what this returns is awaited.

        Raises:
            LayoutError: At the call: the cache is not one of this model over these ids.
        """
        held = self._prompts.hold(input_ids, past_key_values, attention_mask)
        return self._lanes.call(partial(self._prompts.save_held, held, salt))
