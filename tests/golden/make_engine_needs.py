# SPDX-License-Identifier: Apache-2.0
"""
Write what the door needs of an engine that nobody has tried, as JSON.

Run ``python -m tests.golden.make_engine_needs`` after a change of what the door reads or
overrides, or of ``vllm_api.json``: it writes ``ucm/integration/vllm/needs.json`` from the
door's own sources and classes and the newest release that is written down.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.integration.vllm.engine_api import (
    NAMES,
    VERSIONS,
    Read,
    api_of,
    family_of,
    reads_of,
)
from ucm.integration.vllm import compat
from ucm.integration.vllm.messages import RankHandshake, ReportEnvelope
from ucm.integration.vllm.sources import HOOK_OWNERS
from ucm.integration.vllm.stats import UCMPromMetrics, UCMStats
from ucm.integration.vllm.ucm_connector import UCMConnector

__all__ = ["TARGET", "dumps", "needs_of"]

DOOR = Path(compat.__file__).parent
TARGET = DOOR / "needs.json"
_CLASSES = (UCMConnector, ReportEnvelope, RankHandshake, UCMStats, UCMPromMetrics)
"""What the door derives from classes of the engine."""
_UNSEEN = {
    "CacheHitSource.DISK",
    "CacheHitSource.EXTERNAL_UNSPECIFIED",
    "CacheHitSource.HOST",
    "DEFAULT_NONE_HASH_SEED",
    "ForwardContext.attn_metadata",
    "KVCacheGroupSpec.enable_kv_transfer",
    "KVCacheSpec.prefix_cacheable",
    "KVConnectorOutput.failed_recving",
    "KVConnectorTransferResults.failed_recving",
    "KVConnectorTransferResults.finished_recving",
    "KVConnectorTransferResults.finished_sending",
    "MambaSpec.mamba_cache_mode",
    "MambaSpec.num_speculative_blocks",
    "ParallelConfig.cp_kv_cache_interleave_size",
    "ParallelConfig.decode_context_parallel_size",
    "ParallelConfig.distributed_executor_backend",
    "ParallelConfig.nnodes",
    "ParallelConfig.nnodes_within_dp",
    "ParallelConfig.prefill_context_parallel_size",
    "ParallelConfig.tensor_parallel_size",
    "SchedulerOutput.kv_cache_block_copies",
    "VllmConfig.max_concurrent_batches",
}
"""What the door uses in ways that its sources do not show to a reader."""

_REFUSED = "HiSparse"
"""Specs that the door refuses; what they have is of no use to it."""


def needs_of(version: str) -> dict[str, Any]:
    """Return what the door needs, in the words of one release."""
    api = api_of(version)
    hooks = set(_overridden()) & api.keys()
    used = (set(_used(version)) | _UNSEEN & api.keys()) - hooks
    settings = {name for name in used if name.partition(".")[0].endswith("Config")}
    settings -= {name for name in used if name.startswith("KVCacheConfig.")}
    return {
        "release": ".".join(version.split(".")[:2]),
        "hooks": {name: sorted(api[name]) for name in sorted(hooks)},
        "members": {name: sorted(api[name]) for name in sorted(used - settings)},
        "settings": {name: sorted(api[name]) for name in sorted(settings)},
        "known": sorted(
            name
            for name in NAMES
            if name.partition(".")[0] in HOOK_OWNERS
            and not name.partition(".")[2].startswith("_")
            and "." in name
            and any(name in api_of(one) for one in VERSIONS[: _after(version)])
        ),
    }


def _after(version: str) -> int:
    return VERSIONS.index(version) + 1


def _overridden() -> Iterator[str]:
    for one in _CLASSES:
        for base in one.__mro__:
            if base.__module__.startswith("vllm."):
                yield from (f"{base.__name__}.{name}" for name in vars(one))


def _used(version: str) -> Iterator[str]:
    api = api_of(version)
    for owner, member in _reads():
        for one in family_of(owner, version):
            if f"{one}.{member}" in api and not one.startswith(_REFUSED):
                yield f"{one}.{member}"


@cache
def _reads() -> set[Read]:
    return {
        read
        for path in DOOR.glob("*.py")
        for read in reads_of(path, path.read_text(encoding="utf-8"))
    }


def dumps(needs: dict[str, Any]) -> str:
    """Return JSON with one name to a line."""
    parts = []
    for key, value in needs.items():
        if isinstance(value, dict):
            lines = [
                f"  {json.dumps(name)}: {json.dumps(value[name])}" for name in value
            ]
            parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
        elif isinstance(value, list):
            lines = [f"  {json.dumps(name)}" for name in value]
            parts.append(f" {json.dumps(key)}: [\n" + ",\n".join(lines) + "\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(dumps(needs_of(VERSIONS[-1])), encoding="utf-8")
