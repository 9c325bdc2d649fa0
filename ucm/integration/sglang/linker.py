# SPDX-License-Identifier: Apache-2.0
"""
SGLang's ``UnifiedCacheLinker``: its device pages to the store and back, by layers.

A look-up reports what is staged (``pages.py``) and keeps it for its request until the next
batch begins: no load can fail behind it, which would abort its request. A layer's pages are
copied when the forward pass first asks for that layer, in the pass's own order.

Each rank has a linker. SGLang takes what all of them report, and calls the same methods of
all in the same order, as long as each answers ``load`` and ``offload`` as the others do.

Threading: the scheduler's thread.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from ucm.cache.sync import Save
from ucm.errors import DeviceTimeoutError
from ucm.integration.sglang.engine import (
    Theirs,
    are_replicas,
    check,
    device_rows,
    refuse,
    setting,
)
from ucm.integration.sglang.pages import Pages

__all__ = ["Linker"]


@attrs.frozen(eq=False)
class _Copy:
    """Staged pages, and where in the engine's pool they go; none: they are not staged."""

    keys: Sequence[bytes] = ()
    slots: torch.Tensor = attrs.field(factory=lambda: torch.tensor(()))
    pages: torch.Tensor = attrs.field(factory=lambda: torch.tensor(()))


@attrs.define(eq=False)
class _Batch:
    """What one forward pass loads; of each copy so many rows are there."""

    copies: Sequence[_Copy]
    num_rows: int = 0
    is_failed: bool = False


class _Layers:
    """Copies rows of pages as they are asked for; SGLang's ``layer_done_counter``."""

    def __init__(
        self, staged: Iterable[torch.Tensor], pool: Mapping[str, torch.Tensor]
    ) -> None:
        self._rows = list(zip(staged, pool.values(), strict=True))
        self._rows_per_layer = 1 if are_replicas(pool) else 2
        self._number = self._consumer = -1
        self.batches: dict[int, _Batch] = {}

    def begin(self, copies: Sequence[_Copy]) -> int:
        """Return the number of a batch, of which nothing is copied yet."""
        self._number += 1
        staged = [copy for copy in copies if copy.keys]
        is_failed = len(staged) < len(copies)
        self.batches[self._number] = _Batch(staged, is_failed=is_failed)
        return self._number

    def set_consumer(self, index: int) -> None:
        """Say whose forward pass begins; -1: one that loads nothing."""
        self._consumer = index

    def wait_until(self, layer: int) -> None:
        """Have keys and values in place up to this layer. Raises nothing."""
        if (batch := self.batches.get(self._consumer)) is not None:
            self._copy(batch, self._rows_per_layer * (layer + 1))

    def finish(self, index: int) -> _Batch:
        """End a batch; return what became of it."""
        batch = self.batches.pop(index, _Batch(()))
        self._copy(batch, len(self._rows))
        return batch

    def _copy(self, batch: _Batch, stop: int) -> None:
        try:
            for staged, row in self._rows[batch.num_rows : stop]:
                for copy in batch.copies:
                    content = staged.index_select(0, copy.slots).to(row.device)
                    row.index_copy_(0, copy.pages, content)
        except RuntimeError:  # the device's; the engine is told at the end
            batch.is_failed = True
        batch.num_rows = max(batch.num_rows, stop)


class Linker(UnifiedCacheLinker):  # type: ignore[misc] # SGLang is not typed
    """
    Made by SGLang in its scheduler.

    In *extra_config* are settings of ucm, ``stage_bytes``, and ``patience``: for how many
    seconds a look-up waits for the store at most. What is not taken is a ConfigError.
    """

    def __init__(
        self,
        server_args: Theirs,
        params: Theirs,
        *,
        components: Iterable[Theirs],
        extra_config: Mapping[str, object],
        forward_stream: Theirs = None,
    ) -> None:
        check(server_args)
        kinds = [component.name for component in components]
        if kinds != ["FULL"]:
            refuse("model", ", ".join(kinds), "it has blocks of several kinds")
        if setting(server_args, "enable_memory_saver"):
            why = "SGLang gives the pages' memory back while saves may still read it"
            refuse("enable_memory_saver", True, why, "Use HiCache.")
        settings = {"patience": 0.2, **extra_config}
        patience = settings.pop("patience")
        if not isinstance(patience, int | float) or patience < 0:
            refuse("patience", patience, "no seconds", "Give 0 or more.")
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        rows = device_rows(pool, params.page_size)
        self._patience = patience
        self._page_tokens = params.page_size
        self._device = next(iter(rows.values())).device
        self._saves: deque[Save | None] = deque()
        self._reported: dict[str, Sequence[bytes]] = {}
        self._queued: dict[str, _Copy] = {}
        self._num_ranks = server_args.tp_size
        rank = params.tp_cache_group.rank() if self._num_ranks > 1 else 0
        self._pages = Pages(server_args, settings, rows, (rank, self._num_ranks))
        self.forward_stream = forward_stream
        self.layer_done_counter = _Layers(self._pages.slots, rows)
        self.pools = {PoolName.KV: rows}

    def lookup(self, rid: str, transfers: Sequence[Theirs]) -> list[int]:
        """Return every number of leading pages that are staged, if not none."""
        (transfer,) = transfers
        self._let_go(rid)
        count = self._pages.stage(transfer.keys, self._patience)
        keys = self._pages.keys_of(transfer.keys[:count])
        if self._pages.staged.hold(keys):
            self._reported[rid] = keys
        return list(range(1, count + 1))

    def load(self, rid: str, transfers: Sequence[Theirs]) -> bool:
        """
        Queue a load of staged pages.

        One that is not staged any more, as its look-up was in an earlier batch, is not
        queued and its request computed. Of several ranks the others may have it: then
        it is queued and fails, and SGLang aborts the request on all of them.
        """
        (transfer,) = transfers
        if rid in self._queued:
            return False
        keys = self._pages.keys_of(transfer.keys)
        slots = self._pages.staged.hold(keys)
        self._let_go(rid)
        if slots is not None:
            pages = torch.tensor(self._page_ids(transfer), device=self._device)
            self._queued[rid] = _Copy(keys, torch.tensor(slots), pages)
        elif self._num_ranks > 1:
            self._queued[rid] = _Copy()
        return rid in self._queued

    def _let_go(self, rid: str) -> None:
        """Keep nothing for a look-up any more."""
        self._pages.staged.release(self._reported.pop(rid, ()))

    def start_layer_wise_loading(self) -> int:
        """Begin what is queued, for the next forward pass; -1 if that is nothing."""
        for rid in list(self._reported):
            self._let_go(rid)
        if not self._queued:
            return -1
        copies, self._queued = list(self._queued.values()), {}
        return self.layer_done_counter.begin(copies)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return whether all pages of a batch are in place; nothing writes any more."""
        batch = self.layer_done_counter.finish(counter_index)
        self._release(batch.copies)
        return not batch.is_failed

    def cancel_queued_load(self, rid: str) -> bool:
        """Want a load no more; False if it has begun."""
        copy = self._queued.pop(rid, None)
        self._release([copy] if copy is not None else [])
        return copy is not None

    def offload(
        self, transfers: Sequence[Theirs], session_id: str | None = None
    ) -> bool:
        """Have pages saved; the engine keeps them until that is over, or refused."""
        (transfer,) = transfers
        with self._behind_the_forward():
            save = self._pages.save(transfer.keys, self._page_ids(transfer))
        self._saves.append(save)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many of the oldest saves are over."""
        going = (at for at, save in enumerate(self._saves) if save and not save.is_over)
        return next(going, len(self._saves))

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest save, which is over, has all its pages stored."""
        save = self._saves.popleft()
        with contextlib.suppress(DeviceTimeoutError):
            return save is not None and save.wait_committed().is_whole
        return False

    def reset(self) -> None:
        """Have nothing read or write the engine's pages; what is stored stays."""
        for save in filter(None, self._saves):
            save.cancel()
            with contextlib.suppress(DeviceTimeoutError):  # torn: it will not count
                save.wait_released()
        self._saves.clear()
        self._release(self._queued.values())
        self._queued.clear()
        for rid in list(self._reported):
            self._let_go(rid)
        for index in list(self.layer_done_counter.batches):
            self.finish_layer_wise_loading(index)
        self._pages.staged.forget()

    def close(self) -> None:
        """Drain for ``timeout.shutdown``, end the rest, and let go of all."""
        self._pages.close()

    def _release(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            self._pages.staged.release(copy.keys)

    def _page_ids(self, transfer: Theirs) -> list[int]:
        """Return a transfer's pages: the first slot of each says which."""
        pages = transfer.device_indices[:: self._page_tokens] // self._page_tokens
        return [int(page) for page in pages.tolist()]

    def _behind_the_forward(self) -> contextlib.AbstractContextManager[Theirs]:
        """Have what is asked for wait for both streams that may write the pages."""
        if self.forward_stream is None or self._device.type == "cpu":
            return contextlib.nullcontext()
        module = torch.get_device_module(self._device)
        both = module.Stream()
        both.wait_stream(module.current_stream())
        both.wait_stream(self.forward_stream)
        return module.stream(both)  # type: ignore[no-any-return]
