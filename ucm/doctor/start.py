# SPDX-License-Identifier: Apache-2.0
"""
What an engine, or the agent of its tiers, would refuse when it starts here; opens nothing.

Each check calls who would refuse it, so that it says the same, and raises what that raises.
What only a model's blocks, or the other side of a tier, can decide is not looked at.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ucm.agent.joining import check_records, check_tiers
from ucm.config import LogConfig, StoreConfig, UCMConfig
from ucm.doctor.engine import check_connector, check_policy, check_role
from ucm.doctor.place import within
from ucm.doctor.tiers import check_apart
from ucm.errors import ConfigError
from ucm.registry import load_class
from ucm.stores.opening import open_store
from ucm.stores.slab import look

__all__ = ["check_log", "check_start", "check_store_type"]

_ANSWERS_S: Final = 5.0


def check_start(config: UCMConfig, transfer: Mapping[str, object] | None) -> None:
    """
    Refuse what an engine would.

    Args:
        config: The settings.
        transfer: The engine's ``kv-transfer-config``; None if nobody gave it.

    Raises:
        ConfigError: The first thing that it would refuse.
    """
    if transfer is not None:
        check_connector(transfer)
        check_role(transfer)
        check_policy(transfer)
    check_store_type(config.store)
    check_tiers(config)
    check_records(config)
    check_apart(config)
    if config.store.type == "slab":
        _check_place(config.store)
    check_log(config.log)


def check_store_type(config: StoreConfig) -> None:
    """
    Refuse a store that nobody knows, or that processes cannot share.

    Raises:
        ConfigError: It is one.
    """
    store_class = load_class("ucm.stores", config.type, "store.type")
    if not hasattr(store_class, "open_configured"):
        open_store(config, block_bytes=1, index_only=True)  # which says why


def _check_place(config: StoreConfig) -> None:
    """
    Refuse a place where no slab can be, or not as asked.

    Raises:
        ConfigError: The first of its problems.
    """
    seen = within(_ANSWERS_S, lambda: look(config))
    if seen is None:
        remedy = "Look at the mount; an engine would wait for it as well."
        raise ConfigError("store.path", config.path, "does not answer", remedy)
    for problem in seen.problems:
        raise problem


def check_log(config: LogConfig) -> None:
    """
    Refuse a directory in which no log can be made; what is tried there goes again.

    Raises:
        ConfigError: It is one.
    """
    if not config.directory or config.level == "off":
        return
    problem = within(_ANSWERS_S, lambda: _why_no_file(Path(config.directory)))
    if problem != "":
        raise ConfigError(
            "log.directory",
            config.directory,
            "does not answer" if problem is None else problem,
            "Name a writable directory.",
        )


def _why_no_file(directory: Path) -> str:
    """Return why no file can be made in a directory, or where it would be made; else nothing."""
    try:
        there = [each for each in (directory, *directory.parents) if each.exists()]
        with tempfile.TemporaryFile(dir=there[0]):
            return ""
    except OSError as exc:
        return exc.strerror or "no file can be made there"
