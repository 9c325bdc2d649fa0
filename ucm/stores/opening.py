# SPDX-License-Identifier: Apache-2.0
"""The store that an operator has configured, for processes that share it."""

from collections.abc import Callable
from pathlib import Path
from sys import maxsize
from typing import Final

from ucm.config import StoreConfig
from ucm.errors import ConfigError
from ucm.metrics import Counters
from ucm.registry import load_class
from ucm.stores.abc import Store, StoreGrowth, StoreStats
from ucm.stores.leases import told_count
from ucm.tracing import STORE_GROWN, STORE_SHORT, Log

__all__ = ["growth_teller", "open_store", "place_of", "tell_store"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def open_store(config: StoreConfig, *, block_bytes: int, index_only: bool) -> Store:
    """
    Open the configured store.

    Args:
        config: Which, and how.
        block_bytes: Of the largest part of a block that any rank stores.
        index_only: For a scheduler, which moves no bytes.

    Raises:
        ConfigError: It cannot be opened, or the engine's processes would not share it.
    """
    store_class = load_class("ucm.stores", config.type, "store.type")
    opener = getattr(store_class, "open_configured", None)
    if opener is None:
        raise ConfigError(
            "store.type",
            config.type,
            "is not shared between the engine's processes",
            "Use slab.",
        )
    store = opener(config, block_bytes=block_bytes, index_only=index_only)
    if not isinstance(store, Store):
        raise ConfigError("store.type", config.type, "is no store", "Use slab.")
    return store


def place_of(config: StoreConfig) -> str:
    """Return what is equal for processes that have one store open, and for no others."""
    try:
        found = Path(config.path).stat()
        machine = _BOOT_ID.read_text().strip()
    except OSError:  # in no directory: within this process
        return ""
    return f"{machine}/{found.st_dev}/{found.st_ino}"


def tell_store(counters: Counters, stats: StoreStats) -> None:
    """
    Tell metrics how a store stands; for one process of those that use it.

    Raises:
        StoreUnavailableError: A store of others tells something else than numbers.
    """
    for name, value in (
        ("capacity_parts", stats.capacity_blocks),
        ("committed_parts", stats.committed_blocks),
        ("reserved_parts", stats.reserved_blocks),
        ("capacity_bytes", stats.capacity_bytes),
        ("populated_bytes", stats.populated_bytes),
    ):
        counters.set(f"ucm_store_{name}", told_count(name, value, maxsize))
    for name, total in (
        ("evicted", stats.evicted_blocks_total),
        ("curbed", stats.curbed_blocks_total),
        ("over_share", stats.over_share_blocks_total),
    ):
        known = told_count(name, total, maxsize)
        counters.reach(f"ucm_store_{name}_parts_total", known)


def growth_teller(log: Log) -> Callable[[StoreGrowth], None]:
    """Return what ``Store.watch`` is given so that a log has by tenths how a store grows."""
    tenths = 0

    def tell(growth: StoreGrowth) -> None:
        nonlocal tenths
        before, now = tenths, 10 * growth.nbytes // max(growth.total, 1)
        if now <= before and not growth.problem:
            return
        tenths = max(before, now)
        sizes = {"nbytes": growth.nbytes, "total_bytes": growth.total}
        if growth.problem:
            log.warning(STORE_SHORT, reason=growth.problem, **sizes)
        elif growth.total:
            log.info(STORE_GROWN, **sizes)

    return tell
