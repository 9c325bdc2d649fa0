# SPDX-License-Identifier: Apache-2.0
"""The CPU's device, counting what moves: where a real one would throttle, or account."""

from collections import Counter
from collections.abc import Sequence

from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.abc import Fence
from ucm.devices.cpu import CPUDevice
from ucm.plan import HostSlots

__all__ = ["MeteredDevice"]


class MeteredDevice(CPUDevice):
    """Copies as the CPU does; ``moved`` has the blocks of each direction."""

    def __init__(self, num_blocks: int | None = None) -> None:
        super().__init__(num_blocks)
        self.moved: Counter[str] = Counter()

    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Copy pages into slots, and count."""
        fence = super().gather(group_id, row_ids, block_ids, slots, seeds)
        self.moved["gathered"] += len(block_ids)
        return fence

    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Copy slots into pages, and count."""
        fence = super().scatter(group_id, row_ids, slots, block_ids, seeds)
        self.moved["scattered"] += len(block_ids)
        return fence
