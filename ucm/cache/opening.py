# SPDX-License-Identifier: Apache-2.0
"""From what a host gives to a core: settings, device and store are checked and opened."""

import contextlib
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from ucm.affinity import plan_beside_engine
from ucm.agent.client import AgentClient
from ucm.agent.joining import check_tiers, open_client
from ucm.blocks import KeySpace, ShardId
from ucm.cache.core import Core
from ucm.cache.waits import late, wait
from ucm.config import UCMConfig
from ucm.configuration.sources import Configuration, flat, load
from ucm.devices.abc import Device
from ucm.errors import ConfigError, LayoutError, UCMError
from ucm.layout import KVLayout
from ucm.pipeline.save import OwnStages
from ucm.pipeline.stage import Chain
from ucm.registry import load_class
from ucm.status import serve_status
from ucm.stores.abc import Store
from ucm.stores.opening import open_store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import (
    SETTING_IGNORED,
    SETTING_TRANSLATED,
    STORE_DESCRIBE_FAILED,
    Log,
    close_log,
    open_log,
)

__all__ = ["ENGINES_ONLY", "open_core"]

_LAST_SHARD: Final = 0xFFFF
_WANTED: Final[dict[str, tuple[Any, str]]] = {
    "config": (UCMConfig | Mapping, "Give settings, such as {'store': {...}}."),
    "layout": (KVLayout, "Make it by ucm.paged_layout(...)."),
    "device": (Device | Mapping, "Give the buffer of each layer by its name."),
    "keyspace": (KeySpace, "Make it by ucm.keyspace_of(layout, ...)."),
    "store": (Store | None, "Leave it out, or give one that is open."),
    "shard": (Integral, "Give the number of the part that this process holds."),
    "before_commit": (Chain | None, "Give Chain.start(...).then(...) of stages."),
}
"""Of each argument what it is, and what to give."""

ENGINES_ONLY: Final = frozenset(
    {
        "consumer_saves_decoded",
        "enable_event_sync",
        "enable_reshape_cache_event_sync",
        "hit_ratio",
        "immutable_adapters",
        "kv_events",
        "load_ahead_rows",
        "max_retain_seconds",
        "patch_vllm_ascend",
        "predict_loads",
        "save_decoded",
        "shortest_saved_tokens",
        "timeout.company",
        "timeout.fence",
        "use_hybrid_linear_attention",
        "use_layerwise",
        "weights_revision",
    }
)
"""Settings that do nothing in the library; a file may be shared with an engine."""


def open_core(
    config: UCMConfig | Mapping[str, object],
    layout: KVLayout,
    device: Device | Mapping[str, object],
    keyspace: KeySpace,
    *,
    store: Store | None = None,
    shard: int = 0,
    before_commit: OwnStages | None = None,
    threads: Threads = SYSTEM,
) -> tuple[Core, contextlib.ExitStack]:
    """
    Open everything; see ``ucm.open``. Blocks.

    Returns:
        The core, and what closes it and all else.
    """
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as unowned:
        for theirs in (device, store):
            if isinstance(theirs, Device | Store):
                unowned.callback(theirs.close)  # until the core does
        _check_given(
            *(("config", config), ("layout", layout), ("device", device)),
            *(("keyspace", keyspace), ("store", store), ("shard", shard)),
            ("before_commit", before_commit),
        )
        read = (
            Configuration(config=config, origins={})
            if isinstance(config, UCMConfig)
            else load(config, name="the settings given to ucm.open")
        )
        settings = read.config
        _check_keyspace(keyspace, layout)
        check_tiers(settings)
        settings.queue.check_holds(layout.max_block_bytes)
        log = open_log(settings.log, f"cache-{shard}")
        opened.callback(close_log, log)
        if read.translation:
            log.warning(SETTING_TRANSLATED, **read.translation.told())
        _tell_ignored(read, log)
        if not isinstance(device, Device):
            device = _register(layout, device)
            unowned.callback(device.close)
        if store is None:
            nbytes = layout.max_block_bytes
            store = open_store(settings.store, block_bytes=nbytes, index_only=False)
            unowned.callback(store.close)
        _check_slots(store, layout)
        client = _client_of(settings, store, log)
        if client is not None:
            unowned.callback(client.close)
        core = Core(
            settings,
            layout,
            device,
            keyspace,
            store,
            shard=ShardId(shard),
            log=log,
            threads=threads,
            before_commit=before_commit,
            client=client,
            affinity=plan_beside_engine(settings.threads.affinity, device.numa_node),
        )
        unowned.pop_all()
        opened.callback(core.close)
        core.open()
        _describe(core, keyspace, log)
        server = serve_status(
            store.directory, f"cache-{shard}", lambda: _status_of(core), threads
        )
        if server is not None:
            opened.callback(server.close)
        return core, opened.pop_all()


def _check_given(*given: tuple[str, object]) -> None:
    """
    Refuse arguments of another kind, such as two that were exchanged.

    Raises:
        ConfigError: One is; named by the argument.
    """
    for name, value in given:
        kinds, remedy = _WANTED[name]
        if not isinstance(value, kinds):
            raise ConfigError(name, type(value).__name__, f"is no {name}", remedy)
        if isinstance(value, Integral) and not 0 <= int(value) <= _LAST_SHARD:
            raise ConfigError(name, value, f"is not in 0..{_LAST_SHARD}", remedy)


def _tell_ignored(read: Configuration, log: Log) -> None:
    """Warn of what was set to something and does nothing here."""
    values, defaults = flat(read.config), flat(UCMConfig())
    for key in sorted(ENGINES_ONLY.intersection(read.origins)):
        if values[key] != defaults[key]:
            remedy = "Leave it to engines: it has no effect in a host of your own."
            if key == "weights_revision":
                remedy = (
                    "Name the weights by ucm.keyspace_of(weights=...): it is in no key."
                )
            log.warning(SETTING_IGNORED, key=key, value=values[key], remedy=remedy)


def _describe(core: Core, keyspace: KeySpace, log: Log) -> None:
    """Say beside the blocks what they are, for people; a store that does not take it serves."""
    answer = core.describe(keyspace)
    try:
        wait(core, answer, core.timeout.load, late())
    except UCMError as exc:
        log.warning(STORE_DESCRIBE_FAILED, error=repr(exc))


def _client_of(settings: UCMConfig, store: Store, log: Log) -> AgentClient | None:
    """Return what talks to the node's agent; it maps the slab that the settings name."""
    if not settings.tiers:
        return None
    if store.directory != (path := Path(settings.store.path).absolute()):
        raise ConfigError(
            "store",
            store.directory,
            f"tiers are below the slab at store.path={path}, and this is another one",
            "Leave out the store, or the tiers.",
        )
    return open_client(settings, store.capabilities.max_block_bytes, log)


def _status_of(core: Core) -> dict[str, object]:
    """Return what ``ucm.status`` tells of a cache; may wait a second."""
    now, open_transfers = core.measure(), len(core.open_transfers())
    numbers = {"counters": now.counters, "gauges": now.gauges}
    return {"sizes": {"open_transfers": open_transfers}, **numbers}


def _check_keyspace(keyspace: KeySpace, layout: KVLayout) -> None:
    """
    Refuse a key space of other blocks: what is stored under it would be taken for them.

    Raises:
        LayoutError: It was built for another layout.
    """
    for field, theirs, ours in (
        ("layout", keyspace.layout, layout.fingerprint()),
        ("block_tokens", keyspace.block_tokens, layout.hash_block_tokens),
    ):
        if theirs != ours:
            raise LayoutError(
                f"the key space has {field}={theirs!r} and the layout {ours!r}: build it "
                "with ucm.keyspace_of(layout, ...)"
            )


def _check_slots(store: Store, layout: KVLayout) -> None:
    largest = store.capabilities.max_block_bytes
    if largest < layout.max_block_bytes:
        raise ConfigError(
            "store",
            type(store).__name__,
            f"its slots have {largest} bytes and blocks {layout.max_block_bytes}",
            "Open it with block_bytes=layout.max_block_bytes.",
        )


def _register(layout: KVLayout, buffers: Mapping[str, object]) -> Device:
    """Return a device over the host's memory, by what kind of memory it is."""
    first = next(iter(buffers.values()), None)
    while isinstance(first, tuple | list):
        first = next(iter(first), None)
    where = getattr(getattr(first, "device", None), "type", "cpu")
    device_class = load_class("ucm.devices", str(where), "device")
    device = device_class()
    if not isinstance(device, Device):
        raise ConfigError("device", where, "is no device", "Mend its entry point.")
    with contextlib.ExitStack() as unregistered:
        unregistered.callback(device.close)
        device.register(layout, buffers)
        unregistered.pop_all()
    return device
