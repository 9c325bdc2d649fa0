# SPDX-License-Identifier: Apache-2.0
"""
The shape of an engine's KV cache, as values.

A *group* is a set of layers with one block table. A *row* is one storage row: the page
of a block in one region of memory. Layers that share storage share a row, also across
groups (hybrid models overlay groups on the same bytes; a block id belongs to one group
at a time). A stored block of group g is the pages of g's rows, in row order, back to
back.
"""

import enum
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from operator import index
from typing import Final

import attrs

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError

__all__ = ["GroupKind", "GroupLayout", "KVLayout", "Region", "RowLayout"]

_FINGERPRINT_SCHEMA = 1
_MOST_BLOCK_TOKENS: Final = 1 << 28
"""By so many ns blocks of a prefix count as used one after the other, in 64 bits."""


class GroupKind(enum.Enum):
    """What a prefix hit needs of a group's blocks."""

    FULL = "full"
    """Every block of the prefix."""
    WINDOW = "window"
    """The blocks that the last window of the prefix touches."""
    STATE = "state"
    """The one block that ends with the prefix: the state of a recurrent layer there."""


@attrs.frozen(kw_only=True)
class RowLayout:
    """
    One storage row of a group.

    Args:
        row_id: Dense over the whole layout.
        page_bytes: Bytes of one block in this row.
        layer_names: The group's layers that live in the row, in execution order.
    """

    row_id: RowId
    page_bytes: int = attrs.field(converter=index, validator=attrs.validators.gt(0))
    layer_names: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))


@attrs.frozen(kw_only=True)
class GroupLayout:
    """
    Layers with one block table.

    Args:
        group_id: Index in the engine's own order.
        kind: What a hit needs.
        block_tokens: Tokens per block.
        window_tokens: For ``WINDOW`` groups, tokens that attention can see.
        rows: The group's rows by ascending row id.
    """

    group_id: GroupId
    kind: GroupKind
    block_tokens: int = attrs.field(
        converter=index,
        validator=attrs.validators.and_(
            attrs.validators.gt(0), attrs.validators.le(_MOST_BLOCK_TOKENS)
        ),
    )
    window_tokens: int | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(index),
        validator=attrs.validators.optional(attrs.validators.gt(0)),
    )
    rows: tuple[RowLayout, ...]

    def __attrs_post_init__(self) -> None:
        if not self.rows:
            raise LayoutError(f"group {self.group_id} has no rows")
        ids = [row.row_id for row in self.rows]
        if ids != sorted(set(ids)):
            raise LayoutError(f"group {self.group_id}: rows {ids} are not ascending")
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens is not None):
            raise LayoutError(
                f"group {self.group_id}: kind {self.kind.value} with "
                f"window_tokens={self.window_tokens}"
            )

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one stored block: all its pages."""
        return sum(row.page_bytes for row in self.rows)

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Where each row's page starts within the stored block."""
        offsets, at = [], 0
        for row in self.rows:
            offsets.append(at)
            at += row.page_bytes
        return tuple(offsets)

    def window_blocks(self, prefix_tokens: int) -> range:
        """Return the indexes of the blocks a hit over *prefix_tokens* must restore."""
        stop = prefix_tokens // self.block_tokens
        if self.kind is GroupKind.STATE:
            return range(max(0, stop - 1), stop)
        if self.window_tokens is None:
            return range(stop)
        first_token = max(0, prefix_tokens - (self.window_tokens - 1))
        return range(first_token // self.block_tokens, stop)

    def prefixes_with(self, block: int) -> range:
        """Return over how many tokens the hits are that restore a block; see above."""
        end = (block + 1) * self.block_tokens
        if self.kind is GroupKind.STATE:
            return range(end, end + self.block_tokens)
        if self.window_tokens is None:
            return range(end, sys.maxsize)
        return range(end, end + self.window_tokens - 1)


@attrs.frozen(kw_only=True)
class Region:
    """
    Where the pages of one row lie in one storage.

    Args:
        row_id: The row.
        storage_id: Which of the device's registered storages.
        offset: Byte offset of block 0's page.
        block_stride: Bytes from one block's page to the next.
        page_bytes: Bytes of a page.
        num_blocks: Blocks in the engine's pool.
    """

    row_id: RowId
    storage_id: int
    offset: int
    block_stride: int
    page_bytes: int
    num_blocks: int

    def __attrs_post_init__(self) -> None:
        if self.offset < 0 or self.num_blocks < 1:
            raise LayoutError(f"row {self.row_id}: {self} is not a region")
        if self.block_stride < self.page_bytes:
            raise LayoutError(
                f"row {self.row_id}: blocks overlap, block_stride={self.block_stride} "
                f"is less than page_bytes={self.page_bytes}"
            )

    @property
    def end(self) -> int:
        """First byte offset behind the region."""
        return self.offset + (self.num_blocks - 1) * self.block_stride + self.page_bytes


@attrs.frozen(kw_only=True)
class KVLayout:
    """
    All groups of an engine's KV cache.

    Args:
        groups: By group id.
        hash_block_tokens: Tokens covered by one block hash of the engine.
        engine_tag: What else decides the meaning of the bytes: the engine's layout
            name, the kernel's instruction set.
        layer_order: All layers in the order in which a forward pass runs them; empty
            where that is group by group, each in row order. No part of the
            fingerprint, because it moves no byte.
    """

    groups: tuple[GroupLayout, ...]
    hash_block_tokens: int = attrs.field(
        converter=index, validator=attrs.validators.gt(0)
    )
    engine_tag: str
    layer_order: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        ids = [group.group_id for group in self.groups]
        if len(set(ids)) != len(ids):
            raise LayoutError(f"group ids {ids} are not distinct")
        pages: dict[RowId, int] = {}
        seen: set[str] = set()
        for group in self.groups:
            if group.block_tokens % self.hash_block_tokens:
                raise LayoutError(
                    f"group {group.group_id}: block_tokens={group.block_tokens} is no "
                    f"multiple of hash_block_tokens={self.hash_block_tokens}"
                )
            for row in group.rows:
                pages[row.row_id] = max(pages.get(row.row_id, 0), row.page_bytes)
                twice = seen.intersection(row.layer_names)
                if twice:
                    raise LayoutError(f"layer {min(twice)} is in two rows")
                seen.update(row.layer_names)
        if sorted(pages) != list(range(len(pages))):
            raise LayoutError(f"rows {sorted(pages)} are not dense from 0")
        self._check_order()

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers in the order in which a forward pass runs them."""
        return self.layer_order or self._listed_layers()

    def _listed_layers(self) -> tuple[str, ...]:
        return tuple(
            name
            for group in self.groups
            for row in group.rows
            for name in row.layer_names
        )

    def _check_order(self) -> None:
        """Refuse an order of layers that is not one of this layout's layers."""
        if not self.layer_order:
            return
        at = {name: index for index, name in enumerate(self.layer_order)}
        odd = set(at).symmetric_difference(self._listed_layers())
        if odd or len(at) != len(self.layer_order):
            raise LayoutError(
                f"layer_order {self.layer_order} does not name each layer once: "
                f"{sorted(odd)}"
            )
        for group in self.groups:
            for row in group.rows:
                if sorted(row.layer_names, key=at.__getitem__) != [*row.layer_names]:
                    raise LayoutError(
                        f"row {row.row_id} of group {group.group_id}: layers "
                        f"{row.layer_names} are not in the order of execution"
                    )

    @property
    def row_save_layer(self) -> dict[RowId, str]:
        """
        The layer after which nothing of a forward pass writes to a row any more.

        Of all layers that live in the row, in whatever group, the last to run.
        """
        row_of = {
            name: row.row_id
            for group in self.groups
            for row in group.rows
            for name in row.layer_names
        }
        return {row_of[name]: name for name in self.layers}

    @property
    def num_rows(self) -> int:
        """Storage rows over all groups."""
        return len({row.row_id for group in self.groups for row in group.rows})

    @property
    def max_block_bytes(self) -> int:
        """Bytes of the largest stored block of any group."""
        return max(group.block_bytes for group in self.groups)

    @property
    def alignment_tokens(self) -> int:
        """Prefix lengths that end on a block boundary of every group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def group(self, group_id: GroupId) -> GroupLayout:
        """
        Return a group by id.

        Raises:
            LayoutError: No group has this id.
        """
        for group in self.groups:
            if group.group_id == group_id:
                return group
        raise LayoutError(f"no group {group_id}")

    def span_blocks(
        self, span_bytes: int, block_bytes: Iterable[int]
    ) -> dict[GroupId, int]:
        """
        Return the most blocks of one ticket, by group: one at least.

        Args:
            span_bytes: What a ticket carries at most, where that is more than a block.
            block_bytes: By group, of the largest part of a block that any rank has.
        """
        return {
            group.group_id: max(1, span_bytes // nbytes)
            for group, nbytes in zip(self.groups, block_bytes, strict=True)
        }

    def row_of(self, layer_name: str) -> RowId:
        """
        Return the one row in which a layer lives.

        Raises:
            LayoutError: The layer is not part of this layout.
        """
        for group in self.groups:
            for row in group.rows:
                if layer_name in row.layer_names:
                    return row.row_id
        raise LayoutError(f"no layer {layer_name!r}")

    def hash_index(self, group: GroupLayout, block_index: int) -> int:
        """Return which of the engine's hashes names block *block_index* of *group*."""
        return (block_index + 1) * group.block_tokens // self.hash_block_tokens - 1

    def hashes_of(
        self, group: GroupLayout, hashes: Sequence[bytes], start: int, stop: int
    ) -> Sequence[bytes]:
        """Return the hashes of the group's blocks *start* to *stop*, some if few."""
        step = group.block_tokens // self.hash_block_tokens
        if step == 1:
            return hashes[start:stop]
        return hashes[(start + 1) * step - 1 : stop * step : step]  # as ``hash_index``

    def fingerprint(self) -> str:
        """Return a digest over everything that decides the bytes of stored blocks."""
        described = [
            _FINGERPRINT_SCHEMA,
            self.engine_tag,
            self.hash_block_tokens,
            [
                [
                    group.group_id,
                    group.kind.value,
                    group.block_tokens,
                    group.window_tokens,
                    [[r.row_id, r.page_bytes, r.layer_names] for r in group.rows],
                ]
                for group in self.groups
            ],
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()
