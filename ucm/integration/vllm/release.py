# SPDX-License-Identifier: Apache-2.0
"""
Whether the running release of vLLM is taken.

Those of ``compat.SUPPORTED`` are. An older one is refused. A newer one is tried: its
sources are held against what this door needs (``trial``), and what differs is named.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from ucm.errors import ConfigError
from ucm.integration.vllm.compat import SUPPORTED, as_text, version
from ucm.integration.vllm.sources import HOOK_OWNERS, read_api
from ucm.integration.vllm.trial import Offer, differences, load_needs

__all__ = ["check_version", "running"]

_FIRST, _LAST = (as_text(release) for release in SUPPORTED)
_REMEDY = f"Install vLLM {_FIRST} to {_LAST}, or a newer release of ucm."


def _refusal(reason: str) -> ConfigError:
    return ConfigError("vllm", vllm.__version__, reason, _REMEDY)


def check_version(offered: Callable[[], Offer] | None = None) -> str:
    """
    Refuse an engine that is too old, or has otherwise what this door needs.

    Args:
        offered: Says what a newer engine has; by default the running one's sources do.

    Returns:
        What to warn of: that nobody has tried this release. Empty for known ones.

    Raises:
        ConfigError: Names the version found and those supported, or what differs.
    """
    first, last = SUPPORTED
    if first <= version() <= last:
        return ""
    if version() < first:
        raise _refusal("this release of ucm does not know its connector hooks")
    needs = load_needs()
    found = differences(needs, (offered or running)())
    if found.refused:
        raise _refusal(f"differs from what ucm needs: {'; '.join(found.refused)}")
    names = len(needs.members) + len(needs.settings)
    said = (
        f"ucm was tried with vLLM {_FIRST} to {_LAST}, not with {vllm.__version__}; "
        f"its sources have the {len(needs.hooks)} hooks and {names} other names that "
        "ucm uses, and call the hooks as ucm takes them"
    )
    return "; ".join((said, *found.noted))


@functools.cache
def running() -> Offer:
    """
    Return what the running engine has; takes a second.

    Raises:
        ConfigError: Its sources cannot be read.
    """
    try:
        _, names = read_api(Path(vllm.__file__).parents[1])
    except (LookupError, OSError, SyntaxError) as exc:
        raise _refusal(f"its sources cannot be compared: {exc!r}") from exc
    abstract: set[str] = set()
    for owner in HOOK_OWNERS:
        known = getattr(base, owner, object)
        abstract |= getattr(known, "__abstractmethods__", frozenset())
    return Offer(names, abstract)
