# SPDX-License-Identifier: Apache-2.0
"""
Layer-wise transfer under the accelerator's engine: rows are written late.

Each row has a proof of its own. Kernels read what was loaded row by row, and nothing
but the wait of their layer stands between them and the copy.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tests.simulation.accelerator_parts import Parts
from tests.simulation.accelerator_proofs import Prover
from tests.simulation.contents import (
    CONTENTS,
    LAYERS,
    LAYOUT,
    NUM_ROWS,
    NUMBERS,
    WrongBytesError,
)
from tests.simulation.row_world import RowLoad, RowWorld, group_of
from tests.simulation.runtime_world import Transfer
from ucm.devices.abc import Fence
from ucm.devices.events import FailedFence
from ucm.errors import DeviceError
from ucm.layerwise import RowLoads
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.scheduler.messages import SpanOrder

__all__ = ["RowKernels"]


class RowKernels(RowWorld):
    """Acts of an engine whose kernels run late, ``pages[row, :, block]`` its memory."""

    patience_s = 5.0
    parts: Parts
    prover: Prover
    pages: npt.NDArray[np.uint8]
    content: list[int | None]
    loading: set[int]
    saved: list[int]
    wrong: list[WrongBytesError]

    def _build(self) -> None:
        super()._build()
        self.row_saves = self.parts.row_saves(self.runtime, LAYOUT)
        ahead = self.dice.randrange(NUM_ROWS + 1)
        self.row_loads = RowLoads(self.runtime, LAYOUT, ahead)

    @abstractmethod
    def _new_number(self) -> int:
        """Return content that no block has yet."""

    @abstractmethod
    def _work(self) -> None:
        """Launch kernels that hold up what comes behind them."""

    @abstractmethod
    def _launch(self, block: int, kernel: Callable[[], None]) -> None:
        """Let a kernel that uses a block run some time."""

    @abstractmethod
    def _put(self, block: int, row: int, number: int) -> None:
        """Write a row now."""

    @abstractmethod
    def _poison(self, block: int) -> None:
        """Overwrite a block that is ours no more."""

    def _forward(self) -> None:
        """Run the layers one after the other; each loads and saves its own row."""
        self.prover.begin_step()
        requests = [
            self._new_loads(self._loadable())
            for _ in range(self.dice.choice([0, 1, 2]))
        ]
        loads = [load for request in requests for load in request]
        groups = [group_of(*(load.order for load in each)) for each in requests if each]
        fence = _fence(self.prover.before_load)
        if not self._timed(lambda: self.row_loads.begin(groups, fence)):
            self._never_begun([load.order for load in loads])
            for load in loads:
                del self.row_loading[load.order.transfer_id]
                self.loading.difference_update(load.order.block_ids)
            return
        blocks = self._blocks_to_write()
        numbers = [self._new_number() for _ in blocks]
        saves = self._begin_saves(blocks, numbers)
        self._work()
        ends_at = (
            self.dice.randrange(NUM_ROWS) if self.dice.random() < 0.1 else NUM_ROWS
        )
        for row, layer in enumerate(LAYERS):
            ends_at = min(ends_at, self._read_row(row, layer, ends_at, loads))
            for block, number in zip(blocks, numbers, strict=True):
                self.content[block] = number
                self._launch(block, functools.partial(self._put, block, row, number))
            if row < ends_at:
                self._save_row(row, layer, saves)
        if ends_at < NUM_ROWS:
            self.seen["pass ended early"] += 1
            return  # what is left ends with the next pass, by its deadline, or at the end
        for save in saves:
            self.transfers[save.transfer_id].rows_left.clear()
        self.row_saves.finish(lambda: _fence(self.prover.after_write))
        self._finish_loads(loads)

    def _begin_saves(self, blocks: list[int], numbers: list[int]) -> list[SpanOrder]:
        cut = self.dice.randrange(1, len(blocks) + 1) if blocks else 0
        saves = []
        for part in (slice(cut), slice(cut, None)):
            if blocks[part]:
                saves.append(self._order(Direction.SAVE, blocks[part], numbers[part]))
                transfer_id = saves[-1].transfer_id
                self.transfers[transfer_id].rows_left = set(range(NUM_ROWS))
                self.by_rows.add(transfer_id)
        self.saved += numbers
        self.row_saves.begin([group_of(*saves)] if saves else [])
        return saves

    def _save_row(self, row: int, layer: str, saves: list[SpanOrder]) -> None:
        for _ in range(self.dice.choice([0, 1, 1, 1, 2])):
            for save in saves:
                self.transfers[save.transfer_id].rows_left.discard(row)
            self.row_saves.layer_done(layer, lambda: _fence(self.prover.after_write))

    def _read_row(
        self, row: int, layer: str, ends_at: int, loads: Sequence[RowLoad]
    ) -> int:
        """Let kernels read a row once it is there; return how far the pass may go."""
        if row >= ends_at:
            return ends_at
        if self.dice.random() < 0.05:
            for load in loads:
                load.is_unasked = True
        elif not self._timed(lambda: self.row_loads.wait_for(layer)):
            return row
        for load in loads:
            for block, number in zip(load.order.block_ids, load.numbers, strict=True):
                kernel = functools.partial(self._compare_row, load, block, row, number)
                self._launch(block, kernel)
        return NUM_ROWS

    def _compare_row(self, load: RowLoad, block: int, row: int, number: int) -> None:
        found = self.pages[row, :, block].reshape(-1)
        if not np.array_equal(CONTENTS[number][row], found):
            load.wrong = f"row {row} of block {block} was read as other bytes"
        self._judge(load)

    def _judge(self, load: RowLoad) -> None:
        if load.is_well and load.wrong:
            self.wrong.append(WrongBytesError(load.wrong))

    def _finish_loads(self, loads: Sequence[RowLoad]) -> None:
        """End the pass: its loads are over, and whoever gets their blocks may write."""
        late: list[int] = []
        if not self._timed(lambda: late.extend(self.row_loads.finish())):
            return
        for load in loads:
            load.is_over = True
            load.is_late = load.order.transfer_id in late
            self.seen["came late"] += load.is_late
            for block, number in zip(load.order.block_ids, load.numbers, strict=True):
                self.content[block] = number
                self.loading.discard(block)
                if self.dice.random() < 0.5:
                    self._poison(block)
        self._poll()
        for load in loads:  # word that the blocks are free may still be on its way
            left = self.transfers.get(load.order.transfer_id)
            assert left is None or left.outcome, "a load is not over"

    def _loadable(self) -> list[int]:
        """Return contents that a request may ask for; as a rule they are stored."""
        stored = [NUMBERS[key] for key in self.inner._entries]
        return sorted(set(stored if self.dice.random() < 0.9 else self.saved))

    def _to_be_loaded(self, block: int) -> None:
        self.loading.add(block)
        self.content[block] = None

    def _row_load_over(self, transfer: Transfer) -> bool:
        """Look at a load whose pass ended well; False if it is another one."""
        load = self.row_loading.pop(transfer.order.transfer_id, None)
        if load is None or not load.is_over:
            return False
        if transfer.outcome == OutcomeKind.COMMITTED.value and not load.is_late:
            self.seen["rows loaded"] += 1
            assert not load.is_unasked, "a load is well that a layer did not ask for"
            load.is_well = True
            self._judge(load)
            return True
        for block, number in zip(load.order.block_ids, load.numbers, strict=True):
            if self.content[block] == number:
                self._poison(block)  # the engine computes it itself
        return True

    def _never_begun(self, orders: Sequence[SpanOrder]) -> None:
        """Forget what nobody has heard of."""
        for order in orders:
            del self.transfers[order.transfer_id]


def _fence(make_fence: Callable[[], Fence | None]) -> Fence:
    """Return a fence; one that fails its orders where the device has failed."""
    return make_fence() or FailedFence(DeviceError("the device has failed"))
