# SPDX-License-Identifier: Apache-2.0
"""What simulated engines that load layer by layer have in common."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from tests.rig import KEYSPACE_DIGEST
from tests.simulation.contents import NUM_ROWS
from tests.simulation.runtime_world import RuntimeWorld
from ucm.blocks import RowId
from ucm.errors import DeviceTimeoutError
from ucm.layerwise import RowSaves, SpanGroup
from ucm.pipeline.tickets import Direction
from ucm.scheduler.messages import SpanOrder

__all__ = ["RowLoad", "RowWorld", "group_of"]

_LONGEST_WAIT_S = 75.0


@attrs.define
class RowLoad:
    """
    A load that layers wait for.

    Args:
        order: Its blocks and keys.
        numbers: What is to be in each block.
        wrong: What a layer read that was none of it.
        is_unasked: A layer ran without having waited.
        is_late: The engine was told so when its pass was over.
        is_over: Its pass ended well.
        is_well: The last word was that it is loaded.
        landed: The blocks when the pass was over, where the engine computes at once.
    """

    order: SpanOrder
    numbers: Sequence[int]
    wrong: str = ""
    is_unasked: bool = False
    is_late: bool = False
    is_over: bool = False
    is_well: bool = False
    landed: list[npt.NDArray[np.uint8]] = attrs.Factory(list)


class RowWorld(RuntimeWorld):
    """
    An engine that waits for its loads row by row.

    ``patience_s`` is how long it may stand still for one wait while nothing hangs.
    """

    patience_s = 2.0
    row_saves: RowSaves

    def _build(self) -> None:
        super()._build()
        self.row_loading: dict[int, RowLoad] = {}

    def _stop(self) -> None:
        """End the last pass: saves of which no row came are told to have ended."""
        self.row_saves.drop()

    @abstractmethod
    def _blocks_to_write(self) -> list[int]:
        """Choose blocks that no load fills, and fence those that saves may read."""

    @abstractmethod
    def _to_be_loaded(self, block: int) -> None:
        """Take note that a load is to write a block."""

    def _may_stand_still(self) -> bool:
        """Whether a copy may not end in time."""
        return self._has_hung()

    def _new_loads(self, known: Sequence[int]) -> list[RowLoad]:
        """Return the loads of a request for some of the contents in *known*."""
        blocks = self._blocks_to_write()
        if not blocks or len(known) < len(blocks):
            return []
        numbers = self.dice.sample(known, len(blocks))
        cut = self.dice.randrange(1, len(blocks) + 1)
        loads = []
        for part in (slice(cut), slice(cut, None)):
            if not blocks[part]:
                continue
            order = self._order(Direction.LOAD, blocks[part], numbers[part])
            loads.append(RowLoad(order, numbers[part]))
            self.by_rows.add(order.transfer_id)
            self.row_loading[order.transfer_id] = loads[-1]
            for block in blocks[part]:
                self._to_be_loaded(block)
        return loads

    def _timed(self, wait: Callable[[], object]) -> bool:
        """Do what may block the engine; it must end. Return whether it did well."""
        start = self.simulation.now
        try:
            wait()
        except DeviceTimeoutError:
            assert self._may_stand_still(), "a wait failed for no reason"
            self.seen["engine gave up"] += 1
            return False
        finally:
            took = self.simulation.now - start
            hangs = self._may_stand_still()
            limit = 4 * _LONGEST_WAIT_S if hangs else self.patience_s
            assert took < limit, f"the engine stood still for {took} s"
        return True


def group_of(*orders: SpanOrder) -> SpanGroup:
    """Return orders whose rows go together."""
    rows = [RowId(row) for row in range(NUM_ROWS)]
    return SpanGroup(KEYSPACE_DIGEST, orders, frozenset(rows))
