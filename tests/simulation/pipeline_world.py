# SPDX-License-Identifier: Apache-2.0
"""
A runtime under a small engine on the CPU, simulated from one seed.

The engine overwrites blocks whenever it may, saves and loads spans, and knows at each
moment what every block of its pool must hold. The device copies at once, or late on a
thread per direction.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tests.kit.unreliable import LateDevice
from tests.rig import keys_in
from tests.simulation.contents import (
    CONTENTS,
    LAYERS,
    LAYOUT,
    NEVER,
    NUM_BLOCKS,
    NUM_ROWS,
    NUMBERS,
    PAGE_BYTES,
    POISON,
    check_bytes,
)
from tests.simulation.row_acts import RowActs
from tests.simulation.runtime_world import Transfer
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.scheduler.messages import TransferKind
from ucm.testing.faults import FaultDevice

_NUM_KEYS = 40


class PipelineWorld(RowActs):
    """
    One simulated run.

    Args:
        seed: Decides everything, also which troubles there are.
        steps: Acts of the engine.
    """

    def _make_device(self) -> Device:
        self.memory = torch.full(
            (NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), POISON, dtype=torch.uint8
        )
        self.pages = self.memory.numpy()
        self.expected: list[npt.NDArray[np.uint8] | None] = [NEVER] * NUM_BLOCKS
        cpu = CPUDevice(NUM_BLOCKS)
        device: Device
        if self.dice.random() < 0.5:
            device = LateDevice(cpu, self.faults, self.simulation)
        else:
            device = FaultDevice(cpu, self.faults)
        device.register(LAYOUT, dict(zip(LAYERS, self.memory, strict=True)))
        return device

    def _acts(self) -> Sequence[Callable[[], None]]:
        whole = (self._save, self._save, self._load, self._load)
        return *whole, *self._row_acts(), self._rest, self._look

    def _save(self) -> None:
        blocks = self._blocks_to_write()
        if blocks:
            first = self.dice.randrange(_NUM_KEYS - len(blocks))
            numbers = range(first, first + len(blocks))
            for block, number in zip(blocks, numbers, strict=True):
                self._write(block, CONTENTS[number])
            self._ask(Direction.SAVE, blocks, numbers)

    def _load(self) -> None:
        blocks = self._blocks_to_write()
        if blocks:
            first = self.dice.randrange(_NUM_KEYS - len(blocks))
            for block in blocks:
                self.expected[block] = None
            self._ask(Direction.LOAD, blocks, range(first, first + len(blocks)))

    def _ask(self, direction: Direction, blocks: list[int], numbers: range) -> None:
        self._submit(direction, blocks, numbers, self.device.lease(None))

    def _look(self) -> None:
        for block, expected in enumerate(self.expected):
            if expected is not None:
                check_bytes(
                    expected,
                    self.pages[:, block],
                    f"block {block} changed behind the engine's back",
                )
        if self.dice.random() < 0.2:
            self.check_stored()

    def _blocks_to_write(self) -> list[int]:
        """Choose blocks that no load fills, and fence those that saves may read."""
        return self._take([at for at, x in enumerate(self.expected) if x is not None])

    def _write(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Compute a block as an engine does: row after row, and others run between."""
        for row in range(NUM_ROWS):
            self.pages[row, block] = content[row]
            self.simulation.pause()
        self.expected[block] = content

    def _blocks_over(self, transfer: Transfer) -> None:
        if transfer.order.kind is TransferKind.SAVE:
            return
        if self._row_load_over(transfer):
            return
        order = transfer.order
        for block, key in zip(order.block_ids, keys_in(order), strict=True):
            if transfer.outcome == OutcomeKind.COMMITTED.value:
                check_bytes(
                    CONTENTS[NUMBERS[key]],
                    self.pages[:, block],
                    f"block {block} was loaded with something else",
                )
            self.expected[block] = self.pages[:, block].copy()
