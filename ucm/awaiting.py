# SPDX-License-Identifier: Apache-2.0
"""
``ucm.open``: the library for hosts that run on asyncio or trio.

Importing this module imports values only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucm.blocks import KeySpace
from ucm.layout import KVLayout

if TYPE_CHECKING:
    from ucm.cache.aio import Opening
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
) -> "Opening":
    """
    Open a cache for a host that runs on asyncio or trio.

    Use it as ``async with ucm.open(...) as cache``. Entering it opens store and device
    on a thread. Leaving it drains what is under way for ``timeout.shutdown``, cancels
    the rest, and closes all; no save or load is left without its end. Then, or if
    entering fails, *device* and *store* are closed, whoever made them.

    Args:
        config: Settings, as a mapping or a ``UCMConfig``; docs/settings.md lists them. Beside
            a mapping, variables ``UCM_*`` and a file count as well: docs/configuration.md.
        layout: Groups and rows of the host's blocks; see ``paged_layout``.
        device: The host's memory: name of each layer of the layout to its buffer, of
            which the first dimension counts blocks. Tensors of torch, all on one device,
            or whatever has the buffer protocol and can be written to, such as arrays of
            numpy. Borrowed until the cache is closed. Or a ``Device`` that has it
            registered.
        keyspace: Under which blocks are stored; see ``keyspace_of``.
        store: An open store; if not given, the one that ``config["store"]`` names.
        shard: Which part of each block this process holds, if it is one of several.
        before_commit: Stages of the host's own for what is saved; see ``OwnStage`` of
            ``ucm.pipeline.save``.

    Raises:
        ConfigError: A setting cannot be used, the store does not fit it, or an argument is of
            another kind; on entering.
        LayoutError: A buffer does not lie as the layout says, or the key space was built
            for another layout; on entering.
        StoreError: The store cannot be opened; on entering.
    """
    from ucm.cache.aio import Opening
    from ucm.cache.opening import open_core

    return Opening(
        lambda: open_core(
            config,
            layout,
            device,
            keyspace,
            store=store,
            shard=shard,
            before_commit=before_commit,
        )
    )
