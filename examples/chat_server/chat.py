# SPDX-License-Identifier: Apache-2.0
"""
Answers one prompt after another, each from where the store's knowledge of it ends.

Forward passes run on a thread, one at a time, and the loop is free meanwhile. Who asks
waits in a line that has an end, for a time that has one, too. Who goes away is cancelled
at the next token; what was computed for them is saved all the same.

Threading: the loop; ``_step`` and ``encode`` on a thread of anyio's.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import attrs
import jinja2
import torch
from anyio.streams.memory import MemoryObjectSendStream
from prometheus_client import CollectorRegistry, Counter, Histogram
from transformers import DynamicCache

from ucm.errors import UCMError
from ucm.integration.transformers import PromptCache

__all__ = ["Chat", "Limits", "Numbers", "Piece", "Refusal"]

_REPLACED = "\ufffd"


@attrs.frozen(kw_only=True)
class Limits:
    """
    What there is only so much of.

    Args:
        line: Requests that wait or are answered.
        deadline: Seconds for one, from its first byte to its last.
        saves: Saves under way; what comes on top of them is not saved.
        tokens: Of an answer.
    """

    line: int = 64
    deadline: float = 60.0
    saves: int = 8
    tokens: int = 1024


@attrs.frozen
class Refusal(Exception):  # noqa: N818 - it is an answer as well
    """Why there is no answer, or no more of it, in words and as a status of HTTP."""

    status: int
    text: str


@attrs.define
class Numbers:
    """What an answer took; tokens, and seconds since it was asked for."""

    prompt: int
    loaded: int = 0
    said: int = 0
    first_token_s: float = 0.0


@attrs.frozen
class Piece:
    """Some more of an answer; with its last one, why it ends."""

    text: str
    numbers: Numbers
    finish: str | None = None


class Chat:
    """
    A model, its tokenizer, and the store for its prompts.

    Args:
        model: Of transformers, ready to generate.
        tokenizer: Its own, with a template for chats.
        prompts: Entered.
        saves: Where saves go on while others are answered.
        limits: See there.
        registry: Where it counts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: PromptCache,
        saves: anyio.abc.TaskGroup,
        limits: Limits,
        registry: CollectorRegistry,
    ) -> None:
        self.limits = limits
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._turn = anyio.CapacityLimiter(1)
        self._thread = anyio.CapacityLimiter(1)
        self._saves, self._save_room = saves, anyio.CapacityLimiter(limits.saves)
        self._num_asked = 0
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        told = {"registry": registry}
        self._answers = Counter(
            "chat_answers", "Answers by their end.", ["end"], **told
        )
        self._tokens = Counter(
            "chat_prompt_tokens", "Tokens of prompts.", ["source"], **told
        )
        self._first = Histogram(
            "chat_first_token_seconds", "Until an answer begins.", **told
        )
        self._unsaved = Counter("chat_unsaved", "Answers that were not saved.", **told)

    @property
    def num_asked(self) -> int:
        """How many requests wait or are answered."""
        return self._num_asked

    async def encode(self, messages: Sequence[dict[str, str]]) -> torch.Tensor:
        """Return ``[1, length]`` tokens of a conversation, if the model's template has it."""

        def run() -> torch.Tensor:
            try:
                text = self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            except jinja2.TemplateError as exc:  # roles that do not alternate
                raise Refusal(400, f"the model's template: {exc}") from exc
            ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)
            return ids.input_ids.to(self._model.device)

        return await anyio.to_thread.run_sync(run)

    async def answer(
        self,
        ids: torch.Tensor,
        max_tokens: int,
        salt: bytes,
        out: MemoryObjectSendStream[Piece | Refusal],
    ) -> None:
        """Answer a prompt into a stream that has room for it, and close that."""
        end = "lost"
        with out, contextlib.suppress(anyio.BrokenResourceError):  # nobody listens
            try:
                with anyio.fail_after(self.limits.deadline):
                    await self._in_line(ids, max_tokens, salt, out)
                end = "whole"
            except Refusal as refusal:
                end = "refused"
                out.send_nowait(refusal)
            except TimeoutError:
                end = "late"
                out.send_nowait(Refusal(504, "not answered in time"))
            finally:
                self._answers.labels(end).inc()

    async def _in_line(
        self,
        ids: torch.Tensor,
        max_tokens: int,
        salt: bytes,
        out: MemoryObjectSendStream[Piece | Refusal],
    ) -> None:
        room = self._model.config.max_position_embeddings - ids.shape[1]
        if room < max_tokens:
            raise Refusal(
                400, f"{max_tokens - room} tokens more than the model can see"
            )
        if self._num_asked >= self.limits.line:
            raise Refusal(503, "too many requests are waiting")
        began, self._num_asked = time.monotonic(), self._num_asked + 1
        try:
            async with self._turn:
                await self._generate(ids, max_tokens, salt, out, began)
        finally:
            self._num_asked -= 1

    async def _generate(
        self,
        ids: torch.Tensor,
        max_tokens: int,
        salt: bytes,
        out: MemoryObjectSendStream[Piece | Refusal],
        began: float,
    ) -> None:
        past, loaded = await self._prompts.restore(ids, salt=salt)
        numbers = Numbers(prompt=ids.shape[1], loaded=loaded)
        self._tokens.labels("loaded").inc(loaded)
        self._tokens.labels("computed").inc(numbers.prompt - loaded)
        past = past or DynamicCache(config=self._model.config)
        tokens, shown = ids, ""
        try:
            while True:
                tokens, text = await anyio.to_thread.run_sync(
                    self._step, tokens, past, numbers.prompt, limiter=self._thread
                )
                if not numbers.said:
                    numbers.first_token_s = time.monotonic() - began
                    self._first.observe(numbers.first_token_s)
                numbers.said += 1
                is_over = int(tokens[0, -1]) in self._ends
                finish = "stop" if is_over else None
                if numbers.said == max_tokens:
                    finish = finish or "length"
                if finish or not text.endswith(_REPLACED):  # a character has many bytes
                    out.send_nowait(Piece(text[len(shown) :], numbers, finish))
                    shown = text
                if finish:
                    return
        finally:
            self._keep(tokens, past, salt)

    def _step(
        self, tokens: torch.Tensor, past: DynamicCache, num_prompt: int
    ) -> tuple[torch.Tensor, str]:
        """Compute what is not in the cache, and choose one token more."""
        with torch.inference_mode():
            out = self._model(
                input_ids=tokens[:, past.get_seq_length() :],
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            best = out.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], dim=1)
        said = tokens[0, num_prompt:]
        return tokens, self._tokenizer.decode(said, skip_special_tokens=True)

    def _keep(self, tokens: torch.Tensor, past: DynamicCache, salt: bytes) -> None:
        """Have saved what was computed, while others are answered."""
        try:
            self._save_room.acquire_on_behalf_of_nowait(past)
        except anyio.WouldBlock:
            self._unsaved.inc()
            return
        try:
            self._saves.start_soon(self._save, tokens, past, salt)
        except RuntimeError:  # the server ends, and saves nothing more
            self._save_room.release_on_behalf_of(past)
            self._unsaved.inc()

    async def _save(
        self, tokens: torch.Tensor, past: DynamicCache, salt: bytes
    ) -> None:
        try:
            if past.get_seq_length():
                await self._prompts.save(tokens, past, salt=salt)
        except (UCMError, RuntimeError):  # torch's, such as: there is no memory
            self._unsaved.inc()  # the others are answered and saved all the same
        finally:
            self._save_room.release_on_behalf_of(past)
