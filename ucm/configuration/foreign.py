# SPDX-License-Identifier: Apache-2.0
"""
The keys of unified-cache-manager's own configuration, and what they are here. Pure.

Both connectors have one name, so that an operator may come with the other's file. A key that
means the same is translated, one that has no equivalent is named, and one that neither knows
is an error. Keys that are alike in both (``use_layerwise``, ``hit_ratio``,
``enable_event_sync``) pass as they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ucm.errors import ConfigError

__all__ = ["Equivalent", "LeftOut", "Translation", "translate"]

_CONNECTORS = "ucm_connectors"
_NAME, _SETTINGS = "ucm_connector_name", "ucm_connector_config"
_BACKENDS, _CAPACITY = "storage_backends", "posix_capacity_gb"
_OWN_PROCESS = "there is no module to name: its place is kv_connector_module_path"
_METRICS = "metrics come through the engine's /metrics, under names that do not change"
_COPIES = "each direction has one stream, and queue.window says how many tickets use it"
_BUFFERS = "blocks are copied into the slab itself; queue.staging_bytes bounds the rest"
_FILES = "how a tier of files does it is its own affair; see the settings of tiers"
_ONE_MOUNT = "a tier of files has one directory: that of the first"
_ELSEWHERE = "a store of another kind is a tier of its own: see the settings of tiers"
_ROOM = "room is made exactly when it is needed, by last use"
_SHARED = "one slab serves all ranks and engines of a node"
_ADMISSION = "every whole block is saved, and loaded if it is found"


@attrs.frozen
class Equivalent:
    """A key that was translated."""

    theirs: str
    ours: str
    value: object


@attrs.frozen
class LeftOut:
    """A key that has no equivalent, and why that is so."""

    theirs: str
    reason: str


@attrs.frozen
class Translation:
    """What became of foreign keys."""

    equivalents: tuple[Equivalent, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there were any."""
        return bool(self.equivalents or self.left_out)

    def joined(self, other: "Translation") -> "Translation":
        """Return both as one."""
        return Translation(
            self.equivalents + other.equivalents, self.left_out + other.left_out
        )

    def told(self) -> dict[str, object]:
        """Return what the log says of it."""
        left = {each.theirs: each.reason for each in self.left_out}
        return {"equivalent": self.settings(), "untranslated": left}

    def settings(self) -> dict[str, object]:
        """Return the equivalents as settings: what to write instead."""
        made: dict[str, Any] = {}
        for each in self.equivalents:
            section, _, name = each.ours.rpartition(".")
            (made.setdefault(section, {}) if section else made)[name] = each.value
        return made


def _gigabytes(key: str, value: object) -> object:
    return f"{_number(key, value):g}GiB"


def _seconds(key: str, value: object) -> object:
    return _number(key, value) / 1000


def _count(key: str, value: object) -> object:
    return int(_number(key, value))


def _number(key: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
    ):
        raise ConfigError(key, value, "not a number above 0", "Give a number.")
    return value


_TRANSLATED: dict[str, tuple[tuple[str, ...], Callable[[str, object], object]]] = {
    "cache_buffer_capacity_gb": (("store.capacity",), _gigabytes),
    "timeout_ms": (("timeout.save", "timeout.load"), _seconds),
    "waiting_queue_depth": (("queue.tickets",), _count),
}
"""Of a store: which of our keys it is, and how its value is read."""

_STORE_WITHOUT: dict[str, str] = {
    **dict.fromkeys(("storage_capacity", _CAPACITY, _BACKENDS), _FILES),
    **dict.fromkeys(("io_direct", "use_direct", "shard_data_dir"), _FILES),
    **dict.fromkeys(("data_dir_shard_bytes",), _FILES),
    **dict.fromkeys(("stream_number", "cache_stream_number"), _COPIES),
    **dict.fromkeys(("running_queue_depth", "use_scatter_gatter"), _COPIES),
    **dict.fromkeys(("buffer_number", "buffer_size", "max_cache_size"), _BUFFERS),
    **dict.fromkeys(("recycle_enable", "recycle_threshold_ratio"), _ROOM),
    **dict.fromkeys(("share_buffer_enable", "local_rank_size", "unique_id"), _SHARED),
    **dict.fromkeys(("local_hostname", "metadata_server", "protocol"), _ELSEWHERE),
    **dict.fromkeys(("device_name", "master_server_address"), _ELSEWHERE),
    "cpu_affinity_cores": "threads.affinity names CPUs, for all ranks in one form",
    "kv_block_size": "the engine's layout says how large blocks are",
}
_STORE_WITHOUT_BEGIN = {"posix_gc_": _ROOM, "posix_": _FILES}
_TOP_WITHOUT = {
    "metrics_config_path": _METRICS,
    "ucm_sparse_config": "no sparse attention is here: attention stays exact",
    "persist_token_threshold": _ADMISSION,
    "load_tokens_threshold": _ADMISSION,
}
_FOREIGN = {_CONNECTORS, _NAME, _SETTINGS, *_TOP_WITHOUT}
_STORES = {
    "UcmPipelineStore": "slab",
    "UcmNfsStore": "slab",
    "UcmPcStore": "slab",
    "UcmMooncakeStore": "slab",
    "UcmMooncakeStoreV1": "slab",
}
_NULL_PIPELINES = ("Empty", "Fake")


def translate(
    values: Mapping[str, object],
) -> tuple[dict[str, object], Translation]:
    """
    Return settings with foreign keys replaced, and what became of those.

    What is given under our own key as well is taken from there.

    Raises:
        ConfigError: A foreign key is unknown, or its value is no such value.
    """
    foreign = {key: values[key] for key in values if key in _FOREIGN}
    own = {key: values[key] for key in values if key not in _FOREIGN}
    if not foreign:
        return own, Translation()
    made: list[Equivalent] = []
    left = [LeftOut(key, _TOP_WITHOUT[key]) for key in foreign if key in _TOP_WITHOUT]
    for prefix, connector in _connectors(foreign):
        _translate_store(prefix, connector, made, left)
    translation = Translation(tuple(made), tuple(left))
    return _under(translation.settings(), own), translation


def _connectors(
    foreign: Mapping[str, object],
) -> list[tuple[str, Mapping[str, object]]]:
    """Return each connector with the name of its place; older files have it on top."""
    found = []
    if _CONNECTORS in foreign:
        listed = foreign[_CONNECTORS]
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise ConfigError(_CONNECTORS, listed, "not a list", "Give one connector.")
        found = [(f"{_CONNECTORS}[{at}].", each) for at, each in enumerate(listed)]
        if len(found) != 1:
            raise ConfigError(
                _CONNECTORS, listed, f"{len(found)} connectors", "Give exactly one."
            )
    if foreign.keys() & {_NAME, _SETTINGS}:
        found.append(("", {k: foreign[k] for k in (_NAME, _SETTINGS) if k in foreign}))
    for prefix, each in found:
        if not isinstance(each, Mapping):
            raise ConfigError(prefix[:-1], each, "not a mapping", "Give its settings.")
    return found


def _translate_store(
    prefix: str,
    connector: Mapping[str, object],
    made: list[Equivalent],
    left: list[LeftOut],
) -> None:
    settings = connector.get(_SETTINGS) or {}
    if not isinstance(settings, Mapping):
        key = f"{prefix}{_SETTINGS}"
        raise ConfigError(key, settings, "not a mapping", "Give the store's settings.")
    for key in connector:
        if key == "ucm_connector_module_path":
            left.append(LeftOut(f"{prefix}{key}", _OWN_PROCESS))
        elif key not in (_NAME, _SETTINGS):
            raise _unknown(f"{prefix}{key}", connector[key])
    kind = _store_type(prefix, connector.get(_NAME), settings)
    made.append(kind)
    rest = dict(settings)
    rest.pop("store_pipeline", None)
    if _BACKENDS in rest and kind.value != "null":
        made.append(_mount(f"{prefix}{_SETTINGS}.", rest, left))
    for key, value in rest.items():
        path = f"{prefix}{_SETTINGS}.{key}"
        if key in _TRANSLATED:
            ours, read = _TRANSLATED[key]
            made.extend(Equivalent(path, one, read(path, value)) for one in ours)
        elif why := _reason(str(key)):
            left.append(LeftOut(path, why))
        else:
            raise _unknown(path, value)


def _mount(prefix: str, settings: dict[str, object], left: list[LeftOut]) -> Equivalent:
    """Return the tier that stands for the peer's directory; takes what it has used."""
    key, given = f"{prefix}{_BACKENDS}", settings.pop(_BACKENDS)
    paths = given.split(":") if isinstance(given, str) else [""]
    if not all(paths):
        raise ConfigError(key, given, "no directory", "Give its path.")
    if len(paths) > 1:
        left.append(LeftOut(f"{key} ({':'.join(paths[1:])})", _ONE_MOUNT))
    tier: dict[str, object] = {"type": "files", "path": f"{paths[0].rstrip('/')}/ucm"}
    if _CAPACITY in settings:
        given = settings.pop(_CAPACITY)
        tier["capacity"] = _gigabytes(f"{prefix}{_CAPACITY}", given)
    return Equivalent(key, "tiers", [tier])


def _store_type(
    prefix: str, name: object, settings: Mapping[str, object]
) -> Equivalent:
    """Return which store stands for a connector and its pipeline."""
    if not isinstance(name, str) or name not in _STORES:
        raise ConfigError(
            f"{prefix}{_NAME}", name, "no such store", f"Known: {sorted(_STORES)}."
        )
    pipeline = settings.get("store_pipeline")
    if pipeline is None:
        return Equivalent(f"{prefix}{_NAME}", "store.type", _STORES[name])
    key = f"{prefix}{_SETTINGS}.store_pipeline"
    if not isinstance(pipeline, str):
        raise ConfigError(key, pipeline, "no text", "Give stages such as Cache|Posix.")
    kind = "null" if pipeline in _NULL_PIPELINES else _STORES[name]
    return Equivalent(key, "store.type", kind)


def _reason(key: str) -> str:
    """Return why a key of a store has no equivalent; empty if it is no such key."""
    for begin, why in _STORE_WITHOUT_BEGIN.items():
        if key.startswith(begin) and key not in _STORE_WITHOUT:
            return why
    return _STORE_WITHOUT.get(key, "")


def _unknown(key: str, value: object) -> ConfigError:
    return ConfigError(
        key,
        value,
        "unknown key, here and in unified-cache-manager",
        "Leave it out.",
    )


def _under(lower: dict[str, Any], upper: Mapping[str, object]) -> dict[str, object]:
    """Return two settings as one, of which the second counts."""
    joined = dict(lower)
    for key, value in upper.items():
        below = joined.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            value = {**below, **value}
        joined[key] = value
    return joined
