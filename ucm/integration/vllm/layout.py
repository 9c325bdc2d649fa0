# SPDX-License-Identifier: Apache-2.0
"""
vLLM's KV cache configuration as a ``KVLayout``.

vLLM 0.32 places layer ``l`` of a ``KVCacheTensor`` at ``offset + l * layer_stride`` in
one allocation; groups overlay each other. Two layers at the same place share a row.
Source: ``vllm.v1.kv_cache_interface.KVCacheTensor``.
"""

from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout

__all__ = ["layout_of"]

_FULL = (FullAttentionSpec, MLAAttentionSpec)


def layout_of(config: KVCacheConfig) -> KVLayout:
    """
    Return the layout of the engine's KV cache.

    Args:
        config: As both halves of a connector are given it.

    Raises:
        LayoutError: A kind of KV cache that cannot be mapped safely; names the group,
            its layers and the kind.
    """
    places = _places(config)
    rows = {
        place: RowId(index) for index, place in enumerate(sorted(set(places.values())))
    }
    groups = tuple(
        _group(GroupId(index), spec, places, rows)
        for index, spec in enumerate(config.kv_cache_groups)
    )
    smallest = min(group.block_tokens for group in groups)
    return KVLayout(
        groups=groups,
        hash_block_tokens=config.hash_block_size or smallest,
        engine_tag=str(config.kv_cache_layout or "default"),
    )


def _places(config: KVCacheConfig) -> dict[str, tuple[int, int]]:
    """Return for each layer which allocation it is in and at which byte it starts."""
    places: dict[str, tuple[int, int]] = {}
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            raise LayoutError(
                f"layers {tensor.layers} live in host memory (host_resident=True), "
                "which ucm does not map"
            )
        for at, layer in enumerate(tensor.layers):
            places[layer] = (tensor.size, tensor.offset + at * tensor.layer_stride)
    return places


def _group(
    group_id: GroupId,
    group: Any,  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    places: dict[str, tuple[int, int]],
    rows: dict[tuple[int, int], RowId],
) -> GroupLayout:
    spec = group.kv_cache_spec
    kind, window = _kind(group_id, group.layer_names, spec)
    by_row: dict[RowId, list[str]] = {}
    for layer in group.layer_names:
        if layer not in places:
            raise LayoutError(f"layer {layer} of group {group_id} has no memory")
        by_row.setdefault(rows[places[layer]], []).append(layer)
    return GroupLayout(
        group_id=group_id,
        kind=kind,
        block_tokens=spec.block_size,
        window_tokens=window,
        rows=tuple(
            RowLayout(
                row_id=row_id,
                page_bytes=max(
                    _layer_spec(spec, name).page_size_bytes for name in names
                ),
                layer_names=tuple(names),
            )
            for row_id, names in sorted(by_row.items())
        ),
    )


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    sizes = {one.page_size_bytes for one in spec.kv_cache_specs.values()}
    if len(sizes) > 1:
        # vLLM tells its scheduler of the first layer only.
        raise LayoutError(
            f"layer {layer} and others of its group have pages of different sizes, "
            f"{sorted(sizes)} bytes, which ucm does not map yet. Serve this model "
            "without kv_connector=UCMConnector"
        )
    return spec.kv_cache_specs[layer]


def _kind(
    group_id: GroupId, layers: list[str], spec: KVCacheSpec
) -> tuple[GroupKind, int | None]:
    specs = (
        list(spec.kv_cache_specs.values())
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else [spec]
    )
    kinds = {type(one) for one in specs}
    if kinds <= set(_FULL):
        return GroupKind.FULL, None
    if kinds == {SlidingWindowSpec}:
        windows = {int(one.sliding_window) for one in specs}
        return GroupKind.WINDOW, max(windows)
    names = sorted(kind.__name__ for kind in kinds)
    raise LayoutError(
        f"group {group_id} (layers {layers[0]}…) holds {', '.join(names)}; ucm can "
        "restore full, MLA and sliding-window attention. Serve this model without "
        "kv_connector=UCMConnector"
    )
