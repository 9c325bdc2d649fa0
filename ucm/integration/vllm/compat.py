# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this door fits, and what of its build decides the meaning of KV bytes."""

import platform
import re

import torch
import vllm

from ucm.errors import ConfigError

__all__ = ["SUPPORTED_VERSIONS", "check_version", "engine_name"]

SUPPORTED_VERSIONS = ((0, 32),)
"""``(major, minor)`` of the releases whose hooks this door was tested against."""


def _version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version() -> None:
    """
    Refuse an engine whose hooks are not known.

    Raises:
        ConfigError: Names the version found and those supported.
    """
    if _version() not in SUPPORTED_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        raise ConfigError(
            "vllm",
            vllm.__version__,
            "this release of ucm does not know its connector hooks",
            f"Install vLLM {known}, or a release of ucm that lists this one.",
        )


def engine_name(device_type: str) -> str:
    """
    Return what decides how the engine lays out the bytes of a page.

    On CPU the attention kernels pack pages by instruction set, so that is part of it.
    """
    major, minor = _version()
    name = f"vllm/{major}.{minor}/{device_type}"
    if device_type != "cpu":
        return name
    cpu = torch.cpu
    amx = bool(cpu._is_amx_tile_supported())  # noqa: SLF001 - what vLLM itself asks
    avx512 = bool(cpu._is_avx512_supported())  # noqa: SLF001 - what vLLM itself asks
    return f"{name}/{platform.machine()}/amx={amx:d}/avx512={avx512:d}"
