# SPDX-License-Identifier: Apache-2.0
"""
A runtime under a small engine, simulated from one seed.

The engine overwrites blocks whenever it may, saves and loads spans, and knows at each
moment what every block of its pool must hold. Content is a function of the key, so that
any byte that came too early, too late or from somewhere else is seen.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from tests.rig import keys_of
from tests.simulation.traced import traced
from ucm import mailbox, runtime
from ucm.blocks import (
    BlockId,
    BlockSpan,
    GroupId,
    PackedKey,
    RequestId,
    RowId,
    TransferId,
)
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.metrics import Counters
from ucm.pipeline import lane, pipeline, save, tickets, workers
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.runtime import Order, Runtime
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultDevice
from ucm.testing.lockstep import QueueBounds, TraceChecker
from ucm.testing.simulation import Simulation
from ucm.testing.unreliable import LateDevice, Odds, SeededFaults, UnreliableStore
from ucm.tracing import TICKET_SETTLED

NUM_BLOCKS = 24
NUM_KEYS = 40
NUM_ROWS = 2
PAGE_BYTES = 64
BLOCK_BYTES = NUM_ROWS * PAGE_BYTES
LINE_MODULES = [
    module.__file__
    for module in (lane, mailbox, pipeline, runtime, save, tickets, workers)
]
LAYERS = tuple(f"layer.{row}" for row in range(NUM_ROWS))
LAYOUT = KVLayout(
    groups=(
        GroupLayout(
            group_id=GroupId(0),
            kind=GroupKind.FULL,
            block_tokens=16,
            rows=tuple(
                RowLayout(row_id=RowId(row), page_bytes=PAGE_BYTES, layer_names=(name,))
                for row, name in enumerate(LAYERS)
            ),
        ),
    ),
    hash_block_tokens=16,
    engine_tag="test",
)
_COPY_HANGS = {"hang gather", "hang scatter", "hang stream"}
_KEYS = keys_of(*range(NUM_KEYS))
_NUMBERS = {key: number for number, key in enumerate(_KEYS)}
_CONTENTS = np.stack(
    [
        np.stack(
            [
                (np.arange(PAGE_BYTES) * 7 + number * 31 + row * 101) % 251
                for row in range(NUM_ROWS)
            ]
        )
        for number in range(NUM_KEYS)
    ]
).astype(np.uint8)
_NEVER = np.full((NUM_ROWS, PAGE_BYTES), 0xDB, dtype=np.uint8)


@attrs.define
class Transfer:
    """What the engine knows of a ticket."""

    order: Order
    released: int = 0
    quarantined: int = 0
    outcome: str = ""


class CheckedStore(MemoryStore):
    """A memory store that is looked at before it forgets everything."""

    def __init__(self, world: "PipelineWorld", capacity_blocks: int) -> None:
        super().__init__(capacity_blocks, BLOCK_BYTES)
        self._world = world

    def close(self) -> None:
        """Check that no lease is left and what is stored."""
        assert not self._writing
        self._world.check_stored()
        super().close()


class PipelineWorld:
    """
    One simulated run.

    Args:
        seed: Decides everything, also which troubles there are.
        steps: Acts of the engine.
    """

    def __init__(self, seed: int, steps: int) -> None:
        dice = np.random.default_rng(seed)
        lines = LINE_MODULES if dice.random() < 0.3 else ()
        self.simulation = Simulation(
            seed, line_modules=lines, line_chance=dice.choice([0.01, 0.1])
        )
        self.dice = self.simulation.dice
        self.steps = steps
        self.seen: Counter[str] = Counter()
        self.transfers: dict[int, Transfer] = {}
        self.flipped: set[PackedKey] = set()
        self.next_id = 1
        self.settled_after: dict[str, float] = {"save": 0.0, "load": 0.0}

    def run(self) -> None:
        """Run to the end; whatever does not hold is an AssertionError."""
        self.simulation.run(self._main)

    def _build(self) -> None:
        dice, simulation = self.dice, self.simulation
        self.odds = Odds(
            fail=dice.choice([0, 0, 0.01, 0.1]),
            hang=dice.choice([0, 0, 0.003, 0.03, 0.2]),
            die=dice.choice([0, 0, 0, 0.0005, 0.005]),
            damage=dice.choice([0, 0, 0.1]),
            hangs_at=dice.choice(["", "gather", "scatter", "commit", "read"]),
        )
        self.faults = SeededFaults(simulation, self.odds)
        self.memory = torch.full(
            (NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), 0xDB, dtype=torch.uint8
        )
        self.pages = self.memory.numpy()
        self.expected: list[np.ndarray | None] = [_NEVER] * NUM_BLOCKS
        self.inner = CheckedStore(self, dice.choice([6, 16, 64]))
        store = UnreliableStore(self.inner, self.faults, self._flip, simulation)
        cpu = CPUDevice(NUM_BLOCKS)
        if dice.random() < 0.5:
            device = LateDevice(cpu, self.faults, simulation)
        else:
            device = FaultDevice(cpu, self.faults)
        device.register(LAYOUT, dict(zip(LAYERS, self.memory, strict=True)))
        self.device = device
        self.counters = Counters()
        queue = {
            "tickets": dice.choice([1, 3, 100]),
            "nbytes": dice.choice([BLOCK_BYTES, 8 * BLOCK_BYTES, 1 << 20]),
            "window": dice.choice([1, 2, 4]),
        }
        timeout = {"shutdown": dice.choice([0.0, 1.0, 100.0])}
        self.checker = TraceChecker(
            bounds=QueueBounds(tickets=queue["tickets"], nbytes=queue["nbytes"])
        )
        self.runtime = Runtime(
            store,
            device,
            config=UCMConfig.from_mapping({"queue": queue, "timeout": timeout}),
            counters=self.counters,
            log=traced(simulation, self.checker, "worker-0", self._note_time),
            threads=simulation.threads,
        )
        self.runtime.start()

    def _flip(self, key: PackedKey) -> None:
        entry = self.inner._entries[key]
        self.inner._pool[entry.slot, self.dice.randrange(BLOCK_BYTES)] ^= 1
        self.flipped.add(key)

    def _main(self) -> None:
        self._build()
        acts = (self._save, self._save, self._load, self._load, self._rest, self._look)
        for _ in range(self.steps):
            self.dice.choice(acts)()
            self._poll()
        if self.dice.random() < 0.5:
            self.faults.odds = Odds()
            self.seen["drained"] += self.runtime.flush(1000.0)
        self.check_stored()
        start = self.simulation.now
        self.runtime.close()
        if not self._has_hung():
            assert self.simulation.now - start < 2.0, "the end takes long"
        self.simulation.sleep(200.0)  # threads that did not end in time still tell
        self._poll()
        self._check_end()

    def _note_time(self, event: Mapping[str, Any]) -> None:
        if event["event"] == TICKET_SETTLED:
            after = self.settled_after
            direction = event["direction"]
            after[direction] = max(after[direction], event["total_s"])

    # What the engine does.

    def _save(self) -> None:
        blocks = self._blocks_to_write()
        if blocks:
            first = self.dice.randrange(NUM_KEYS - len(blocks))
            numbers = range(first, first + len(blocks))
            for block, number in zip(blocks, numbers, strict=True):
                self._write(block, _CONTENTS[number])
            self._submit(Direction.SAVE, blocks, numbers)

    def _load(self) -> None:
        blocks = self._blocks_to_write()
        if blocks:
            first = self.dice.randrange(NUM_KEYS - len(blocks))
            for block in blocks:
                self.expected[block] = None
            self._submit(Direction.LOAD, blocks, range(first, first + len(blocks)))

    def _rest(self) -> None:
        self.simulation.sleep(self.dice.choice([0.0, 1e-5, 1e-3, 0.1, 10.0]))
        if self.dice.random() < 0.3:
            start = self.simulation.now
            self.runtime.wait_for_notice(self.dice.choice([0.002, 1.0, 1000.0]))
            limit = 200.0 if self._has_hung() else 20.0
            assert self.simulation.now - start < limit, "a notice is overdue"

    def _look(self) -> None:
        for block, expected in enumerate(self.expected):
            if expected is not None:
                assert np.array_equal(expected, self.pages[:, block]), (
                    f"block {block} changed behind the engine's back"
                )
        if self.dice.random() < 0.2:
            self.check_stored()

    def _blocks_to_write(self) -> list[int]:
        """Choose blocks that no load fills, and fence those that saves may read."""
        size = self.dice.choice([1, 1, 2, 4])
        free = [at for at, expected in enumerate(self.expected) if expected is not None]
        if len(free) < size:
            return []
        blocks = self.dice.sample(free, size)
        readers = [
            transfer_id
            for transfer_id, each in self.transfers.items()
            if each.order.direction is Direction.SAVE
            and not each.released
            and set(blocks).intersection(each.order.span.block_ids)
        ]
        if any(self.transfers[each].quarantined for each in readers):
            return []  # the engine never gets them back
        self.runtime.fence(readers)
        self.seen["fenced"] += bool(readers)
        return blocks

    def _write(self, block: int, content: np.ndarray) -> None:
        """Compute a block as an engine does: row after row, and others run between."""
        for row in range(NUM_ROWS):
            self.pages[row, block] = content[row]
            self.simulation.pause()
        self.expected[block] = content

    def _submit(self, direction: Direction, blocks: list[int], numbers: range) -> None:
        order = Order(
            transfer_id=TransferId(self.next_id),
            direction=direction,
            request_id=RequestId(self.dice.choice("abcd")),
            generation=self.dice.randrange(2),
            span=BlockSpan(
                GroupId(0),
                tuple(map(BlockId, blocks)),
                tuple(_KEYS[number] for number in numbers),
            ),
            row_ids=tuple(map(RowId, range(NUM_ROWS))),
            block_bytes=BLOCK_BYTES,
        )
        self.transfers[self.next_id] = Transfer(order)
        self.next_id += 1
        self.runtime.submit([order], self.device.lease(None))

    # What it hears.

    def _poll(self) -> None:
        for notice in self.runtime.poll():
            self._note(notice)
        over = [
            transfer_id
            for transfer_id, each in self.transfers.items()
            if each.outcome and (each.released or each.quarantined)
        ]
        for transfer_id in over:
            self._end(self.transfers.pop(transfer_id))

    def _note(self, notice: Notice) -> None:
        transfer = self.transfers[notice.ticket.transfer_id]
        if notice.kind is NoticeKind.RELEASED:
            transfer.released += 1
            assert 1 == transfer.released
        elif notice.kind is NoticeKind.QUARANTINED:
            transfer.quarantined += 1
            assert 1 == transfer.quarantined
        else:
            assert notice.outcome is not None
            assert not transfer.outcome
            transfer.outcome = notice.outcome.kind.value
            self.seen[f"{transfer.order.direction.value} {transfer.outcome}"] += 1
            self.seen[f"reason {notice.outcome.reason}"] += 1

    def _end(self, transfer: Transfer) -> None:
        """Nothing of ours touches the blocks any more; look at what was loaded."""
        if transfer.order.direction is Direction.SAVE:
            return
        span = transfer.order.span
        for block, key in zip(span.block_ids, span.keys, strict=True):
            if transfer.outcome == OutcomeKind.COMMITTED.value:
                content = _CONTENTS[_NUMBERS[key]]
                assert np.array_equal(content, self.pages[:, block]), (
                    f"block {block} was loaded with something else"
                )
            self.expected[block] = self.pages[:, block].copy()

    def check_stored(self) -> None:
        """Whatever can be found is what belongs under its key, or rotted afterwards."""
        for key, entry in self.inner._entries.items():
            if key not in self.flipped:
                row = self.inner._pool[entry.slot].reshape(NUM_ROWS, PAGE_BYTES)
                assert np.array_equal(_CONTENTS[_NUMBERS[key]], row), (
                    f"key {_NUMBERS[key]} is stored with something else"
                )

    def _has_hung(self) -> bool:
        return any(name.startswith("hang") for name in self.faults.done)

    def _check_end(self) -> None:
        """Every ticket ended once, in the log as well, and the sums are right."""
        self.checker.finish()
        open_loads = {
            transfer_id: each
            for transfer_id, each in self.transfers.items()
            if not each.outcome
        }
        assert {} == open_loads
        assert 0 == self.runtime.num_open
        for direction in ("save", "load"):
            offered = self.counters.total(
                "ucm_offered_blocks_total", direction=direction
            )
            settled = self.counters.total(
                "ucm_settled_blocks_total", direction=direction
            )
            assert offered == settled
        left = [name for name in self.simulation.names() if name.startswith("ucm")]
        assert not left, "threads are left"
        copies_hung = _COPY_HANGS.intersection(self.faults.done)
        stuck = 60.0 if copies_hung else 0.0
        for direction, limit in (("save", 30.0), ("load", 10.0)):
            latest = limit + stuck + 1.0 if self._has_hung() else 2.0
            assert self.settled_after[direction] < latest, "a ticket ended late"
        self.seen["failed"] += bool(self.runtime.failure)
        self.seen.update(self.faults.done)
