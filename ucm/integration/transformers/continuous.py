# SPDX-License-Identifier: Apache-2.0
"""
Continuous batching of transformers: what its paged cache has no block of is loaded.

    manager = model.init_continuous_batching(generation_config, batching_config)
    with ContinuousPrompts(config, manager):
        manager.start()
        ...
        manager.stop()

Its cache shares blocks between requests that begin alike. Two of its methods are wrapped,
which no release promises to keep: so only those that this was run with are taken. Before
the cache is searched, blocks that the store has are put into it; once a forward pass has
completed blocks, they are saved. Bytes pass through memory of ours, the *slots*: no copy
of ours goes on in blocks that the engine may give to another request.

Threading: opened and closed by the host; all else on the thread that generates.
"""

import contextlib
import itertools
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import transformers
from transformers import ContinuousBatchingManager

from ucm import blocking
from ucm.cache.staged import Staged
from ucm.cache.sync import Cache
from ucm.config import UCMConfig
from ucm.errors import ConfigError, UCMError
from ucm.integration.computing import casting, casts_here
from ucm.integration.transformers.model import identify
from ucm.prefixes import Place, PrefixHasher, tenant_of

__all__ = ["ContinuousPrompts"]

_Theirs: TypeAlias = Any
"""An object of transformers that is not typed."""
_FIRST: Final = (5, 19)
_LAST: Final = (5, 24)
"""Releases whose methods are wrapped."""
_OURS: Final = (UCMError, RuntimeError)
"""What ends no engine: a store that is closed, a device without memory for a copy."""
_FORM: Final = (
    "continuous batching; block: layers, keys before values, [tokens, heads, dim]"
)


class ContinuousPrompts(contextlib.AbstractContextManager["ContinuousPrompts"]):
    """
    The store below one manager's paged cache; serves until it is closed.

    The model's weights must not change meanwhile.

    Args:
        config: Settings, as of ``ucm.blocking.open``.
        manager: Not started yet. When it has been stopped, close this.
        weights: A name that is another one whenever the weights are. Without one they
            are read, all of them, as they are in memory.
        salt: What else decides the states, or whose they are; of all its requests.
        slot_tokens: Tokens for which there is memory on the model's device, once for
            loads and once for saves. A longer prompt is loaded in parts; what a pass
            completes beyond it is not saved.
        patience: Seconds that a request waits for the store at most, and all others
            with it; a sixteenth of that for some time after a store was late.

    Raises:
        ConfigError: It is another release, the manager runs, its cache cannot be reused
            by prefix, or a setting cannot be used.
        KeyFormatError: The salt is no bytes.
    """

    def __init__(
        self,
        config: UCMConfig | Mapping[str, object],
        manager: ContinuousBatchingManager,
        *,
        weights: str = "",
        salt: bytes = b"",
        slot_tokens: int = 8192,
        patience: float = 0.2,
    ) -> None:
        _check(manager)
        tokens = manager.continuous_batching_config.page_size
        with casting(dict.fromkeys(casts_here())):  # as on the manager's own thread
            identity = identify(
                manager.model, block_tokens=tokens, weights=weights, form=_FORM
            )
        self._hasher = PrefixHasher(identity.keyspace, tokens)
        self._hasher.keys(
            (), salt=salt
        )  # in a forward pass nobody would see it refused
        paged, allocator = _cache_of(manager, identity.layout.max_block_bytes)
        count = max(1, -(-slot_tokens // tokens))
        blocks: torch.Tensor = allocator._copy_view  # noqa: SLF001 - no other name
        self._tokens, self._salt, self._tenant = tokens, salt, tenant_of(salt)
        self._patience = patience
        self._manager = manager
        self._paged, self._allocator, self._blocks = paged, allocator, blocks
        self._slots = torch.zeros(
            (2 * count, blocks.shape[1]), dtype=blocks.dtype, device=blocks.device
        )
        self._load_slots = count
        self._free = deque(range(count, 2 * count))
        self._names: dict[int, tuple[bytes, bytes]] = {}
        """Of each hashed block the key of the one that it was computed behind, and its."""
        self.dropped_blocks = 0
        """How many have not been saved for want of slots."""
        self.cache: Cache = blocking.open(
            config,
            layout=identity.layout,
            device={"kv": self._slots},
            keyspace=identity.keyspace,
        )
        """What it stands on: for ``measure``, ``statistics``, ``flush`` and others."""
        self._staged = Staged(self.cache, count, tenant=self._tenant)
        self._search, paged.search_prefix_match = paged.search_prefix_match, self._match
        self._mark, paged.mark_complete_blocks = (
            paged.mark_complete_blocks,
            self._complete,
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the cache be as it was, and end what is under way. Idempotent."""
        self._paged.search_prefix_match = self._search
        self._paged.mark_complete_blocks = self._mark
        self.cache.close()

    def _match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Stand for ``search_prefix_match``; waits for ``patience`` at most."""
        if self._manager.num_return_sequences > 1:
            # Before it forks a request it computes all but one token of what is left:
            # where that is none its forward pass, and so the engine, ends.
            prompt_ids = prompt_ids[:-1]
        with contextlib.suppress(*_OURS):
            self._restore(prompt_ids)
        found: int = self._search(request_id, prompt_ids)
        return found

    def _complete(self, state: _Theirs, complete_blocks: Mapping[str, int]) -> None:
        """Stand for ``mark_complete_blocks``; never waits."""
        if not complete_blocks:
            return  # as it does; most of a running request's steps are such
        (count,) = complete_blocks.values()  # there is one kind of blocks
        table = self._allocator.block_table.get(state.request_id, [])
        hashed = self._allocator.ledger.block_to_hash
        start = len(table)
        while start and table[start - 1] not in hashed:
            start -= 1
        completed = table[start : start + count]
        for block in completed:
            self._names.pop(block, None)
        self._mark(state, complete_blocks)
        with contextlib.suppress(*_OURS):
            if completed:
                ids = state.initial_tokens + state.generated_tokens
                self._save(table, start, completed, ids)

    # -- before a search -------------------------------------------------------------

    def _restore(self, ids: Sequence[int]) -> None:
        """Put into the cache what it misses of a prompt, as far as the store has it."""
        known = self._allocator.ledger.hash_to_block
        hashes, missing, is_short = self._missing_of(ids)
        if not missing:
            return
        keys = self._hasher.keys(ids[: len(hashes) * self._tokens], salt=self._salt)
        there = [(known[each], at) for at, each in enumerate(hashes) if each in known]
        if len(set(hashes)) < len(hashes) or any(
            self._names.get(block, (b"", b""))[1] != keys[at] for block, at in there
        ):
            return  # 64 bits: a block of other tokens has the same hash
        until = time.monotonic() + self._patience
        for start in range(missing[0], len(keys), self._load_slots):
            part = keys[start : start + self._load_slots]
            count = self._staged.stage(part, max(until - time.monotonic(), 0))
            if count and is_short:
                self._forget_others(hashes)
                is_short = False
            self._publish(
                [at for at in missing if start <= at < start + count], keys, hashes
            )
            if count < len(part):
                break

    def _publish(
        self, places: Sequence[int], keys: Sequence[bytes], hashes: Sequence[int]
    ) -> None:
        """Have blocks of a prompt found that are staged, as if they had been computed."""
        held = [keys[at] for at in places]
        slots = self._staged.hold(held)
        if not slots:
            return
        ledger, blocks = self._allocator.ledger, self._take(len(slots))
        try:
            self._copy(self._blocks, blocks, self._slots, slots)
        except RuntimeError:
            self._allocator.pool.free_blocks(self._allocator.index, blocks)
            raise
        finally:
            self._staged.release(held)
        for at, block in zip(places, blocks, strict=True):
            ledger.register_new_hash(block, hashes[at])
            ledger.cached_blocks[block] = None
            self._names[block] = (keys[at - 1] if at else b"", keys[at])

    def _missing_of(self, ids: Sequence[int]) -> tuple[list[int], list[int], bool]:
        """
        Return hashes of a prompt's first blocks, which are to be loaded, and if others go.

        Those go that the cache keeps for nobody. Without room for all of the prompt some
        is computed, a batch at a time: for one there stays room.
        """
        ledger, free = self._allocator.ledger, self._num_free()
        known, idle = ledger.hash_to_block, ledger.cached_blocks
        room = free + len(idle)
        hashes: list[int] = []
        missing: list[int] = []
        for each in self._hashes_of(ids):
            room -= each not in known or known[each] in idle
            if room < 1:  # one is for tokens that are computed
                batch = -(-self._paged.max_batch_tokens // self._tokens)
                fits = missing[: max(0, len(missing) + 1 - batch)]
                return hashes[: max(fits, default=-1) + 1], fits, len(missing) >= free
            if each not in known:
                missing.append(len(hashes))
            hashes.append(each)
        return hashes, missing, len(missing) >= free

    def _hashes_of(self, ids: Sequence[int]) -> Iterator[int]:
        """Yield their hashes of all blocks but that of the last token."""
        from transformers.generation.continuous_batching.cache_allocators import (
            cache_allocator,
        )

        before: int | None = None
        size = self._tokens
        for start in range(0, (len(ids) - 1) // size * size, size):
            part = ids[start : start + size]
            yield (before := cache_allocator.compute_block_hash(before, part))

    def _num_free(self) -> int:
        """Return how many blocks nobody has to give up."""
        pool, each = self._allocator.pool, self._allocator.blocks_per_sector
        count: int = pool.count_free_blocks(self._allocator.index)
        return count + int(pool.num_free_sectors * each)

    def _forget_others(self, hashes: Sequence[int]) -> None:
        """Have the cache forget what it keeps for nobody, but blocks of one prompt."""
        ledger = self._allocator.ledger
        there = (ledger.hash_to_block.get(each) for each in hashes)
        kept = [block for block in there if block is not None]
        for block in kept:
            ledger.acquire(block)
        self._paged.evict_cached_blocks()
        for block in kept:
            ledger.release(block)

    def _take(self, count: int) -> list[int]:
        """Take so many blocks, which are free."""
        pool, index = self._allocator.pool, self._allocator.index
        while pool.count_free_blocks(index) < count:
            pool.allocate_sector(index)
        blocks: list[int] = pool.get_free_blocks(index, count)
        return blocks

    # -- behind a forward pass -------------------------------------------------------

    def _save(
        self, table: Sequence[int], start: int, completed: list[int], ids: Sequence[int]
    ) -> None:
        """Have blocks saved that a forward pass completed, and remember what they are."""
        before = self._key_before(table, start)
        if before is None:
            return
        stop = start + len(completed)
        part = ids[start * self._tokens : stop * self._tokens]
        salt = b"" if before else self._salt
        keys = self._hasher.keys(part, salt=salt, after=before)
        for at, (parent, key) in enumerate(itertools.pairwise([before, *keys])):
            if completed[at] in self._allocator.ledger.block_to_hash:
                self._names[completed[at]] = (parent, key)
        # Another request's block may stand for one now that was computed twice.
        own = [at for at in range(len(keys)) if table[start + at] == completed[at]]
        slots = [self._free.popleft() for _ in own[: len(self._free)]]
        self.dropped_blocks += len(own) - len(slots)
        if not slots:
            return
        own = own[: len(slots)]
        try:
            self._copy(self._slots, slots, self._blocks, [completed[at] for at in own])
            place = Place(first=start + own[0], tenant=self._tenant)
            save = self.cache.save([keys[at] for at in own], slots, place=place)
        except _OURS:
            self._free.extend(slots)
            self.dropped_blocks += len(own)
            raise
        save.when_over(partial(self._free.extend, slots))  # never, if a copy is stuck

    def _key_before(self, table: Sequence[int], stop: int) -> bytes | None:
        """Return the key of a block that is behind others; None if they do not fit."""
        before = b""
        for block in table[:stop]:
            parent, key = self._names.get(block, (None, b""))
            if parent != before:  # of other tokens: see ``_restore``
                return None
            before = key
        return before

    def _copy(
        self,
        target: torch.Tensor,
        to: Sequence[int],
        source: torch.Tensor,
        at: Sequence[int],
    ) -> None:
        """Copy blocks on the model's device; done when this returns."""
        where = self._blocks.device
        if where.type != "cpu":  # the forward pass may be on another stream
            torch.accelerator.synchronize(where)
        content = source.index_select(0, torch.tensor(at, device=where))
        target.index_copy_(0, torch.tensor(to, device=where), content)
        if where.type != "cpu":
            torch.accelerator.synchronize(where)


def _check(manager: _Theirs) -> None:
    """Refuse what nobody tried."""
    version = transformers.__version__
    if not _FIRST <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= _LAST:
        remedy = f"Install transformers {_told(_FIRST)} to {_told(_LAST)}."
        raise _refused("transformers", version, "untried", remedy)
    if manager.is_running():
        remedy = "Open this before you start it."
        raise _refused("manager", "running", "it has searched its cache", remedy)
    if (attention := manager.model.config._attn_implementation).startswith("paged|"):  # noqa: SLF001 - no other name
        problem = "it cannot be run alone, to look at what it keeps"
        remedy = "Load it with attn_implementation='sdpa'."
        raise _refused("attn_implementation", attention, problem, remedy)
    if (ranks := manager.distributed_helper.tp_size) > 1:
        raise _refused("tp_size", ranks, "a rank may load what another has not")
    if manager.continuous_batching_config.use_async_batching:
        problem = "blocks are given back while a batch is under way"
        remedy = "Set it to False."
        raise _refused("use_async_batching", True, problem, remedy)


def _told(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _cache_of(manager: _Theirs, block_bytes: int) -> tuple[_Theirs, _Theirs]:
    """Make a manager's cache, as its start would; return that and its only allocator."""
    if manager.batch_processor is None:
        manager.batch_processor = manager._create_batch_processor()  # noqa: SLF001 - as ``warmup`` does
    paged = manager.batch_processor.cache
    kinds = sorted(paged.cache_allocators)
    if kinds != ["full_attention"]:
        raise _refused("layers", ", ".join(kinds), "only all tokens' blocks are stored")
    if not paged.use_prefix_sharing:
        remedy = "Set it to True."
        raise _refused("allow_block_sharing", False, "nothing is shared", remedy)
    (allocator,) = paged.cache_allocators.values()
    if allocator.bytes_per_block != block_bytes:
        told = f"{allocator.bytes_per_block} bytes, not {block_bytes}"
        raise _refused("page_size", told, "its blocks are not what the model keeps")
    return paged, allocator


def _refused(
    key: str, value: object, problem: str, remedy: str = "Generate without ucm."
) -> ConfigError:
    return ConfigError(key, value, problem, remedy, source="the manager")
