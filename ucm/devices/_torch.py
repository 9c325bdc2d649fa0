# SPDX-License-Identifier: Apache-2.0
"""
Where the pages of an engine's torch tensors lie, checked against the layout.

An engine describes each layer by a strided view, and its views differ: one storage
for all layers or one each, blocks outermost or layers outermost, pages with padding
behind the payload, groups on the same bytes, blocks cut into smaller ones for the
kernel. All of them come down to one ``Region`` per group and row: page *b* starts at
``offset + b * block_stride``. What does not is refused here, before any byte moves.
"""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError
from ucm.layout import KVLayout, Region, RowLayout

__all__ = ["KVTensors", "find_regions"]


@attrs.frozen(eq=False)
class KVTensors:
    """
    The engine's memory, as regions.

    Args:
        storages: Indexed by ``Region.storage_id``. Keeps the memory alive.
        regions: Where each row of each group lies. A row that groups share has one
            region per group; they differ in ``page_bytes`` only.
        num_blocks: Blocks in the engine's pool.
    """

    storages: tuple[torch.UntypedStorage, ...]
    regions: Mapping[tuple[GroupId, RowId], Region]
    num_blocks: int


def find_regions(
    layout: KVLayout,
    kv_caches: Mapping[str, object],
    *,
    num_blocks: int | None,
    device_type: str,
) -> KVTensors:
    """
    Locate every row of every group.

    Args:
        layout: Groups and rows.
        kv_caches: Layer name to tensor; its first dimension counts blocks, or equal
            parts of blocks.
        num_blocks: Blocks in the engine's pool; the shortest first dimension if None.
        device_type: Where the tensors must be, such as ``cpu``.

    Raises:
        LayoutError: A tensor does not lie as the layout says; names the layer.
    """
    tensors = _check_tensors(layout, kv_caches, device_type)
    if num_blocks is None:
        num_blocks = min(tensor.shape[0] for tensor in tensors.values())
    storages: dict[int, torch.UntypedStorage] = {}
    regions: dict[tuple[GroupId, RowId], Region] = {}
    first: dict[RowId, tuple[str, Region]] = {}
    for group_id, row, name in _layers(layout):
        storage = tensors[name].untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        storage_id = list(storages).index(storage.data_ptr())
        region = _find_region(name, row, tensors[name], num_blocks, storage_id)
        other, place = first.setdefault(row.row_id, (name, region))
        if _start(place) != _start(region):
            raise LayoutError(
                f"layers {other!r} and {name!r} share row {row.row_id} and lie "
                f"apart: {place} and {region}"
            )
        regions[group_id, row.row_id] = region
    for group in layout.groups:
        _check_apart([(row, regions[group.group_id, row.row_id]) for row in group.rows])
    return KVTensors(tuple(storages.values()), regions, num_blocks)


def _layers(layout: KVLayout) -> Iterator[tuple[GroupId, RowLayout, str]]:
    for group in layout.groups:
        for row in group.rows:
            for name in row.layer_names:
                yield group.group_id, row, name


def _check_tensors(
    layout: KVLayout, kv_caches: Mapping[str, object], device_type: str
) -> dict[str, torch.Tensor]:
    names = [name for _, _, name in _layers(layout)]
    extra = sorted(set(kv_caches).difference(names))
    if extra:
        raise LayoutError(f"layer {extra[0]!r} is not in the layout")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name not in kv_caches:
            raise LayoutError(f"layer {name!r} has no tensor")
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"layer {name!r} has a {type(tensor).__name__}, not one tensor; this "
                f"device does not support that"
            )
        if tensor.layout is not torch.strided or tensor.device.type != device_type:
            raise LayoutError(
                f"layer {name!r} is {tensor.layout} on {tensor.device}, not "
                f"torch.strided on {device_type}"
            )
        if not tensor.dim() or not tensor.numel():
            raise LayoutError(f"layer {name!r} is empty: {tuple(tensor.shape)}")
        tensors[name] = tensor
    return tensors


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
    return region


def _start(region: Region) -> tuple[int, int, int]:
    return region.storage_id, region.offset, region.block_stride


def _check_apart(rows: Sequence[tuple[RowLayout, Region]]) -> None:
    for index, (row, mine) in enumerate(rows):
        for other, theirs in rows[:index]:
            if not _are_apart(mine, theirs):
                raise LayoutError(
                    f"layers {other.layer_names[0]!r} and {row.layer_names[0]!r} "
                    f"overlap: {theirs} and {mine}"
                )


def _are_apart(a: Region, b: Region) -> bool:
    if a.storage_id != b.storage_id or a.end <= b.offset or b.end <= a.offset:
        return True
    if a.block_stride != b.block_stride:
        return False
    phase = (b.offset - a.offset) % a.block_stride
    return a.page_bytes <= phase <= a.block_stride - b.page_bytes
