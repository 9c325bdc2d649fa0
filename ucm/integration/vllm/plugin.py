# SPDX-License-Identifier: Apache-2.0
"""
What vLLM runs in each of its processes: makes the name ``UCMConnector`` known.

An entry point of the group ``vllm.general_plugins``. The engine does not catch what
such a function raises, so this one raises nothing; and it imports nothing of ucm that
is more than this, for engines that use another connector run it too.
"""

import importlib.util
import logging
from contextlib import suppress

__all__ = ["NAME", "register"]

NAME = "UCMConnector"
_MODULE = "ucm.integration.vllm.ucm_connector"
_OWNER = "vllm_ascend"
"""A package whose own plugin registers a wrapper of ours by this name."""


def register() -> None:
    """
    Tell vLLM where ``UCMConnector`` is, unless that name is somebody else's.

    Registering a name twice raises, whoever comes second. Where vllm-ascend is
    installed the name is left to it, because its plugin may run after this one.
    """
    if _is_installed(_OWNER):
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )
    except ImportError as exc:
        logger = logging.getLogger("vllm.ucm")
        logger.warning("%s is not known by its name alone: %r", NAME, exc)
        return
    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)


def _is_installed(package: str) -> bool:
    """Return whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is being imported, or made by hand
        return True
