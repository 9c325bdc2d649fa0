# SPDX-License-Identifier: Apache-2.0
"""
vLLM's KV cache configuration as a ``KVLayout``.

Each layer has a place in the engine's memory (``compat.places``); groups overlay each
other. Two layers at the same place share a row.
Source: ``vllm.v1.kv_cache_interface.KVCacheTensor``.

What is mapped: full and latent attention, sliding windows, and recurrent layers that
keep one state per block (``mamba_cache_mode=align``). The others are refused by name:

- recurrent layers in another mode keep no state at the end of a block, or hold one in
  places that the engine does not tell;
- chunked local attention looks back to the start of a chunk, so that a hit over whole
  chunks needs nothing, and its last token all of one;
- reference sliding windows make the KV of a token depend on where the prompt ended;
- sinks, cross attention, encoders and hidden states are no function of a prefix;
- what the engine itself never finds again (rings, replayed windows, replicas).
"""

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError
from ucm.integration.vllm import compat
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout

__all__ = ["layout_of"]

_FULL = {FullAttentionSpec, MLAAttentionSpec}
_WINDOW = {SlidingWindowSpec, SlidingWindowMLASpec}
_DRAFTERS = frozenset(("draft_model", "mtp"))
"""In names of layers that are numbered anew; other drafters go on where the model ends."""
_ANY = "Serve this model without kv_connector=UCMConnector"
_REMEDIES: dict[type, str] = {
    MambaSpec: "Start the engine with enable_prefix_caching and "
    "mamba_cache_mode=align, or serve without kv_connector=UCMConnector",
    ChunkedLocalAttentionSpec: "Start the engine with "
    "--disable-hybrid-kv-cache-manager, which keeps all blocks of these layers",
}


def layout_of(
    config: KVCacheConfig,
    decode_context: int = 1,
    hash_block_tokens: int | None = None,
) -> KVLayout:
    """
    Return the layout of the engine's KV cache.

    Args:
        config: As both halves of a connector are given it.
        decode_context: Ranks over which the tokens of a block are spread, where a
            group's are.
        hash_block_tokens: Tokens of one of the engine's hashes; a smallest block's if
            it is not known.

    Raises:
        LayoutError: A kind of KV cache that cannot be mapped safely; names the group,
            its layers and the kind. Or there is none at all.
    """
    if not config.kv_cache_groups:
        raise LayoutError(
            "this model keeps no KV cache (it is encoder-only, or has no attention), so "
            f"that there is nothing to reuse. {_ANY}"
        )
    compat.check_groups(config.kv_cache_groups)
    places = dict(compat.places(config))
    order = _execution_order(config)
    rows = {
        place: RowId(index) for index, place in enumerate(sorted(set(places.values())))
    }
    groups = tuple(
        _group(GroupId(index), group, places, rows, order, decode_context)
        for index, group in enumerate(config.kv_cache_groups)
    )
    smallest = min(group.block_tokens for group in groups)
    return KVLayout(
        groups=groups,
        hash_block_tokens=hash_block_tokens
        or compat.hash_block_tokens(config)
        or smallest,
        engine_tag=compat.layout_name(config),
        layer_order=tuple(order),
    )


def _execution_order(config: KVCacheConfig) -> dict[str, int]:
    """
    Return for each layer when it runs, compared with the others.

    By the numbers in its name, as ``extract_layer_index`` does, and by nothing that
    depends on how the configuration lists them. Within one number a recurrent layer
    counts as the later: no hook tells when it has run. Where tokens are drafted it is
    later than all: the state that counts is copied when it is known which are taken.
    A drafter that numbers its layers anew (``draft_model.``, ``mtp.``) runs behind the
    model, of which a stage may have fewer layers.
    """
    key: dict[str, tuple[bool, bool, list[int], bool, str]] = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            parts = name.split(".")
            numbers = [int(part) for part in parts if part.isdecimal()]
            spec = _layer_spec(group.kv_cache_spec, name)
            is_state = isinstance(spec, MambaSpec)
            is_late = isinstance(spec, MambaSpec) and spec.num_speculative_blocks > 0
            is_draft = not _DRAFTERS.isdisjoint(parts)
            key[name] = (is_late, is_draft, numbers, is_state, name)
    return {name: at for at, name in enumerate(sorted(key, key=key.__getitem__))}


def _group(
    group_id: GroupId,
    group: Any,  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    places: dict[str, compat.Place],
    rows: dict[compat.Place, RowId],
    order: dict[str, int],
    decode_context: int,
) -> GroupLayout:
    if not group.layer_names:
        raise LayoutError(
            f"no layer of group {group_id} is on this pipeline stage, so that it would "
            "store no part of the group's blocks. Cut the stages in another way, with "
            "VLLM_PP_LAYER_PARTITION or fewer of them"
        )
    spec = group.kv_cache_spec
    kind, window = _kind(group_id, group)
    by_row: dict[RowId, list[str]] = {}
    for layer in sorted(group.layer_names, key=order.__getitem__):
        if layer not in places:
            raise LayoutError(f"layer {layer} of group {group_id} has no memory")
        by_row.setdefault(rows[places[layer]], []).append(layer)
    return GroupLayout(
        group_id=group_id,
        kind=kind,
        block_tokens=spec.block_size
        * (decode_context if compat.is_dcp_sharded(spec) else 1),
        window_tokens=window,
        rows=tuple(
            RowLayout(
                row_id=row_id,
                page_bytes=max(_page_bytes(_layer_spec(spec, name)) for name in names),
                layer_names=tuple(names),
            )
            for row_id, names in sorted(by_row.items())
        ),
    )


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """Return a layer's own spec; the scheduler is told of a group's first one only."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer]
    return spec


def _page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page; of a state its payload, often half of the page."""
    if isinstance(spec, MambaSpec):
        return spec.state_content_size_bytes
    return spec.page_size_bytes


def _kind(
    group_id: GroupId,
    group: Any,  # noqa: ANN401 - vLLM's KVCacheGroupSpec
) -> tuple[GroupKind, int | None]:
    specs = compat.layer_specs(group.kv_cache_spec)
    kinds = {compat.kind_of(one) for one in specs}
    if compat.is_transferable(group, specs):
        if kinds <= _FULL:
            return GroupKind.FULL, None
        if len(kinds) == 1 and kinds <= _WINDOW:
            return GroupKind.WINDOW, max(map(_window, specs))
        if kinds == {MambaSpec} and _modes(specs) == ["align"]:
            return GroupKind.STATE, None
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    if MambaSpec in kinds:
        names += f" with mamba_cache_mode={', '.join(_modes(specs))}"
    remedy = _REMEDIES.get(next(iter(kinds)), _ANY) if len(kinds) == 1 else _ANY
    raise LayoutError(
        f"group {group_id} (layers {', '.join(group.layer_names)}) holds {names}; ucm "
        "can restore full, MLA and sliding-window attention and aligned recurrent "
        f"states. {remedy}"
    )


def _window(spec: Any) -> int:  # noqa: ANN401 - vLLM's SlidingWindowSpec
    """Return the tokens that a layer may look at, with those that drafts read again."""
    return int(spec.sliding_window) + int(spec.extra_retained_tokens)


def _modes(specs: Collection[Any]) -> list[str]:
    """Return how recurrent layers keep their states."""
    return sorted({one.mamba_cache_mode for one in specs if isinstance(one, MambaSpec)})
