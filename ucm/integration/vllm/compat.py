# SPDX-License-Identifier: Apache-2.0
"""
Which releases of vLLM this door fits, and every difference between them.

A release that is newer than those is tried: see ``release``.

The rest of the door speaks the language of the newest release. What an older one lacks
or calls otherwise is a line of ``FEATURES`` and one function here; nothing else looks at
a version. ``tests/golden/vllm_api.json`` holds what each release really offers.
"""

import functools
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from ucm.errors import LayoutError
from ucm.integration.vllm.preflight import FIXED_HASHES_SINCE, SUPPORTED

__all__ = [
    "FEATURES",
    "SUPPORTED",
    "BlockTables",
    "Feature",
    "Place",
    "StateOffers",
    "as_text",
    "check_groups",
    "engine_name",
    "has",
    "hash_block_tokens",
    "hit_source",
    "is_dcp_sharded",
    "is_transferable",
    "kind_of",
    "layer_specs",
    "layout_name",
    "overwritten_blocks",
    "places",
    "token_ranks",
    "tp_replicas",
    "transfer_results",
    "version",
]

_Version = tuple[int, int]


@attrs.frozen
class Feature:
    """
    Something that vLLM did not always have.

    Args:
        since: First release that has it.
        what: What it is, in vLLM's words.
        without: What this door does in older releases.
    """

    since: _Version
    what: str
    without: str


FEATURES = {
    "packed_blocks": Feature(
        (0, 24),
        "KVCacheTensor.offset, block_stride",
        "each KVCacheTensor is an allocation of its own",
    ),
    "whole_prefill": Feature(
        (0, 26),
        "prefill context ranks that each hold all tokens of a block",
        "a block's tokens are spread over these ranks, too",
    ),
    "layer_strides": Feature(
        (0, 29),
        "KVCacheTensor.layers, layer_stride",
        "each KVCacheTensor is one page for the layers of shared_by",
    ),
    "fixed_hashes": Feature(
        FIXED_HASHES_SINCE,
        "block hashes that begin alike in every process (DEFAULT_NONE_HASH_SEED)",
        "refuses to start unless PYTHONHASHSEED is set",
    ),
    "layout_name": Feature(
        (0, 29),
        "KVCacheConfig.kv_cache_layout",
        "what VLLM_KV_CACHE_LAYOUT or a back end asks for is part of the keys instead",
    ),
    "transfer_flags": Feature(
        (0, 29),
        "KVCacheGroupSpec.enable_kv_transfer, KVCacheSpec.prefix_cacheable",
        "every group that is supported is one to save",
    ),
    "host_resident": Feature(
        (0, 30), "KVCacheTensor.host_resident", "all memory is the device's"
    ),
    "block_state": Feature(
        (0, 30),
        "SchedulerOutput.kv_connector_block_state.get_block_ids",
        "block tables are kept from new_block_ids; one group only",
    ),
    "failed_requests": Feature(
        (0, 30),
        "get_transfer_results, KVConnectorOutput.failed_recving",
        "failed loads are told by block ids; one group only",
    ),
    "saves_when_idle": Feature(
        (0, 31),
        "wait_for_save in steps that compute nothing",
        "such a step's saves are submitted when it asks what is finished",
    ),
    "dcp_sharded": Feature(
        (0, 31),
        "KVCacheSpec.dcp_sharded",
        "every group but recurrent ones is spread over such ranks",
    ),
    "tp_replicas": Feature(
        (0, 31),
        "KVCacheConfig.kv_tp_replicas",
        "every tensor rank stores its own part, also where all hold the same",
    ),
    "hash_block_size": Feature(
        (0, 32),
        "KVCacheConfig.hash_block_size",
        "asked of resolve_kv_cache_block_sizes, as the engine does",
    ),
    "hit_sources": Feature(
        (0, 32), "CacheHitSource", "hits are not told apart by source"
    ),
    "late_loads": Feature(
        (0, 33),
        "update_state_after_alloc in a later step than the match (deferred_loads)",
        "a load is ordered in the step that matched it",
    ),
    "late_saves": Feature(
        (0, 33),
        "wait_for_save behind get_transfer_results (finalize_step)",
        "a step's saves are asked for before its results",
    ),
    "sleep_hooks": Feature(
        (0, 33),
        "unregister_kv_caches, restore_kv_caches",
        "the worker's sleep, discard and wake_up are watched",
    ),
}
"""Every difference that this door looks at, by name."""


def version() -> _Version:
    """Return the running engine's release; zeros if it does not say."""
    return _numbers(vllm.__version__)


@functools.cache
def _numbers(text: str) -> _Version:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def has(feature: str) -> bool:
    """Return whether the running engine has a feature of ``FEATURES``."""
    return version() >= FEATURES[feature].since


def as_text(release: _Version) -> str:
    """Return a release as people write it."""
    return f"{release[0]}.{release[1]}"


def check_groups(groups: Sequence[Any]) -> None:
    """
    Refuse KV caches that cannot be restored safely on this release.

    Args:
        groups: vLLM's KVCacheGroupSpec.

    Raises:
        LayoutError: Names the release that is needed.
    """
    if has("block_state") and has("failed_requests"):
        return
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    names = {kind_of(spec).__name__ for spec in specs}
    if len(groups) == 1 and names <= {"FullAttentionSpec", "MLAAttentionSpec"}:
        return
    needed = max(FEATURES[one].since for one in ("block_state", "failed_requests"))
    raise LayoutError(
        f"vLLM {vllm.__version__} does not tell a connector which blocks of "
        f"{len(groups)} KV cache groups ({', '.join(sorted(names))}) are still in use, "
        f"and takes failed loads for one group only. Use vLLM {as_text(needed)} or newer, or "
        "add --disable-hybrid-kv-cache-manager"
    )


def layer_specs(spec: Any) -> Sequence[Any]:  # noqa: ANN401 - vLLM's KVCacheSpec
    """Return the specs of a group: one for all of its layers, or one for each."""
    return tuple(getattr(spec, "kv_cache_specs", {}).values()) or (spec,)


def engine_name(device_type: str) -> str:
    """
    Return what decides how the engine lays out the bytes of a page.

    On CPU the attention kernels pack pages by instruction set, so that is part of it.
    """
    name = f"vllm/{as_text(version())}/{device_type}"
    if device_type != "cpu":
        return name
    cpu = torch.cpu
    amx = bool(cpu._is_amx_tile_supported())  # noqa: SLF001 - what vLLM itself asks
    avx512 = bool(cpu._is_avx512_supported())  # noqa: SLF001 - what vLLM itself asks
    return f"{name}/{platform.machine()}/amx={amx:d}/avx512={avx512:d}"


@attrs.frozen(order=True)
class Place:
    """
    Where a layer's pages start; layers with equal places share them.

    Args:
        allocation: Which allocation; opaque.
        offset: Of block 0's page, in bytes.
    """

    allocation: int
    offset: int


def places(config: Any) -> Iterator[tuple[str, Place]]:  # noqa: ANN401 - vLLM's KVCacheConfig
    """
    Yield each layer and its place, in the engine's order.

    Raises:
        LayoutError: A layer lives in host memory.
    """
    for index, tensor in enumerate(config.kv_cache_tensors):
        if has("host_resident") and tensor.host_resident:
            raise LayoutError(
                f"layers {tensor.layers} live in host memory (host_resident=True), "
                "which ucm does not map"
            )
        if has("layer_strides"):
            for at, layer in enumerate(tensor.layers):
                yield (
                    layer,
                    Place(tensor.size, tensor.offset + at * tensor.layer_stride),
                )
            continue
        place = Place(index, 0)
        if has("packed_blocks") and tensor.block_stride > 0:
            place = Place(-1, tensor.offset)  # all of these are one allocation
        for layer in tensor.shared_by:
            yield layer, place


def kind_of(spec: object) -> type:
    """Return vLLM's own class of a spec, from which plugins derive theirs."""
    home = "vllm.v1.kv_cache_interface"
    kinds = (kind for kind in type(spec).__mro__ if kind.__module__ == home)
    return next(kinds, type(spec))


def is_transferable(group: Any, specs: Iterable[Any]) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether the engine lets a group's blocks be found again by their hashes."""
    if not has("transfer_flags"):
        return True
    return bool(
        group.enable_kv_transfer and all(spec.prefix_cacheable for spec in specs)
    )


def is_dcp_sharded(spec: Any) -> bool:  # noqa: ANN401 - vLLM's KVCacheSpec
    """Return whether decode-context ranks share the tokens of a group's blocks."""
    if has("dcp_sharded"):
        return bool(spec.dcp_sharded)
    return all(kind_of(one).__name__ != "MambaSpec" for one in layer_specs(spec))


def token_ranks(parallel: Any) -> int:  # noqa: ANN401 - vLLM's ParallelConfig
    """Return over how many ranks the tokens of a block are spread, where a group's are."""
    decode = int(parallel.decode_context_parallel_size)
    prefill = int(parallel.prefill_context_parallel_size)
    return decode if has("whole_prefill") else decode * prefill


def tp_replicas(config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Return how many consecutive tensor ranks hold identical KV."""
    return int(config.kv_tp_replicas) if has("tp_replicas") else 1


def layout_name(config: Any) -> str:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Return vLLM's name for the order of a page's bytes, and for what it orders."""
    if has("layout_name"):
        name = str(config.kv_cache_layout or "default")
        groups = config.kv_cache_groups
        specs = (spec for one in groups for spec in layer_specs(one.kv_cache_spec))
        # Some back ends keep keys apart from values, others one behind the other by head.
        slots = {getattr(spec, "num_head_slots", 0) or 0 for spec in specs} - {0}
        return f"{name}/{sorted(slots)}" if slots else name
    from vllm.v1.attention.backends import utils  # FlashInfer asks, on Blackwell

    chosen = getattr(utils, "_KV_CACHE_LAYOUT_OVERRIDE", None)
    return f"setting={chosen or envs.VLLM_KV_CACHE_LAYOUT}"


def hash_block_tokens(
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's KVCacheConfig
    vllm_config: Any = None,  # noqa: ANN401 - vLLM's VllmConfig
) -> int | None:
    """Return how many tokens one hash of ``Request.block_hashes`` covers, if known."""
    if has("hash_block_size"):
        known: int | None = kv_cache_config.hash_block_size
        return known
    if vllm_config is None:
        return None
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(size)


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:  # noqa: ANN401 - vLLM's KVConnectorTransferResults
    """Return what ``get_transfer_results`` answers; only asked where it exists."""
    return base.KVConnectorTransferResults(
        finished_sending=sent, finished_recving=received, failed_recving=failed
    )


def hit_source(name: str) -> Any:  # noqa: ANN401 - vLLM's CacheHitSource
    """Return the engine's word for where hits come from; None where it has none."""
    if not has("hit_sources"):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource(name)


def overwritten_blocks(output: Any) -> frozenset[int]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Return the blocks that the engine clears or copies onto before a step."""
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    zeroed = frozenset(output.new_block_ids_to_zero or ())
    return zeroed.union(copy.dst_block_id for copy in copies) if copies else zeroed


StateOffers = Mapping[str, Sequence[tuple[int, int, int]]]
"""By request: group, block and tokens."""


class BlockTables:
    """
    Every running request's full block tables: the engine's, or kept from its news.

    Kept tables are those of one group whose blocks stay until the request ends; see
    ``check_groups``.
    """

    def __init__(self) -> None:
        self.kept: dict[str, list[list[int]]] = {}
        """By request, those that are not the engine's, until they are taken out."""
        self._are_told = has("block_state")

    def __len__(self) -> int:
        return len(self.kept)

    def begin_step(
        self,
        output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput
    ) -> tuple[Callable[[str], Sequence[Sequence[int]]], StateOffers]:
        """
        Take a step's news.

        Returns:
            How to look a scheduled request's tables up, and the recurrent states that the
            step completes. A release that offers none has no recurrent groups here; see
            ``check_groups``.
        """
        if self._are_told and output.kv_connector_block_state is not None:
            state = output.kv_connector_block_state
            return state.get_block_ids, state.boundary_state_offloads
        for new in output.scheduled_new_reqs:
            self.kept[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(
            cached.req_ids, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids or request_id not in self.kept:
                self.kept[request_id] = [list(table) for table in new_ids or ()]
            elif new_ids is not None:
                for table, more in zip(self.kept[request_id], new_ids, strict=True):
                    table.extend(more)
        return self.kept.__getitem__, {}
