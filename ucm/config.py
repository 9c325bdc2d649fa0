# SPDX-License-Identifier: Apache-2.0
"""
All settings of ``ucm``, as one frozen tree that is built once at start-up.

An unknown key, a value of the wrong type or out of range is a ``ConfigError`` that
names the dotted key, the value and the remedy. This module alone touches the process
environment.
"""

import enum
import os
from collections.abc import Mapping

import attrs

from ucm.affinity import NUMA, OFF
from ucm.errors import ConfigError
from ucm.settings import (
    LONGEST_FETCH_S,
    check_list,
    check_path,
    field,
    read_ratio,
    read_section,
    read_share,
    read_size,
    read_tiers,
    size_text,
)

__all__ = [
    "Durability",
    "HugePages",
    "KVEvents",
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
    "environment_without",
    "python_hash_seed",
    "settings_in_environment",
    "tell_native_code",
]

_ADMISSION = {"enum": ["all", "again"]}


class Durability(enum.Enum):
    """What blocks on a tier survive."""

    PROCESS = "process"
    """The death of any process, but not of the machine."""
    POWER = "power"
    """The machine too: every put is flushed to the medium."""


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


class KVEvents(enum.Enum):
    """Who tells of blocks that come and go below the engine, by the engine's publisher."""

    OFF = "off"
    NODE = "node"
    """Of the engines with the same model that share a slab, one."""
    ENGINE = "engine"
    """Each engine, for those who count blocks as the teller's own."""


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


def settings_in_environment() -> dict[str, str]:
    """Return the variables of the environment whose names say that they are ours."""
    found = os.environ.items()  # noqa: TID251 - the one reader
    return {name: text for name, text in found if name.startswith("UCM_")}


def environment_without(names: frozenset[str]) -> dict[str, str]:
    """Return the environment for a process of ours, less some variables."""
    found = os.environ.items()  # noqa: TID251 - the one reader
    return {name: text for name, text in found if name not in names}


def tell_native_code(variables: Mapping[str, str]) -> None:
    """
    Set variables that a native library reads when it is imported, but none that is set.

    Only in a process of our own, such as the agent's.
    """
    for name, text in variables.items():
        os.environ.setdefault(name, text)  # noqa: TID251 - the one writer, too


@attrs.frozen(kw_only=True)
class StoreConfig:
    """Where blocks are kept."""

    type: str = field(
        "slab",
        "`slab`, `null` (keeps nothing), or any name registered as `ucm.stores`.",
    )
    path: str = field(
        attrs.Factory(default_store_path),
        "Directory of the slab, in memory: below `/dev/shm` or on another tmpfs.",
    )
    capacity: int = field(
        4 << 30,
        "Bytes kept per node, for all ranks and engines together; `4GiB` or an integer.",
        read=read_size,
        least=1,
    )
    retain_share: float = field(
        0.25,
        "Share of the slots that a model can have beside others, for blocks that are retained "
        "until a time still to come; what is beyond it counts as used now.",
        read=read_share,
    )
    tenant_share: float = field(
        1.0,
        "Share of the slots that a model can have beside others, for the blocks of one tenant "
        "(cache salt), which then makes room among its own.",
        read=read_share,
    )
    huge_pages: HugePages = field(
        HugePages.AUTO,
        "Huge pages for the slab: `auto` (where the kernel has some: from 6.1 on it is asked for "
        "them, an older one gives them where `/dev/shm` is mounted so), `require` or `off`.",
    )
    numa: str = field(
        OFF,
        "Where the slab's memory lies: `off` (near whoever fills it), `interleave`, or "
        "nodes such as `0,2`.",
    )
    verify: Verify = field(
        Verify.ALWAYS,
        "Compare checksums `always`, or `once` per block and process: trusts the memory.",
    )

    def __attrs_post_init__(self) -> None:
        check_path("store.path", self.path)
        if self.numa not in (OFF, "interleave"):
            remedy = "Give `off`, `interleave`, or a list of nodes such as `0,2`."
            check_list("store.numa", self.numa, "names no node", remedy)


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Bounds of what waits; a full queue refuses a save at once."""

    tickets: int = field(
        1024,
        "Saves that may wait for their copy, and as many for the store; more are refused.",
        least=1,
    )
    nbytes: int = field(
        2 << 30, "Bytes of saves that may wait for either.", read=read_size, least=1
    )
    staging_bytes: int = field(
        256 << 20,
        "Pinned memory for slots that cannot be pinned where they lie.",
        read=read_size,
        least=1,
    )
    span_bytes: int = field(
        16 << 20,
        "Bytes of a ticket; of vLLM's loads four times, of an accelerator's four and eight.",
        read=read_size,
        least=1,
    )
    window: int = field(4, "Tickets per direction from queue to end of copy.", least=1)

    def check_holds(self, nbytes: int) -> None:
        """Refuse bounds that do not hold a block of so many bytes."""
        if self.nbytes < nbytes:
            problem = f"it does not hold a block of {size_text(nbytes)}"
            remedy = f"Give at least {nbytes}, for several of them some times as much."
            raise ConfigError("queue.nbytes", self.nbytes, problem, remedy)


@attrs.frozen(kw_only=True)
class TimeoutConfig:
    """Deadlines in seconds; every wait has one."""

    save: float = field(30.0, "A save older than this is dropped.", least=0.001)
    load: float = field(
        10.0, "A load older than this fails; its request is recomputed.", least=0.001
    )
    fence: float = field(
        0.25,
        "Longest wait of the engine for saves that still read blocks it reuses.",
        least=0,
    )
    stuck: float = field(
        60.0,
        "A device copy that runs longer is given up: its blocks are quarantined.",
        least=0.001,
    )
    shutdown: float = field(10.0, "Longest drain when the engine stops.", least=0)
    company: float = field(0.1, "Longest wait of a small save for others.", least=0)
    fetch: float = field(
        1.0,
        "Longest wait of a request for blocks from tiers; a minute at most.",
        least=0.001,
        most=LONGEST_FETCH_S,
    )
    tier: float = field(
        2.0, "Longest call of a tier; one that is not over by then failed.", least=0.001
    )


@attrs.frozen(kw_only=True)
class LogConfig:
    """Where the structured log goes when the host has not configured structlog."""

    level: str = field("info", "`debug`, `info`, `warning`, `error` or `off`.")
    directory: str = field(
        "",
        "Directory for one JSON-lines file per process; empty: standard error, which at "
        "`info` gets warnings and a summary once a minute.",
    )
    max_bytes: int = field(
        64 << 20,
        "Most bytes of one file of `log.directory`; then the next begins.",
        read=read_size,
        least=65536,
    )
    files: int = field(4, "Files kept of each process; the oldest goes.", least=1)

    def __attrs_post_init__(self) -> None:
        check_path("log.directory", self.directory or "/")
        levels = ("debug", "info", "warning", "error", "off")
        if self.level not in levels:
            remedy = f"Use one of {levels}."
            raise ConfigError("log.level", self.level, "unknown level", remedy)


@attrs.frozen(kw_only=True)
class ThreadConfig:
    """How threads of ours run."""

    affinity: str = field(
        OFF,
        "CPUs of copy threads: `off`, `numa` (near the device) or a list as `8-15,24`.",
    )
    verify: int = field(
        0, "Threads that compute checksums of a device's blocks; 0: by CPUs.", least=0
    )

    def __attrs_post_init__(self) -> None:
        if self.affinity not in (OFF, NUMA):
            remedy = "Use 'off', 'numa' or CPUs such as '8-15,24'."
            check_list("threads.affinity", self.affinity, "no CPU is listed", remedy)


@attrs.frozen(kw_only=True)
class UCMConfig:
    """The whole configuration."""

    store: StoreConfig = field(attrs.Factory(StoreConfig), "")
    queue: QueueConfig = field(attrs.Factory(QueueConfig), "")
    timeout: TimeoutConfig = field(attrs.Factory(TimeoutConfig), "")
    log: LogConfig = field(attrs.Factory(LogConfig), "")
    threads: ThreadConfig = field(attrs.Factory(ThreadConfig), "")
    tiers: tuple[Mapping[str, object], ...] = field(
        (),
        "Where blocks go below the slab, in the order in which they are looked for: "
        "`[{type: disk, path: ..., capacity: ...}]`; empty: nowhere.",
        read=read_tiers,
        shape={
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"type": "string"}, "admission": _ADMISSION},
            },
        },
    )
    kv_events: KVEvents = field(
        KVEvents.OFF,
        "Tell of blocks in slab and tiers by the engine's KV events: `off`, `node` (one of "
        "the engines that share a slab) or `engine` (each).",
    )
    predict_loads: bool = field(
        True,
        "Compute what slab or tiers are predicted to bring later than computing it would take.",
    )
    weights_revision: str = field(
        "",
        "Names weights and configuration in every key; empty: derived from the model's files.",
    )
    immutable_adapters: bool = field(
        False,
        "Reuse LoRA adapters written after the start; no path may be written twice.",
    )
    enable_event_sync: bool = field(
        True, "Order saves behind events; `false` waits for the device at each save."
    )
    enable_reshape_cache_event_sync: bool = field(
        False,
        "Order layer-wise saves behind the engine's own events; whole blocks are not.",
    )
    save_decoded: SaveDecoded = field(
        SaveDecoded.AT_END,
        "Save decoded blocks `at_end` (or when a span is full), `each_block` or `never`.",
    )
    shortest_saved_tokens: int = field(
        0, "Save nothing of a request with fewer tokens, prompt and answer.", least=0
    )
    consumer_saves_decoded: bool = field(
        False,
        "With `kv_role: kv_consumer`: save the blocks that it decodes, none of prompts.",
    )
    max_retain_seconds: float = field(
        3600.0,
        "Longest time by which a request may shift the use of its blocks (`retain_seconds`).",
        least=0,
    )
    use_layerwise: bool = field(
        False,
        "Save each layer's rows once it has run; load them so where model and engine can.",
    )
    load_ahead_rows: int = field(
        1, "Rows that a layer-wise load submits beyond the one waited for.", least=0
    )
    use_hybrid_linear_attention: Switch = field(
        Switch.AUTO,
        "`auto`, or what you expect of the model: it is detected, and a mistake warned.",
        shape={"enum": [True, False, *(word.value for word in Switch)]},
    )
    hit_ratio: float | None = field(
        None,
        "For sizing only, OUTPUT IS GARBAGE: claims this share of prompts, moves nothing.",
        read=read_ratio,
    )
    patch_vllm_ascend: bool = field(
        False, "On Ascend: pass on what vllm-ascend leaves out; see `docs/npu.md`."
    )

    def __attrs_post_init__(self) -> None:
        if self.consumer_saves_decoded and self.save_decoded is SaveDecoded.NEVER:
            key, why = "consumer_saves_decoded", "save_decoded is 'never'"
            raise ConfigError(key, True, why, "Leave one of them out.")

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> "UCMConfig":
        """
        Build the tree from plain values, such as a parsed JSON object.

        Raises:
            ConfigError: A key is unknown, or a value is ill typed or out of range.
        """
        return read_section(cls, given, "")
