# SPDX-License-Identifier: Apache-2.0
"""
``ucm.blocking.open``: the library for hosts without an event loop.

Importing this module imports values only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucm.blocks import KeySpace
from ucm.layout import KVLayout

if TYPE_CHECKING:
    from ucm.cache.sync import Cache
    from ucm.config import UCMConfig
    from ucm.devices.abc import Device
    from ucm.pipeline.save import OwnStages
    from ucm.stores.abc import Store

__all__ = ["open"]


def open(  # noqa: A001 - as ``gzip.open`` is
    config: "UCMConfig | Mapping[str, object]",
    *,
    layout: KVLayout,
    device: "Device | Mapping[str, object]",
    keyspace: KeySpace,
    store: "Store | None" = None,
    shard: int = 0,
    before_commit: "OwnStages | None" = None,
) -> "Cache":
    """
    Open a cache whose calls block; arguments and errors as of ``ucm.open``.

    Returns:
        A context manager; leaving it closes the cache. Its verbs may be called on any
        thread.
    """
    from ucm.cache.opening import open_core
    from ucm.cache.sync import Cache

    return Cache(
        *open_core(
            config,
            layout,
            device,
            keyspace,
            store=store,
            shard=shard,
            before_commit=before_commit,
        )
    )
