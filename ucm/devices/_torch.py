# SPDX-License-Identifier: Apache-2.0
"""
Where the pages of an engine's torch tensors lie, checked against the layout.

An engine describes each layer by a strided view, and its views differ: one storage
for all layers or one each, blocks outermost or layers outermost, pages with padding
behind the payload, groups on the same bytes, blocks cut into smaller ones for the
kernel, one tensor per layer or a tuple of them (keys and values apart, as on Ascend).
All of them come down to ``Region`` values, one per group, row and tensor of a layer:
part *b* of a page starts at ``offset + b * block_stride``. What does not is refused
here, before any byte moves.
"""

from collections.abc import Mapping

import attrs
import torch

from ucm.blocks import GroupId, RowId
from ucm.devices._regions import KVMemory, check_apart, layers_of
from ucm.errors import LayoutError
from ucm.layout import KVLayout, Region, RowLayout

__all__ = ["find_regions"]


def find_regions(
    layout: KVLayout,
    kv_caches: Mapping[str, object],
    *,
    num_blocks: int | None,
    device: torch.device,
) -> KVMemory:
    """
    Locate every row of every group.

    Args:
        layout: Groups and rows.
        kv_caches: Layer name to tensor, or to a tuple of tensors that together are
            the layer's page. Their first dimension counts blocks, or equal parts of
            blocks.
        num_blocks: Blocks in the engine's pool; the shortest first dimension if None.
        device: Where the tensors must be; without an index, on any of its type.

    Raises:
        LayoutError: A tensor does not lie as the layout says; names the layer.
    """
    tensors = _check_tensors(layout, kv_caches, device)
    if num_blocks is None:
        num_blocks = min(part.shape[0] for parts in tensors.values() for part in parts)
    storages: dict[int, torch.UntypedStorage] = {}
    regions: dict[tuple[GroupId, RowId], tuple[Region, ...]] = {}
    first: dict[RowId, tuple[str, tuple[Region, ...]]] = {}
    for group_id, row, name in layers_of(layout):
        found = []
        for tensor in tensors[name]:
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
            storage_id = list(storages).index(storage.data_ptr())
            part = row if len(tensors[name]) == 1 else _part_of(row, tensor, num_blocks)
            found.append(_find_region(name, part, tensor, num_blocks, storage_id))
        whole = sum(region.page_bytes for region in found)
        if whole != row.page_bytes:
            raise LayoutError(
                f"layer {name!r}: its {len(found)} tensors have {whole} bytes per block "
                f"and page_bytes={row.page_bytes}"
            )
        other, places = first.setdefault(row.row_id, (name, tuple(found)))
        if list(map(_start, places)) != list(map(_start, found)):
            raise LayoutError(
                f"layers {other!r} and {name!r} share row {row.row_id} and lie "
                f"apart: {places} and {tuple(found)}"
            )
        regions[group_id, row.row_id] = tuple(found)
    check_apart(layout, regions, tuple(storages.values()))
    return KVMemory(tuple(storages.values()), regions, num_blocks)


def _check_tensors(
    layout: KVLayout, kv_caches: Mapping[str, object], device: torch.device
) -> dict[str, tuple[torch.Tensor, ...]]:
    names = [name for _, _, name in layers_of(layout)]
    extra = sorted(set(kv_caches).difference(names))
    if extra:
        raise LayoutError(f"layer {extra[0]!r} is not in the layout")
    tensors: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in names:
        if name not in kv_caches:
            raise LayoutError(f"layer {name!r} has no tensor")
        given = kv_caches[name]
        parts = given if isinstance(given, tuple | list) else (given,)
        if not parts:
            raise LayoutError(f"layer {name!r} has no tensor but an empty tuple")
        tensors[name] = tuple(_check_tensor(name, part, device) for part in parts)
    return tensors


def _check_tensor(name: str, tensor: object, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"layer {name!r} has a {type(tensor).__name__}, not a tensor")
    where = tensor.device
    is_there = where.type == device.type and device.index in (None, where.index)
    if tensor.layout is not torch.strided or not is_there:
        raise LayoutError(
            f"layer {name!r} is {tensor.layout} on {where}, not torch.strided on "
            f"{device}"
        )
    if not tensor.dim() or not tensor.numel():
        raise LayoutError(f"layer {name!r} is empty: {tuple(tensor.shape)}")
    return tensor


def _part_of(row: RowLayout, tensor: torch.Tensor, num_blocks: int) -> RowLayout:
    """Return the row as if a block were only its share of one tensor of several."""
    nbytes = tensor.numel() // num_blocks * tensor.element_size()
    return attrs.evolve(row, page_bytes=nbytes)


def _find_region(
    name: str, row: RowLayout, tensor: torch.Tensor, num_blocks: int, storage_id: int
) -> Region:
    shape, item = tuple(tensor.shape), tensor.element_size()
    parts, rest = divmod(shape[0], num_blocks)
    if rest or not parts:
        raise LayoutError(
            f"layer {name!r}: shape {shape} does not start with a multiple of "
            f"num_blocks={num_blocks}"
        )
    strides = [stride * item for stride in tensor.stride()]
    block_stride = strides[0] * parts
    dims = zip((parts, *shape[1:]), strides, strict=True)
    payload = item + sum((count - 1) * stride for count, stride in dims)
    if not payload <= row.page_bytes <= block_stride:
        raise LayoutError(
            f"layer {name!r}: a block spans {payload} bytes and blocks are "
            f"{block_stride} bytes apart, which does not fit page_bytes="
            f"{row.page_bytes}; shape {shape}, strides {strides} bytes"
        )
    region = Region(
        row_id=row.row_id,
        storage_id=storage_id,
        offset=int(tensor.storage_offset()) * item,
        block_stride=block_stride,
        page_bytes=row.page_bytes,
        num_blocks=num_blocks,
    )
    nbytes = tensor.untyped_storage().nbytes()
    if region.end > nbytes:
        raise LayoutError(
            f"layer {name!r}: pages of {row.page_bytes} bytes from offset "
            f"{region.offset} end at {region.end}, behind the storage's {nbytes} bytes"
        )
    if not tensor.untyped_storage().data_ptr():
        raise LayoutError(f"layer {name!r} has no memory, as tensors that are traced")
    return region


def _start(region: Region) -> tuple[int, int, int]:
    return region.storage_id, region.offset, region.block_stride
