# SPDX-License-Identifier: Apache-2.0
"""
SGLang's ``HiCacheStorage``, interface v1: its host pages to the store and back.

Threading: SGLang's threads, of which one asks, one loads and one saves.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.runtime_context import get_server_args

from ucm.errors import DeviceTimeoutError
from ucm.integration.sglang.engine import Theirs, check, host_rows, refuse
from ucm.integration.sglang.pages import Pages, keys_of

__all__ = ["Storage"]

_THEIRS: Final = ("backend_name", "module_path", "class_name", "interface_v1")


class Storage(HiCacheStorage):  # type: ignore[misc] # SGLang is not typed
    """
    Made by SGLang, once in each rank; serves once a host pool is registered.

    In the configuration's ``extra_config`` are settings of ucm, and ``stage_bytes``. What
    is not taken is a ConfigError.
    """

    _pages: Pages | None = None

    def __init__(self, storage_config: Theirs, kwargs: Mapping[str, object]) -> None:
        self._config, self._args = storage_config, get_server_args()
        check(self._args)
        if not storage_config.extra_config.get("interface_v1"):
            refuse("interface_v1", None, "pages would be copied twice", "Set it to 1.")

    def register_mem_pool_host(self, mem_pool_host: Theirs) -> None:
        """Open the store, now that it is known what pages there are."""
        super().register_mem_pool_host(mem_pool_host)
        rows = host_rows(mem_pool_host)
        self._rows = list(rows.values())
        extra = self._config.extra_config
        self._pages = Pages(
            self._args,
            {name: extra[name] for name in extra if name not in _THEIRS},
            rows,
            (self._config.tp_rank, self._config.tp_size),
        )

    def register_mem_host_pool_v2(self, host_pool: Theirs, host_pool_name: str) -> None:
        """Refuse models that have pages of several kinds; nothing is served from then on."""
        if host_pool_name != PoolName.KV:
            self.close()  # SGLang keeps what it attaches while it runs, refused or not
            refuse("model", host_pool_name, "it has pages of several kinds")

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many pages, from the first on, are stored."""
        return self._pages.num_stored(keys) if self._pages is not None else 0

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Load pages; False from the first on that is not there."""
        if (pages := self._pages) is None:
            return [False] * len(keys)
        found = keys_of(keys)[: pages.stage(keys, pages.limit)]
        if slots := pages.staged.hold(found):
            source = torch.tensor(slots)
            target = self._page_ids(host_indices)[: len(slots)]
            try:
                for staged, row in zip(pages.slots, self._rows, strict=True):
                    row.index_copy_(0, target, staged.index_select(0, source))
            finally:
                pages.staged.release(found)
                pages.staged.forget()  # the host pool has them now
        return [at < len(found) for at in range(len(keys))]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Save pages; returns when they are stored, or are known not to be."""
        stored, save = 0, None
        if self._pages is not None:
            save = self._pages.save(keys, self._page_ids(host_indices).tolist())
        with contextlib.suppress(DeviceTimeoutError):
            stored = save.wait_committed().leading if save is not None else 0
        return [at < stored for at in range(len(keys))]

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def _old(self, *args: object, **kwargs: object) -> None:
        """Find and take nothing: nobody asks so with ``interface_v1``."""

    get = batch_get = set = batch_set = _old

    def close(self) -> None:
        """Drain for ``timeout.shutdown``, and let go of all. Idempotent."""
        if self._pages is not None:
            self._pages.close()

    def _page_ids(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Return the pages of a batch: the first slot of each says which."""
        tokens = self.mem_pool_host.page_size
        pages: torch.Tensor = host_indices[::tokens] // tokens
        return pages
