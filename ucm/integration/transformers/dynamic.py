# SPDX-License-Identifier: Apache-2.0
"""
``DynamicCache`` of transformers, saved and restored by prefix, for hosts without a loop.

    with BlockingPromptCache(config, model) as prompts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        past, _ = prompts.restore(ids)
        told = {"attention_mask": torch.ones_like(ids), "past_key_values": past}
        done = model.generate(ids, **told, return_dict_in_generate=True)
        prompts.save(done.sequences, done.past_key_values)

Public names of transformers only. A miss, a full queue or a store that fails is a prompt
of which nothing is restored, never an exception.

Threading: any thread; all verbs block.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ucm import blocking
from ucm.cache.sync import Cache, Save
from ucm.config import UCMConfig
from ucm.errors import DeviceTimeoutError, LayoutError
from ucm.integration.computing import autocast_of
from ucm.integration.transformers.model import identify
from ucm.integration.transformers.prompts import Row, check_batch, rows_of
from ucm.integration.transformers.staging import Lane, Staging, States
from ucm.prefixes import Place, PrefixHasher

__all__ = ["BlockingPromptCache", "Held", "Restored"]

_TURN_S: Final = 5.0
"""Seconds after which what waits for a lane is given up."""


class Restored(NamedTuple):
    """
    What was found of some prompts.

    Args:
        past_key_values: For ``generate``; None if there is nothing.
        num_tokens: Columns of the prompts that are in it, padding included.
    """

    past_key_values: DynamicCache | None
    num_tokens: int


class Held(NamedTuple):
    """
    What a cache held, and of which tokens; nothing that goes on with either changes it.

    Args:
        states: Its tensors, to which no layer ever writes again.
        columns: How many tokens they are of.
        input_ids: See ``BlockingPromptCache.save``,
        attention_mask: and so this.
    """

    states: States
    columns: int
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None


class BlockingPromptCache(contextlib.AbstractContextManager["BlockingPromptCache"]):
    """
    Caches of one model; serves until it is closed.

    The model's weights must not change meanwhile.

    Args:
        config: Settings, as of ``ucm.blocking.open``.
        model: Ready to generate.
        weights: A name that is another one whenever the weights are. Without one they
            are read, all of them, as they are in memory.
        block_tokens: Tokens of a block; what is less than a block is not stored.
        lanes: How many restores and saves go on at once; others wait in line, for five
            seconds at most.
        lane_tokens: Tokens for which each lane has memory on the model's device. A
            longer prompt passes in parts.

    Raises:
        ConfigError: The model's cache cannot be reused by prefix, or a setting cannot be
            used.
    """

    def __init__(
        self,
        config: UCMConfig | Mapping[str, object],
        model: PreTrainedModel,
        *,
        weights: str = "",
        block_tokens: int = 16,
        lanes: int = 4,
        lane_tokens: int = 512,
    ) -> None:
        identity = identify(model, block_tokens=block_tokens, weights=weights)
        self._config = model.config
        self._is_causal = getattr(model.config, "is_causal", None)
        self._shape = identity.shape
        self._autocast = autocast_of(identity.shape.device.type)
        self._tokens = block_tokens
        self._hasher = PrefixHasher(identity.keyspace, block_tokens)
        self._staging = Staging(
            identity.shape,
            block_tokens=block_tokens,
            lanes=lanes,
            lane_blocks=-(-lane_tokens // block_tokens),
        )
        self.cache: Cache = blocking.open(
            config,
            layout=identity.layout,
            device={"kv": self._staging.pool},
            keyspace=identity.keyspace,
        )
        """What it stands on: for ``measure``, ``statistics``, ``flush`` and others."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, as ``Cache.close`` does. Idempotent."""
        self.cache.close()

    def restore(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
    ) -> Restored:
        """
        Return a cache of the longest stored prefix, for ``generate`` over the prompt.

        What tiers have of it is fetched first; ``timeout.fetch`` says for how long that may
        take for each row.

        It is the caller's: generating over it changes nothing that is stored. Of a batch
        it has the columns that all rows have. The last is never in it.

        Args:
            input_ids: ``[batch, length]``.
            attention_mask: ``[batch, length]``, zeros for padding, which is at the left.
            salt: What else decides the states, or whose they are; see
                ``PrefixHasher.keys``.

        Raises:
            KeyFormatError: That is no such batch.
            LayoutError: ``torch.autocast`` is not as where this was opened.
            PipelineClosedError: This is closed.
        """
        self._check_autocast()
        rows = self._rows(input_ids, attention_mask, None, salt)
        columns = input_ids.shape[1] - 1  # what is generated comes of the last one
        # One token alone is not worth it: what computes its prompt anew behind a cache leaves
        # so many tokens too many, less one, and ``save`` is to see that.
        least = min((row.padding for row in rows), default=columns) + 1
        with contextlib.ExitStack() as kept:
            for row in rows:
                place = Place(tenant=row.tenant)
                fetched = self.cache.prefetch(row.keys, place=place)
                kept.callback(fetched.give_up)
                columns = min(columns, row.padding + fetched.found * self._tokens)
            if columns <= least:
                return Restored(None, 0)
            # A row's last block may reach behind the columns that all have.
            states = self._staging.new_states(len(rows), columns + self._tokens)
            with self._staging.lane(_TURN_S) as lane:
                for at, row in enumerate(rows):
                    loaded = self._load(states, at, row, columns, lane)
                    columns = min(columns, row.padding + loaded * self._tokens)
        if columns <= least:
            return Restored(None, 0)
        return Restored(self._cache_of(states, columns), columns)

    def _load(self, states: States, at: int, row: Row, columns: int, lane: Lane) -> int:
        """Load a row up to a column; return how many blocks there are from its first."""
        wanted = max(0, -(-(columns - row.padding) // self._tokens))
        began_ns, loaded = time.monotonic_ns(), 0
        for first, keys, blocks in self._parts(row.keys[:wanted], 0, lane):
            place = Place(first=first, began_ns=began_ns, tenant=row.tenant)
            try:
                leading = self.cache.load(keys, blocks, place=place).leading
            except DeviceTimeoutError:
                lane.is_lost = True
                break
            begin = row.padding + first * self._tokens
            self._staging.copy_out(states, at, begin, blocks[:leading])
            loaded += leading
            if leading < len(keys):
                break
        return loaded

    def save(
        self,
        input_ids: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
    ) -> int:
        """
        Save what is stored nowhere yet, and wait until others find it.

        The cache may be generated over meanwhile: that leaves its tensors as they are.

        Args:
            input_ids: ``[batch, length]``: the tokens of which the cache holds states,
                in its rows and from its first column on; it may hold fewer. After
                ``generate``, the sequences, but not those of a beam search, whose rows
                are others.
            past_key_values: What the model left behind, with positions that count from
                each row's first token.
            attention_mask: The prompt's; columns behind it are tokens.
            salt: As it was restored with.

        Returns:
            How many tokens were stored by this.

        Raises:
            KeyFormatError: The ids are no such batch.
            LayoutError: The cache is not one of this model over these ids, or not computed
                as where this was opened.
            PipelineClosedError: This is closed.
        """
        return self.save_held(
            self.hold(input_ids, past_key_values, attention_mask), salt
        )

    def hold(
        self,
        input_ids: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None,
    ) -> Held:
        """
        Return what a cache holds just now, for ``save_held``; no state is copied.

        Raises:
            KeyFormatError: The ids are no such batch.
            LayoutError: The cache is not one of this model over these ids, or not computed
                as where this was opened.
        """
        self._check_autocast()
        check_batch(input_ids, attention_mask)
        if (now := getattr(self._config, "is_causal", None)) != self._is_causal:
            # Set while a forward pass has it as an argument, for all threads; where two of
            # these overlap it stays.
            told = f"opened with {self._is_causal}, and now it is {now}"
            raise LayoutError(f"is_causal of the model's configuration: {told}")
        states = self._states_of(past_key_values, input_ids)
        mask = None if attention_mask is None else attention_mask.clone()
        return Held(states, states[0][0].shape[2], input_ids.clone(), mask)

    def save_held(self, held: Held, salt: bytes) -> int:
        """Save what was held; otherwise as ``save``. Any thread."""
        self._staging.wait()  # the ids were copied on the stream of who held them
        rows = self._rows(held.input_ids, held.attention_mask, held.columns, salt)
        saves: list[Save] = []
        with self._staging.lane(_TURN_S) as lane:
            for at, row in enumerate(rows):
                self._save(held.states, at, row, lane, saves)
        done = 0
        with contextlib.suppress(DeviceTimeoutError):
            for save in saves:
                done += save.wait_committed().committed
        return done * self._tokens

    def _save(
        self, states: States, at: int, row: Row, lane: Lane, saves: list[Save]
    ) -> None:
        """Have a row saved, part by part."""
        began_ns, found = time.monotonic_ns(), self.cache.match(row.keys)
        for first, keys, blocks in self._parts(row.keys, found, lane):
            self._staging.copy_in(
                states, at, row.padding + first * self._tokens, blocks
            )
            place = Place(first=first, began_ns=began_ns, tenant=row.tenant)
            save = self.cache.save(keys, blocks, place=place, wait_for_room=True)
            lane.read_by = save
            saves.append(save)
            try:
                save.wait_released()
            except DeviceTimeoutError:
                lane.is_lost = True
            lane.read_by = None

    def _rows(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        columns: int | None,
        salt: bytes,
    ) -> list[Row]:
        return rows_of(
            input_ids, attention_mask, columns=columns, hasher=self._hasher, salt=salt
        )

    def _parts(
        self, keys: list[bytes], start: int, lane: Lane
    ) -> Iterator[tuple[int, list[bytes], range]]:
        """Cut blocks from *start* on into parts for a lane, until it is lost."""
        step = self._staging.lane_blocks
        for first in range(start, len(keys), step):
            if lane.is_lost:
                return
            part = keys[first : first + step]
            yield first, part, lane.blocks[: len(part)]

    def _check_autocast(self) -> None:
        """Refuse states that are rounded otherwise than the key space says."""
        if (now := autocast_of(self._shape.device.type)) != self._autocast:
            told = f"opened under {self._autocast}, and now it is {now}"
            raise LayoutError(f"torch.autocast: {told}: open this where you generate")

    def _cache_of(self, states: States, columns: int) -> DynamicCache:
        """Return a cache of the first columns, as the model would make one."""
        cache: Any = DynamicCache(config=self._config)
        for layer, (keys, values) in zip(cache.layers, states, strict=True):
            # ``update`` would copy all of it once more.
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, :columns], values[:, :, :columns]
        return cache

    def _states_of(self, cache: Any, input_ids: torch.Tensor) -> States:  # noqa: ANN401 - checked here
        """
        Return what a cache holds.

        Raises:
            LayoutError: It is no cache of this model over these tokens.
        """
        layers = getattr(cache, "layers", ())
        # A pass that broke off, as for want of memory, leaves some layers without any.
        if {DynamicLayer} != {each.is_initialized and type(each) for each in layers}:
            told = f"past_key_values: {type(cache).__name__} of {layers[:1]}"
            raise LayoutError(f"{told}: not all its layers keep all tokens")
        states = [(layer.keys, layer.values) for layer in layers]
        columns, shape = cache.get_seq_length(), self._shape
        wanted = [
            [(len(input_ids), heads, columns, dim) for dim in (key, value)]
            for heads, key, value in shape.layers
        ]
        found = [[tuple(each.shape) for each in pair] for pair in states]
        where = {(each.dtype, each.device) for pair in states for each in pair}
        if found != wanted or where != {(shape.dtype, shape.device)}:
            raise LayoutError(
                f"past_key_values: {len(found)} layers, {found[0]} {where}, and not "
                f"{len(wanted)}, {wanted[0]} {shape.dtype} on {shape.device}"
            )
        if columns > input_ids.shape[-1]:
            count = input_ids.shape[-1]
            raise LayoutError(f"past_key_values: {columns} tokens, input_ids {count}")
        return states
