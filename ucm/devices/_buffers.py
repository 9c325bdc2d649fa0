# SPDX-License-Identifier: Apache-2.0
"""
Where the pages of arrays and other buffers lie, checked against the layout.

A layer is one buffer, its first dimension counting blocks, with the pages of a block in
one piece. The blocks themselves may lie apart, as in ``pool[:, layer]``. numpy's arrays
are such buffers, ``mmap``, ``bytearray`` and ``ctypes`` arrays after a ``cast`` of their
``memoryview``, and much else (PEP 3118); no torch is needed.
"""

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import GroupId, RowId
from ucm.devices._regions import KVMemory, check_apart, layers_of
from ucm.errors import LayoutError
from ucm.layout import KVLayout, Region, RowLayout

__all__ = ["find_buffers", "is_buffer"]


@attrs.frozen(eq=False)
class _AllMemory:
    """
    The address space as one storage, so that overlaps of any buffers are seen.

    Args:
        kept: What must stay alive.
    """

    kept: tuple[npt.NDArray[np.void], ...]

    def data_ptr(self) -> int:
        return 0


def is_buffer(given: object) -> bool:
    """Return whether something has the buffer protocol; torch's tensors have not."""
    try:
        memoryview(given).release()  # type: ignore[arg-type] # that is the question
    except TypeError:
        return False
    except (BufferError, ValueError):  # it is one, which we cannot read
        return True
    return True


def find_buffers(
    layout: KVLayout, kv_caches: Mapping[str, object], *, num_blocks: int | None
) -> KVMemory:
    """
    Locate every row of every group.

    Args:
        layout: Groups and rows.
        kv_caches: Layer name to buffer, writable. Borrowed: as long as they are, the
            buffers cannot be resized.
        num_blocks: Blocks in the host's pool; the shortest first dimension if None.

    Raises:
        LayoutError: A buffer does not lie as the layout says; names the layer.
    """
    names = [name for _, _, name in layers_of(layout)]
    for name in sorted(set(kv_caches).symmetric_difference(names)):
        known = "has no buffer" if name in names else "is not in the layout"
        raise LayoutError(f"layer {name!r} {known}")
    arrays = {name: _array_of(name, kv_caches[name]) for name in names}
    if num_blocks is None:
        num_blocks = min(len(array) for array in arrays.values())
    regions: dict[tuple[GroupId, RowId], tuple[Region, ...]] = {}
    first: dict[RowId, tuple[str, int, int]] = {}
    for group_id, row, name in layers_of(layout):
        region = _region_of(name, row, arrays[name], num_blocks)
        other, *place = first.setdefault(
            row.row_id, (name, region.offset, region.block_stride)
        )
        if place != [region.offset, region.block_stride]:
            raise LayoutError(
                f"layers {other!r} and {name!r} share row {row.row_id} and lie apart"
            )
        regions[group_id, row.row_id] = (region,)
    memory = (_AllMemory(tuple(arrays.values())),)
    check_apart(layout, regions, memory)
    return KVMemory(memory, regions, num_blocks)


def _array_of(name: str, buffer: object) -> npt.NDArray[np.void]:
    """Return a layer's buffer as an array, whose shape and strides can be asked for."""
    try:
        array: npt.NDArray[np.void] = np.asarray(memoryview(buffer))  # type: ignore[arg-type]
    except (BufferError, NotImplementedError, TypeError, ValueError) as exc:
        raise LayoutError(f"layer {name!r} cannot be read as a buffer: {exc}") from exc
    if not array.flags.writeable:
        raise LayoutError(
            f"layer {name!r} is read-only: nothing could be loaded into it"
        )
    if array.dtype.hasobject:
        raise LayoutError(
            f"layer {name!r} holds objects ({array.dtype}): their bytes are addresses, which "
            "are of use to nobody else"
        )
    if not array.ndim or not array.size:
        raise LayoutError(f"layer {name!r} is empty: {array.shape}")
    return array


def _region_of(
    name: str, row: RowLayout, array: npt.NDArray[np.void], num_blocks: int
) -> Region:
    if len(array) < num_blocks:
        raise LayoutError(
            f"layer {name!r}: shape {array.shape} has no {num_blocks} blocks"
        )
    page = array[0]
    if page.nbytes != row.page_bytes or not page.flags.c_contiguous:
        raise LayoutError(
            f"layer {name!r}: a block of shape {page.shape} and {array.itemsize} bytes "
            f"each has {page.nbytes} bytes, strides {page.strides}, and is no page of "
            f"page_bytes={row.page_bytes} in one piece"
        )
    if array.strides[0] < row.page_bytes:
        raise LayoutError(
            f"layer {name!r}: blocks of {row.page_bytes} bytes begin {array.strides[0]} bytes "
            "apart: they overlap, or stand in reverse order"
        )
    return Region(
        row_id=row.row_id,
        storage_id=0,
        offset=array.ctypes.data,
        block_stride=array.strides[0],
        page_bytes=row.page_bytes,
        num_blocks=num_blocks,
    )
