# SPDX-License-Identifier: Apache-2.0
"""How who wants blocks of tiers, an engine or another host, comes to its node's agent."""

import json
from pathlib import Path
from typing import Final

import msgspec

from ucm.agent.admission import admission_of
from ucm.agent.client import AgentClient
from ucm.agent.launch import Launcher
from ucm.agent.protocol import digest_of
from ucm.config import KVEvents, UCMConfig
from ucm.errors import ConfigError
from ucm.registry import registered
from ucm.tracing import Log

__all__ = ["check_machines", "check_records", "check_tiers", "open_client"]

_OF_ONE_MACHINE: Final = ("disk", "memory")
"""Types of tiers that no other machine sees."""


def check_tiers(config: UCMConfig) -> None:
    """
    Refuse tiers that cannot be.

    Raises:
        ConfigError: There is no slab above them, or nobody knows their type, or what
            they are to take.
    """
    if not config.tiers:
        return
    if config.store.type != "slab":
        raise ConfigError(
            "tiers",
            list(config.tiers),
            f"store.type is {config.store.type!r}, and only a slab has tiers",
            "Leave store.type out, or the tiers.",
        )
    known = registered("ucm.backends")
    for number, tier in enumerate(config.tiers):
        if tier["type"] not in known:
            raise ConfigError(
                f"tiers.{number}.type", tier["type"], "unknown", f"Registered: {known}."
            )
        admission_of(tier, f"tiers.{number}")
        _check_told(f"tiers.{number}", tier)
    _check_told("store.path", config.store.path)


def _check_told(key: str, value: object) -> None:
    """Refuse what an agent cannot be told: it gets its settings as JSON."""
    try:
        json.dumps(value)  # which takes no bytes, of which the next one makes a text
        msgspec.json.encode(value, order="deterministic")
    except (RecursionError, TypeError, ValueError) as exc:
        raise ConfigError(
            key,
            value,
            f"the agent of tiers cannot be told it: {exc}",
            "Give texts, numbers, and lists and mappings of these; a path as a text.",
        ) from exc


def check_records(config: UCMConfig) -> None:
    """
    Refuse events of what no store keeps a record of.

    Raises:
        ConfigError: The store is no slab.
    """
    if config.kv_events is not KVEvents.OFF and config.store.type != "slab":
        raise ConfigError(
            "kv_events",
            config.kv_events.value,
            f"store.type is {config.store.type!r}, and only a slab records its changes",
            "Leave store.type out, or kv_events.",
        )


def check_machines(config: UCMConfig) -> None:
    """
    Refuse ranks on several machines where nothing brings each its part.

    Raises:
        ConfigError: No tier is seen by other machines, or something works on one only.
    """
    if all(tier["type"] in _OF_ONE_MACHINE for tier in config.tiers):
        raise ConfigError(
            "tiers",
            [str(tier["type"]) for tier in config.tiers],
            "ranks are on several machines, of which each sees its own slab only",
            "Add a tier that all machines see, such as type redis, files, object or "
            "mooncake, or keep the ranks of one engine on one machine.",
        )
    if config.kv_events is not KVEvents.OFF:
        raise ConfigError(
            "kv_events",
            config.kv_events.value,
            "ranks are on several machines, and one machine's events are not whole",
            "Set it to off.",
        )


def open_client(config: UCMConfig, slot_bytes: int, log: Log) -> AgentClient | None:
    """Return what talks to the agent, and starts it; None where nobody needs one."""
    if not config.tiers and config.kv_events is KVEvents.OFF:
        return None
    path = Path(config.store.path)
    tiers = digest_of(config.tiers) if config.tiers else ""
    launch = Launcher(config)
    return AgentClient(path, slot_bytes, log, launch, tiers, launch.is_coming)
