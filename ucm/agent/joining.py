# SPDX-License-Identifier: Apache-2.0
"""How who wants blocks of tiers, an engine or another host, comes to its node's agent."""

from pathlib import Path

from ucm.agent.admission import admission_of
from ucm.agent.client import AgentClient
from ucm.agent.launch import Launcher
from ucm.agent.protocol import digest_of
from ucm.config import KVEvents, UCMConfig
from ucm.errors import ConfigError
from ucm.registry import registered
from ucm.tracing import Log

__all__ = ["check_tiers", "open_client"]


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


def open_client(config: UCMConfig, slot_bytes: int, log: Log) -> AgentClient | None:
    """Return what talks to the agent, and starts it; None where nobody needs one."""
    if not config.tiers and config.kv_events is KVEvents.OFF:
        return None
    path = Path(config.store.path)
    tiers = digest_of(config.tiers) if config.tiers else ""
    return AgentClient(path, slot_bytes, log, Launcher(config), tiers)
