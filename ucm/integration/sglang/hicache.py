# SPDX-License-Identifier: Apache-2.0
"""
SGLang's ``HiCacheStorage``: its host pages to the store and back.

Interface v1 for pages of all tokens; v2 beside it for what lies in pools of its own: pages of
windows, and recurrent states, of which one stands for all tokens before it. A prefix is found
where the pages of all its tokens are, those of its last window, and the state at its end.

Threading: SGLang's threads, of which one asks, one loads and one saves.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args

from ucm.errors import DeviceTimeoutError
from ucm.integration.sglang.engine import Theirs, check, host_rows, parts_of, refuse
from ucm.integration.sglang.pages import Pages, left, within

__all__ = ["Storage"]

_THEIRS: Final = (
    *("backend_name", "module_path", "class_name", "interface_v1"),
    "file_storage_path",  # SGLang adds its own flag, whatever the backend
)
_KINDS: Final = (PoolName.KV, PoolName.SWA, PoolName.MAMBA)
"""What is known of: pages of all tokens, pages of a window, and recurrent states."""
_LONGEST_S: Final = 8.0
"""Of a call that looks up or loads, and of each part of a save. SGLang flushes and detaches nothing
while it waits for a save; for a look-up or load that nobody wants any more it does not wait. It gives
a thread that is within one 10 s to end, and behind those it ends itself."""


class _Kind:
    """
    Pages of one kind.

    Args:
        pages: What is stored of them.
        rows: SGLang's host pool, row by row.
        page_tokens: Tokens of a page in it.
    """

    def __init__(
        self, pages: Pages, rows: Sequence[torch.Tensor], page_tokens: int
    ) -> None:
        self.pages = pages
        self._rows = rows
        self._page_tokens = page_tokens

    def load(
        self, keys: Sequence[str], host_indices: torch.Tensor, *, until: float
    ) -> list[bool]:
        """
        Load pages, so many at a time as have room.

        False from the first on that is not there, or that had not begun by *until*.
        """
        target, most, loaded = self._page_ids(host_indices), self.pages.room, 0
        for at in range(0, len(keys), most):
            if loaded < at or not (seconds := left(until)):
                break
            some = slice(at, at + most)
            loaded += self._load_some(keys[some], target[some], seconds)
        return [at < loaded for at in range(len(keys))]

    def _load_some(
        self, keys: Sequence[str], page_ids: Sequence[int], seconds: float
    ) -> int:
        """Load pages for which there is room; return how many, from the first on."""
        pages = self.pages
        leading = pages.stage(keys, min(pages.limit, seconds))
        found = pages.keys_of(keys[:leading])
        if not (slots := pages.staged.hold(found)):
            return 0
        target = torch.tensor(pages.blocks_of(page_ids[:leading]))
        source = torch.tensor(slots)
        try:
            for staged, row in zip(pages.slots, self._rows, strict=True):
                row.index_copy_(0, target, staged.index_select(0, source))
        finally:
            pages.staged.release(found)
            pages.staged.forget()  # the host pool has them now
        return leading

    def save(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Save pages; returns when they are stored, or are known not to be."""
        stored = 0
        page_ids = self._page_ids(host_indices)
        save = self.pages.save(keys, page_ids, wait_for_room=True)
        with contextlib.suppress(DeviceTimeoutError):
            blocks = save.wait_committed().leading if save is not None else 0
            stored = self.pages.whole(blocks)
        return [at < stored for at in range(len(keys))]

    def fits(self, keys: Sequence[str], host_indices: torch.Tensor) -> bool:
        """Return whether there are slots for as many pages as there are keys."""
        return host_indices.numel() == len(keys) * self._page_tokens

    def _page_ids(self, host_indices: torch.Tensor) -> list[int]:
        """Return the pages of a batch: the first slot of each says which."""
        tokens = self._page_tokens
        pages: list[int] = (host_indices[::tokens] // tokens).tolist()
        return pages


class Storage(HiCacheStorage):  # type: ignore[misc] # SGLang is not typed
    """
    Made by SGLang, once in each rank; serves once a host pool is registered.

    In the configuration's ``extra_config`` are settings of ucm, and ``stage_bytes``. What
    is not taken is a ConfigError.
    """

    def __init__(self, storage_config: Theirs, kwargs: Mapping[str, object]) -> None:
        self._config, self._args = storage_config, get_server_args()
        self._kinds: dict[str, _Kind] = {}
        check(self._args)
        if not storage_config.extra_config.get("interface_v1"):
            refuse("interface_v1", None, "pages would be copied twice", "Set it to 1.")

    def register_mem_pool_host(self, mem_pool_host: Theirs) -> None:
        """Open the store, now that it is known what pages there are."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Theirs, host_pool_name: str) -> None:
        """Serve another kind of pages, or refuse it; nothing is served from then on."""
        if host_pool_name in self._kinds:
            return
        with contextlib.ExitStack() as undo:
            # SGLang keeps what it attaches while it runs, refused or not.
            undo.callback(self.close)
            if host_pool_name not in _KINDS:
                refuse("model", host_pool_name, "it has pages of an unknown kind")
            self._open(host_pool_name, host_pool)
            undo.pop_all()

    def _open(self, name: str, host_pool: Theirs) -> None:
        rows = host_rows(host_pool, "" if name == PoolName.KV else f"{name}.")
        extra = self._config.extra_config
        pages = Pages(
            self._args,
            {name: extra[name] for name in extra if name not in _THEIRS},
            rows,
            (self._config.tp_rank, self._config.tp_size),
            _LONGEST_S,
            parts_of(host_pool),
        )
        if (before := self._kinds.get(name)) is not None:
            before.pages.close()
        self._kinds[name] = _Kind(pages, list(rows.values()), host_pool.page_size)

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many pages, from the first on, are stored."""
        return self._num_stored(keys, within(_LONGEST_S))

    def _num_stored(self, keys: Sequence[str], until: float) -> int:
        kind = self._kinds.get(PoolName.KV)
        return 0 if kind is None else kind.pages.num_stored(keys, until)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[Theirs] | None = None,
        extra_info: object = None,
    ) -> Theirs:
        """
        Return behind which pages a prefix ends of which all kinds are stored, as far as needed.

        Of a window as many pages as a transfer has keys, or all that there are before; of
        states the last one, which tiers may have somewhat before the last page.
        """
        until = within(_LONGEST_S)
        most = self._num_stored(keys, until)
        hits, ends = {PoolName.KV: most}, list(range(1, most + 1))
        for transfer in pool_transfers or ():
            kind = self._kinds.get(transfer.name)
            if kind is None or transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
                return PoolTransferResult.empty()
            size = max(1, len(transfer.keys or ()))
            if size == 1:
                kind.pages.bring_last(keys[:most], until)
            else:
                kind.pages.num_stored(keys[max(0, most - size) : most], until)  # tiers
            held = _ends_of_windows(kind.pages.are_stored(keys[:most], until), size)
            hits[transfer.name] = max(held, default=0)
            ends = [end for end in ends if end in held]
        return PoolTransferResult(max(ends, default=0), hits, ends)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Load pages; False from the first on that is not there."""
        load = functools.partial(_Kind.load, until=within(_LONGEST_S))
        return self._move(load, PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: Sequence[Theirs], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Load pages of each kind likewise."""
        load = functools.partial(_Kind.load, until=within(_LONGEST_S))
        return {
            each.name: self._move(load, each.name, each.keys, each.host_indices)
            for each in transfers
        }

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Save pages; returns when they are stored, or are known not to be."""
        return self._move(_Kind.save, PoolName.KV, keys, host_indices)

    def batch_set_v2(
        self, transfers: Sequence[Theirs], extra_info: object = None
    ) -> dict[str, list[bool]]:
        """Save pages of each kind likewise."""
        return {
            each.name: self._move(_Kind.save, each.name, each.keys, each.host_indices)
            for each in transfers
        }

    def _move(
        self,
        move: Callable[[_Kind, Sequence[str], torch.Tensor], list[bool]],
        name: str,
        keys: Sequence[str] | None,
        host_indices: torch.Tensor | None,
    ) -> list[bool]:
        """Return of each page whether it has moved; none where keys and slots do not fit."""
        kind, keys = self._kinds.get(name), keys or ()
        if kind is None or host_indices is None or not kind.fits(keys, host_indices):
            return [False] * len(keys)
        return move(kind, keys, host_indices)

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def _old(self, *args: object, **kwargs: object) -> None:
        """Find and take nothing: nobody asks so with ``interface_v1``."""

    get = batch_get = set = batch_set = _old

    def close(self) -> None:
        """Drain for ``timeout.shutdown``, and let go of all. Idempotent."""
        with contextlib.ExitStack() as closing:
            for kind in self._kinds.values():
                closing.callback(kind.pages.close)


def _ends_of_windows(are_stored: Sequence[bool], size: int) -> set[int]:
    """Return behind which pages the last *size* are stored, or all where there are fewer."""
    ends, run = set(), 0
    for end, is_stored in enumerate(are_stored, 1):
        run = run + 1 if is_stored else 0
        if run >= min(size, end):
            ends.add(end)
    return ends
