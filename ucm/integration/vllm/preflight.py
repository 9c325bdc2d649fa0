# SPDX-License-Identifier: Apache-2.0
"""What can be said of an engine without importing it; for its door and for ``ucm doctor``."""

from typing import Final

from ucm.errors import ConfigError

__all__ = ["FIXED_HASHES_SINCE", "SUPPORTED", "check_hashes"]

_Version = tuple[int, int]

SUPPORTED: Final[tuple[_Version, _Version]] = ((0, 23), (0, 33))
"""First and last ``(major, minor)`` release; vllm-ascend 0.23 sits on the first."""
FIXED_HASHES_SINCE: Final[_Version] = (0, 29)
"""First release whose block hashes begin alike in every process."""
_PORTABLE_ALGORITHMS = ("sha256", "sha256_cbor")


def check_hashes(algorithm: str, seed: str, *, are_fixed: bool) -> None:
    """
    Refuse block hashes that differ from process to process.

    Args:
        algorithm: The engine's ``prefix_caching_hash_algo``.
        seed: ``PYTHONHASHSEED``; empty when unset.
        are_fixed: Whether the engine begins its hashes alike without a seed.

    Raises:
        ConfigError: Names the setting to change.
    """
    if seed:
        return
    if not are_fixed:
        raise ConfigError(
            "PYTHONHASHSEED",
            None,
            "this release of vLLM begins its block hashes with a random number, so "
            "nothing would ever be found after a restart",
            "Set PYTHONHASHSEED to one value for all processes, or use vLLM 0.29.",
        )
    if algorithm not in _PORTABLE_ALGORITHMS:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "its block hashes are random per process, so nothing would ever be found "
            "after a restart",
            "Use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to one "
            "value for all processes.",
        )
