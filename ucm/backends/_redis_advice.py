# SPDX-License-Identifier: Apache-2.0
"""
What of a server's own settings makes it a poor place for blocks.

Asked by ``CONFIG GET``; a server that does not tell, as managed ones do not, has no advice.
"""

from collections.abc import Mapping
from typing import Any, Final

from ucm.backends._redis_answers import ERRORS
from ucm.backends.abc import Advice

__all__ = ["advice_of", "read_config"]

_PATTERNS: Final = ("maxmemory*", "cluster-require-full-coverage")
_EVICTS: Final = "maxmemory-policy allkeys-lru"


async def read_config(server: Any) -> dict[str, str]:  # noqa: ANN401 - a client, or a cluster's node
    """Return what a server tells of its settings; nothing if it does not."""
    found: dict[str, str] = {}
    for pattern in _PATTERNS:
        try:
            told = await server.execute_command("CONFIG GET", pattern)
        except ERRORS:
            continue
        pairs = told.items() if isinstance(told, Mapping) else ()
        found |= {_text(name): _text(value) for name, value in pairs}
    return found


def advice_of(config: Mapping[str, str], *, ttl: int, is_cluster: bool) -> list[Advice]:
    """Return what should be set otherwise, by a server's settings."""
    policy, told = config.get("maxmemory-policy", ""), []
    if config.get("maxmemory") == "0":
        told.append(
            Advice(
                "maxmemory is 0: it takes blocks until its machine has no memory left",
                f"Set maxmemory, and {_EVICTS}.",
            )
        )
    elif policy == "noeviction":
        told.append(
            Advice(
                "maxmemory-policy is noeviction: once it is full it takes no new block",
                f"Set {_EVICTS}.",
            )
        )
    elif policy.startswith("volatile") and not ttl:
        told.append(
            Advice(
                f"maxmemory-policy is {policy}: no block may go, as `ttl` is 0",
                f"Set {_EVICTS}, or a `ttl`.",
            )
        )
    if is_cluster and config.get("cluster-require-full-coverage") == "yes":
        told.append(
            Advice(
                "cluster-require-full-coverage is yes: all servers refuse once one is gone",
                "Set it to no.",
            )
        )
    return told


def _text(word: object) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)
