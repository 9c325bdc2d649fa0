# SPDX-License-Identifier: Apache-2.0
"""
An engine that saves and loads layer by layer, for the world of the pipeline.

Rows are written one after the other and submitted as they are written, so that a row
that is read too early, or a block that is stored without its last row, holds other
bytes than those under its key. Some saves never get their last row; some passes end in
the middle. Loads are read row by row while the rest of them is still on its way.
"""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from tests.rig import KEYSPACE_DIGEST
from tests.simulation.contents import (
    CONTENTS,
    LAYERS,
    LAYOUT,
    NEVER,
    NUM_ROWS,
    NUMBERS,
    WrongBytesError,
    check_bytes,
)
from tests.simulation.row_world import RowLoad, RowWorld, group_of
from tests.simulation.runtime_world import Transfer
from ucm.blocks import RowId
from ucm.layerwise import RowLoads, RowSaves
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.scheduler.messages import SpanOrder

__all__ = ["RowActs"]

_NUM_KEYS = 40
_PAUSES_S = (0.0, 0.0, 0.0, 1e-4, 0.02, 1.0)


@attrs.define
class _RowSave:
    """
    A save whose rows are not all written.

    Args:
        order: Its blocks and keys.
        numbers: What is to be in each block.
        left: Rows that were not submitted, in the order in which they will be.
        is_lost: Somebody else writes the blocks now, or nobody does.
    """

    order: SpanOrder
    numbers: Sequence[int]
    left: list[int]
    is_lost: bool = False


class RowActs(RowWorld):
    """Acts of an engine that computes at once, ``pages[row, block]`` being its memory."""

    pages: npt.NDArray[np.uint8]
    expected: list[npt.NDArray[np.uint8] | None]

    def _build(self) -> None:
        super()._build()
        self.row_saves = RowSaves(self.runtime, LAYOUT)
        ahead = self.dice.randrange(NUM_ROWS + 1)
        self.row_loads = RowLoads(self.runtime, LAYOUT, ahead)
        self.partial: list[_RowSave] = []

    def _row_acts(self) -> Sequence[Callable[[], None]]:
        return self._begin_rows, self._more_rows, self._more_rows, self._forward

    def _take(self, free: Sequence[int]) -> list[int]:
        blocks = super()._take(free)
        for save in self.partial:
            save.is_lost |= not set(blocks).isdisjoint(save.order.block_ids)
        return blocks

    # Saves whose rows come whenever they do.

    def _begin_rows(self) -> None:
        """Write the first rows of some blocks, and submit them."""
        blocks = self._blocks_to_write()
        if blocks:
            save = self._new_save(blocks, self.next_id + 1)  # a lane of its own
            self.partial.append(save)
            self._bring_rows(save, is_first=True)

    def _more_rows(self) -> None:
        """Write and submit more rows of a save, or give it up."""
        if not self.partial:
            return
        save = self.dice.choice(self.partial)
        transfer_id = save.order.transfer_id
        roll = self.dice.random()
        if roll < 0.9:
            self._bring_rows(save)
            return
        self.partial.remove(save)
        if roll < 0.95:
            self.runtime.abandon([transfer_id], Reason.UNFINISHED)
        else:
            self.seen["rows never come"] += 1

    def _bring_rows(self, save: _RowSave, *, is_first: bool = False) -> None:
        count = self.dice.choice([1, 1, 2, NUM_ROWS])
        rows = [RowId(row) for row in save.left[:count]]
        for row in rows:
            self._write_row(save, row)
        fence = self.device.lease(None)
        transfer_id = save.order.transfer_id
        self._submitted(save, rows)
        if is_first:
            self.runtime.submit(KEYSPACE_DIGEST, [save.order], fence, rows)
        else:
            self.seen["rows come late"] += transfer_id not in self.transfers
            self.runtime.add_rows([transfer_id], rows, fence)
        if not save.left:
            self.partial.remove(save)

    def _new_save(self, blocks: list[int], generation: int = 0) -> _RowSave:
        first = self.dice.randrange(_NUM_KEYS - len(blocks))
        numbers = range(first, first + len(blocks))
        rows = list(range(NUM_ROWS))
        if self.dice.random() < 0.3:
            self.dice.shuffle(rows)
        order = self._order(Direction.SAVE, blocks, numbers, generation)
        self.transfers[order.transfer_id].rows_left = set(range(NUM_ROWS))
        self.by_rows.add(order.transfer_id)
        return _RowSave(order, numbers, rows)

    def _submitted(self, save: _RowSave, rows: Sequence[int]) -> None:
        save.left = [row for row in save.left if row not in rows]
        transfer = self.transfers.get(save.order.transfer_id)
        if transfer is not None:
            transfer.rows_left.difference_update(rows)

    def _write_row(self, save: _RowSave, row: int) -> None:
        """Write a row as engines do, which may write it more than once."""
        for block, number in zip(save.order.block_ids, save.numbers, strict=True):
            before = self.expected[block]
            if save.is_lost or before is None:
                continue
            content = before.copy()
            content[row] = CONTENTS[number][row]
            if self.dice.random() < 0.2:
                self.pages[row, block] = NEVER[row]
                self.simulation.pause()
            self.pages[row, block] = content[row]
            self.expected[block] = content
            self.simulation.pause()

    # A forward pass.

    def _to_be_loaded(self, block: int) -> None:
        self.expected[block] = None

    def _loadable(self) -> Sequence[int]:
        """Return contents that a request may ask for; as a rule they are stored."""
        stored = sorted(NUMBERS[key] for key in self.inner._entries)
        return stored if self.dice.random() < 0.8 else range(_NUM_KEYS)

    def _forward(self) -> None:
        """Run the layers one after the other; each loads and saves its own row."""
        requests = [self._new_loads(self._loadable()) for _ in range(2)]
        loads = [load for request in requests for load in request]
        dice = self.dice
        blocks = self._blocks_to_write()
        cut = dice.randrange(1, len(blocks) + 1) if blocks else 0
        saves = [self._new_save(part) for part in (blocks[:cut], blocks[cut:]) if part]
        groups = [group_of(*(load.order for load in each)) for each in requests if each]
        fence = self.device.lease(None)
        if not self._timed(lambda: self.row_loads.begin(groups, fence)):
            self._never_begun(loads, saves)
            return
        for save in saves:
            save.left = list(range(NUM_ROWS))
        self.partial += saves  # for whoever takes their blocks
        self.row_saves.begin(
            [group_of(*(save.order for save in saves))] if saves else []
        )
        ends_at = dice.randrange(NUM_ROWS) if dice.random() < 0.1 else NUM_ROWS
        for row, layer in enumerate(LAYERS[:ends_at]):
            if not self._run_layer(row, layer, loads, saves):
                ends_at = row
                break
            self._meanwhile()
        self.partial = [save for save in self.partial if save not in saves]
        if ends_at < NUM_ROWS:
            self.seen["pass ended early"] += 1
            return  # what is left ends with the next pass, by its deadline, or at the end
        for save in saves:
            self._submitted(save, range(NUM_ROWS))
        self.row_saves.finish(lambda: self.device.lease(None))
        self._finish_loads(loads)

    def _never_begun(self, loads: list[RowLoad], saves: list[_RowSave]) -> None:
        """Forget what nobody has heard of."""
        orders = [load.order for load in loads] + [save.order for save in saves]
        for order in orders:
            del self.transfers[order.transfer_id]
        for load in loads:
            del self.row_loading[load.order.transfer_id]
            for block in load.order.block_ids:
                self.expected[block] = self.pages[:, block].copy()

    def _run_layer(
        self, row: int, layer: str, loads: list[RowLoad], saves: list[_RowSave]
    ) -> bool:
        if self.dice.random() < 0.95:
            if not self._timed(lambda: self.row_loads.wait_for(layer)):
                return False
        else:
            for load in loads:
                load.is_unasked = True
        for load in loads:
            for block, number in zip(load.order.block_ids, load.numbers, strict=True):
                if not np.array_equal(CONTENTS[number][row], self.pages[row, block]):
                    load.wrong = f"row {row} of block {block} was read as other bytes"
        for save in saves:
            self._write_row(save, row)
        for _ in range(self.dice.choice([0, 1, 1, 1, 2])):
            for save in saves:
                self._submitted(save, [row])
            self.row_saves.layer_done(layer, lambda: self.device.lease(None))
        return True

    def _meanwhile(self) -> None:
        """Do what may happen between two layers."""
        dice = self.dice
        if dice.random() < 0.5:
            self.simulation.sleep(dice.choice(_PAUSES_S))

    def _finish_loads(self, loads: list[RowLoad]) -> None:
        """End the pass: its loads are over, and whoever gets their blocks may write."""
        late: list[int] = []
        if not self._timed(lambda: late.extend(self.row_loads.finish())):
            return
        for load in loads:
            for block in load.order.block_ids:
                load.landed.append(self.pages[:, block].copy())
                if self.dice.random() < 0.5:
                    self.pages[:, block] = NEVER
                self.expected[block] = self.pages[:, block].copy()
            load.is_late = load.order.transfer_id in late
            self.seen["came late"] += load.is_late
        self._poll()
        for load in loads:  # word that the blocks are free may still be on its way
            left = self.transfers.get(load.order.transfer_id)
            assert left is None or left.outcome, "a load is not over"

    def _row_load_over(self, transfer: Transfer) -> bool:
        """Look at a load that layers waited for; False if it is another one."""
        load = self.row_loading.pop(transfer.order.transfer_id, None)
        if load is None:
            return False
        is_well = transfer.outcome == OutcomeKind.COMMITTED.value
        if is_well and load.landed and not load.is_late:
            self.seen["rows loaded"] += 1
            assert not load.is_unasked, "a load is well that a layer did not ask for"
            if load.wrong:
                raise WrongBytesError(load.wrong)
            for number, landed in zip(load.numbers, load.landed, strict=True):
                check_bytes(CONTENTS[number], landed, "a block was loaded wrongly")
        if not load.landed:  # its pass has not ended well
            for block in load.order.block_ids:
                self.expected[block] = self.pages[:, block].copy()
        return True
