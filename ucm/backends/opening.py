# SPDX-License-Identifier: Apache-2.0
"""The backend that an operator has configured as a tier."""

from collections.abc import Mapping

from ucm.backends.abc import Backend
from ucm.errors import ConfigError
from ucm.registry import load_class

__all__ = ["open_backend"]


async def open_backend(settings: Mapping[str, object], key: str) -> Backend:
    """
    Open a backend; one whose other side is merely down is opened, and unavailable.

    Args:
        settings: ``type``, a name that is registered in ``ucm.backends``, and what that
            backend's own class method ``open_configured`` reads.
        key: What they are called in messages, such as ``tiers.0``.

    Raises:
        ConfigError: A setting is wrong, or packages are missing.
    """
    rest = dict(settings)
    name = rest.pop("type", None)
    rest.pop("admission", None)  # what it takes is the agent's business
    if not isinstance(name, str):
        raise ConfigError(f"{key}.type", name, "no backend", "Give one such as disk.")
    backend_class = load_class("ucm.backends", name, f"{key}.type")
    opener = getattr(backend_class, "open_configured", None)
    backend = None if opener is None else await opener(rest, key)
    if not isinstance(backend, Backend):
        raise ConfigError(f"{key}.type", name, "is no backend", "Mend its entry point.")
    return backend
