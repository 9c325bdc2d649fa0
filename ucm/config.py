# SPDX-License-Identifier: Apache-2.0
"""
All settings of ``ucm``, as one frozen tree that is built once at start-up.

An unknown key, a value of the wrong type or out of range is a ``ConfigError`` that
names the dotted key, the value and the remedy. This module is the only reader of the
process environment.
"""

import difflib
import enum
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from ucm.affinity import NUMA, OFF, parse_cpulist
from ucm.errors import ConfigError

__all__ = [
    "Durability",
    "HugePages",
    "LogConfig",
    "QueueConfig",
    "SaveDecoded",
    "StoreConfig",
    "Switch",
    "ThreadConfig",
    "TimeoutConfig",
    "UCMConfig",
    "Verify",
    "default_store_path",
    "python_hash_seed",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_T = TypeVar("_T")


class Durability(enum.Enum):
    """What committed blocks of a slab survive."""

    PROCESS = "process"
    """The death of any process, but not of the machine."""
    POWER = "power"
    """The machine too: every commit is flushed to the medium."""


class HugePages(enum.Enum):
    """Whether a slab in memory comes in huge pages."""

    AUTO = "auto"
    """Where the machine gives them."""
    REQUIRE = "require"
    """Or not at all."""
    OFF = "off"


class Verify(enum.Enum):
    """How often the bytes of a block in a slab are held against its checksum."""

    ALWAYS = "always"
    """Each time they are loaded."""
    ONCE = "once"
    """The first time that a process loads what was saved; then the memory is trusted."""


class SaveDecoded(enum.Enum):
    """When blocks are saved that are not wholly within a prompt."""

    AT_END = "at_end"
    """When their request ends, or a full span of them is together."""
    EACH_BLOCK = "each_block"
    """In the step in which a block becomes whole."""
    NEVER = "never"


class Switch(enum.Enum):
    """A claim about the model, or none: what is detected decides."""

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


def default_store_path() -> str:
    """Return where the slab lies when nothing is said: node-wide DRAM of this user."""
    return f"/dev/shm/ucm-{os.getuid()}"


def python_hash_seed() -> str:
    """Return ``PYTHONHASHSEED``, empty when unset; vLLM mixes it into block hashes."""
    return os.environ.get("PYTHONHASHSEED", "")  # noqa: TID251 - the one reader


def _size(key: str, value: object) -> int:
    """Read bytes from an integer or from text such as ``4GiB`` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(key, value, "not a size", "Give bytes or text like '4GiB'.")
    number, unit = match.groups()
    power = _UNITS[(unit or "").lower()[:1]]
    return int(float(number) * 1024**power)


def _switch(key: str, value: object) -> Switch:
    """Read one of the words, or a boolean."""
    if isinstance(value, bool):
        return Switch.TRUE if value else Switch.FALSE
    return typing.cast(Switch, _read_enum(key, value, Switch))


def _ratio(key: str, value: object) -> float | None:
    """Read a share of the whole, or None for unset."""
    if value is None:
        return None
    if not _is_a(value, float) or not 0 <= typing.cast(float, value) <= 1:
        raise ConfigError(key, value, "not a share", "Give 0 to 1, or leave it out.")
    return float(typing.cast(float, value))


def _share(key: str, value: object) -> float:
    """Read a share of the whole."""
    share = _ratio(key, value)
    if share is None:
        raise ConfigError(key, value, "not a share", "Give 0 to 1, or leave it out.")
    return share


def _field(
    default: object,
    text: str,
    *,
    read: Callable[[str, object], object] | None = None,
    least: float | None = None,
) -> Any:  # noqa: ANN401 - attrs.field is typed as the field's value
    return attrs.field(
        default=default, metadata={"help": text, "read": read, "least": least}
    )


@attrs.frozen(kw_only=True)
class StoreConfig:
    """Where blocks are kept."""

    type: str = _field(
        "slab",
        "`slab`, `null` (keeps nothing), or any name registered as `ucm.stores`.",
    )
    path: str = _field(
        attrs.Factory(default_store_path),
        "Directory of the slab: below `/dev/shm` for DRAM, or on a local disk.",
    )
    capacity: int = _field(
        4 << 30,
        "Bytes kept per node, for all ranks and engines together; `4GiB` or an integer.",
        read=_size,
        least=1,
    )
    durability: Durability = _field(
        Durability.PROCESS, "`process` survives kill -9, `power` the machine as well."
    )
    retain_share: float = _field(
        0.5,
        "Share of the slots for blocks that are retained until a time still to come; "
        "what is beyond it counts as used now.",
        read=_share,
    )
    tenant_share: float = _field(
        1.0,
        "Share of the slots for the blocks of one tenant (cache salt), which then makes "
        "room among its own.",
        read=_share,
    )
    huge_pages: HugePages = _field(
        HugePages.AUTO,
        "Huge pages for the slab: `auto` (where `/dev/shm` gives them), `require` or `off`.",
    )
    numa: str = _field(
        OFF,
        "Where the slab's memory lies: `off` (near whoever fills it), `interleave`, or "
        "nodes such as `0,2`.",
    )

    verify: Verify = _field(
        Verify.ALWAYS,
        "Compare checksums `always`, or `once` per block and process: trusts the memory.",
    )

    def __attrs_post_init__(self) -> None:
        if self.numa in (OFF, "interleave"):
            return
        try:
            problem = "" if parse_cpulist(self.numa) else "names no node"
        except ValueError as exc:
            problem = str(exc)
        if problem:
            raise ConfigError(
                "store.numa",
                self.numa,
                problem,
                "Give `off`, `interleave`, or a list of nodes such as `0,2`.",
            )


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Bounds of what waits; a full queue refuses a save at once."""

    tickets: int = _field(
        1024,
        "Saves that may wait for their copy, and as many for the store; more are refused.",
        least=1,
    )
    nbytes: int = _field(
        1 << 30, "Bytes of saves that may wait for either.", read=_size, least=1
    )
    staging_bytes: int = _field(
        256 << 20,
        "Pinned memory for slots that cannot be pinned, such as those on a disk.",
        read=_size,
        least=1,
    )
    span_bytes: int = _field(
        16 << 20, "Bytes that one ticket carries at most.", read=_size, least=1
    )
    window: int = _field(
        4, "Tickets per direction between queue and the end of their copy.", least=1
    )


@attrs.frozen(kw_only=True)
class TimeoutConfig:
    """Deadlines in seconds; every wait has one."""

    save: float = _field(30.0, "A save older than this is dropped.", least=0.001)
    load: float = _field(
        10.0, "A load older than this fails; its request is recomputed.", least=0.001
    )
    fence: float = _field(
        0.25,
        "Longest wait of the engine for saves that still read blocks it reuses.",
        least=0,
    )
    stuck: float = _field(
        60.0,
        "A device copy that runs longer is given up: its blocks are quarantined.",
        least=0.001,
    )
    shutdown: float = _field(10.0, "Longest drain when the engine stops.", least=0)


@attrs.frozen(kw_only=True)
class LogConfig:
    """Where the structured log goes when the host has not configured structlog."""

    level: str = _field("info", "`debug`, `info`, `warning`, `error` or `off`.")
    directory: str = _field(
        "",
        "Directory for one JSON-lines file per process; empty: standard error, which at "
        "`info` gets no line per request.",
    )

    def __attrs_post_init__(self) -> None:
        levels = ("debug", "info", "warning", "error", "off")
        if self.level not in levels:
            raise ConfigError(
                "log.level", self.level, "unknown level", f"Use one of {levels}."
            )


@attrs.frozen(kw_only=True)
class ThreadConfig:
    """How threads of ours run."""

    affinity: str = _field(
        OFF,
        "CPUs of copy threads: `off`, `numa` (near the device) or a list as `8-15,24`.",
    )

    def __attrs_post_init__(self) -> None:
        if self.affinity in (OFF, NUMA):
            return
        try:
            if parse_cpulist(self.affinity):
                return
            problem = "no CPU is listed"
        except ValueError as exc:
            problem = str(exc)
        raise ConfigError(
            "threads.affinity",
            self.affinity,
            problem,
            "Use 'off', 'numa' or CPUs such as '8-15,24'.",
        )


@attrs.frozen(kw_only=True)
class UCMConfig:
    """The whole configuration."""

    store: StoreConfig = _field(attrs.Factory(StoreConfig), "")
    queue: QueueConfig = _field(attrs.Factory(QueueConfig), "")
    timeout: TimeoutConfig = _field(attrs.Factory(TimeoutConfig), "")
    log: LogConfig = _field(attrs.Factory(LogConfig), "")
    threads: ThreadConfig = _field(attrs.Factory(ThreadConfig), "")
    weights_revision: str = _field(
        "",
        "Names the weights in every key; empty: derived from the model's own files.",
    )
    immutable_adapters: bool = _field(
        False,
        "Reuse LoRA adapters written after the start; no path may be written twice.",
    )
    enable_event_sync: bool = _field(
        True,
        "Order saves behind events; `false` waits for the device at each save.",
    )
    enable_reshape_cache_event_sync: bool = _field(
        False,
        "Order layer-wise saves behind the engine's own events; whole blocks are not.",
    )
    save_decoded: SaveDecoded = _field(
        SaveDecoded.AT_END,
        "Save decoded blocks `at_end` (or when a span is full), `each_block` or `never`.",
    )
    max_retain_seconds: float = _field(
        3600.0,
        "Longest time for which a request may have its blocks kept (`retain_seconds`).",
        least=0,
    )
    use_layerwise: bool = _field(
        False,
        "Save each layer's rows once it has run; load them so where model and engine can.",
    )
    load_ahead_rows: int = _field(
        1, "Rows that a layer-wise load submits beyond the one waited for.", least=0
    )
    use_hybrid_linear_attention: Switch = _field(
        Switch.AUTO,
        "`auto`, or what you expect of the model: it is detected, and a mistake warned.",
        read=_switch,
    )
    hit_ratio: float | None = _field(
        None,
        "For sizing only, OUTPUT IS GARBAGE: claims this share of prompts, moves nothing.",
        read=_ratio,
    )
    patch_vllm_ascend: bool = _field(
        False,
        "On Ascend: pass on what vllm-ascend leaves out; see `docs/npu.md`.",
    )

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> "UCMConfig":
        """
        Build the tree from plain values, such as a parsed JSON object.

        Raises:
            ConfigError: A key is unknown, or a value is ill typed or out of range.
        """
        return _read_section(cls, given, "")


def _read_section(cls: type[_T], given: object, prefix: str) -> _T:
    fields = {field.name: field for field in attrs.fields(typing.cast(Any, cls))}
    if not isinstance(given, Mapping):
        raise ConfigError(
            prefix.rstrip("."), given, "not a mapping", f"Give {sorted(fields)}."
        )
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"Did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(
                key, value, "unknown key", f"{hint}Known: {sorted(fields)}."
            )
        values[name] = _read_value(key, value, hints[name], fields[name].metadata)
    return cls(**values)


def _read_value(
    key: str, value: object, hint: type, metadata: types.MappingProxyType[Any, Any]
) -> object:
    if attrs.has(hint):
        return _read_section(hint, value, f"{key}.")
    if metadata["read"] is not None:
        value = metadata["read"](key, value)
    elif issubclass(hint, enum.Enum):
        value = _read_enum(key, value, hint)
    elif not _is_a(value, hint):
        raise ConfigError(
            key,
            value,
            f"{type(value).__name__} is not {hint.__name__}",
            f"Give a {hint.__name__}.",
        )
    least = metadata["least"]
    if least is not None and not least <= typing.cast(float, value) < math.inf:
        remedy = f"Give a finite number of at least {least}."
        raise ConfigError(key, value, "out of range", remedy)
    return float(typing.cast(float, value)) if hint is float else value


def _is_a(value: object, hint: type) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _read_enum(key: str, value: object, hint: type[enum.Enum]) -> enum.Enum:
    try:
        return hint(value)
    except ValueError as exc:
        known = [member.value for member in hint]
        raise ConfigError(key, value, "unknown value", f"Use one of {known}.") from exc
