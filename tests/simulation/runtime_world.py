# SPDX-License-Identifier: Apache-2.0
"""
A runtime over a memory store under a small engine, simulated from one seed.

What the worlds of the pipeline have in common: the blocks and their content, which is a
function of the key, so that any byte that came too early, too late or from somewhere
else is seen; the troubles; what the engine hears; and what must hold at the end. Each
world brings its own device and its own engine.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from msgspec.structs import replace

from tests.kit.lockstep import QueueBounds, TraceChecker
from tests.kit.simulation import Simulation
from tests.kit.unreliable import Odds, SeededFaults, UnreliableStore
from tests.rig import KEYSPACE_DIGEST, keys_in
from tests.rig import order as span_order
from tests.simulation.contents import (
    BLOCK_BYTES,
    CONTENTS,
    LAYOUT,
    NUM_ROWS,
    NUMBERS,
    PAGE_BYTES,
    WrongBytesError,
    check_bytes,
)
from tests.simulation.traced import traced
from ucm import intake, layerwise, loop, mailbox, runtime
from ucm.blocks import Owner, PackedKey
from ucm.config import UCMConfig
from ucm.devices.abc import Device, Fence
from ucm.metrics import Counters
from ucm.pipeline import (
    dump_queue,
    guard,
    lane,
    load,
    pipeline,
    runner,
    save,
    tickets,
    workers,
)
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.stores.memory import MemoryStore
from ucm.tracing import TICKET_SETTLED

LINE_MODULES = tuple(
    str(module.__file__)
    for module in (
        *(dump_queue, guard, intake, lane, layerwise, load, loop, mailbox),
        *(pipeline, runner, runtime, save, tickets, workers),
    )
)
_COPY_HANGS = {"hang gather", "hang scatter", "hang stream", "hang device"}


@attrs.define
class Transfer:
    """
    What the engine knows of a ticket.

    Args:
        order: What was asked for.
        released: How often its blocks were given back.
        quarantined: How often they were given up.
        outcome: The last word, if it was told.
        rows_left: Rows that were not submitted.
    """

    order: SpanOrder
    released: int = 0
    quarantined: int = 0
    outcome: str = ""
    rows_left: set[int] = attrs.Factory(set)


class CheckedStore(MemoryStore):
    """
    A memory store that is looked at before it forgets everything.

    Args:
        check: Looks at what is stored.
        capacity_blocks: Of the store.
    """

    def __init__(self, check: Callable[[], None], capacity_blocks: int) -> None:
        super().__init__(capacity_blocks, BLOCK_BYTES)
        self._check = check

    def close(self) -> None:
        """Check that no lease is left and what is stored."""
        assert not self._writing, "slots are leased"
        self._check()
        super().close()


class RuntimeWorld(ABC):
    """
    One simulated run.

    Args:
        seed: Decides everything, also which troubles there are.
        steps: Acts of the engine.
        line_modules: Modules between whose lines threads may be preempted.
    """

    def __init__(
        self, seed: int, steps: int, line_modules: Collection[str] = LINE_MODULES
    ) -> None:
        dice = np.random.default_rng(seed)
        lines = line_modules if dice.random() < 0.3 else ()
        self.simulation = Simulation(
            seed, line_modules=lines, line_chance=dice.choice([0.01, 0.1])
        )
        self.dice = self.simulation.dice
        self.steps = steps
        self.seen: Counter[str] = Counter()
        self.transfers: dict[int, Transfer] = {}
        self.flipped: set[PackedKey] = set()
        self.more_queue: dict[str, int] = {}
        self.next_id = 1
        self.settled_after: dict[str, float] = {"save": 0.0, "load": 0.0}
        self.by_rows: set[int] = set()

    def run(self) -> None:
        """Run to the end; whatever does not hold is an AssertionError."""
        self.simulation.run(self._main)

    @abstractmethod
    def _make_device(self) -> Device:
        """Return a registered device."""

    @abstractmethod
    def _acts(self) -> Sequence[Callable[[], None]]:
        """Return what the engine does; one act is drawn at a time."""

    @abstractmethod
    def _blocks_over(self, transfer: Transfer) -> None:
        """Note that nothing of ours touches the blocks any more, and look at them."""

    def _calm(self) -> None:
        """End all troubles."""
        self.faults.odds = Odds()

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
        self.inner = CheckedStore(self.check_stored, dice.choice([6, 16, 64]))
        store = UnreliableStore(self.inner, self.faults, self._flip, simulation)
        self.device = self._make_device()
        self.counters = Counters()
        self.queue = {
            "tickets": dice.choice([1, 3, 100]),
            "nbytes": dice.choice([BLOCK_BYTES, 8 * BLOCK_BYTES, 1 << 20]),
            "window": dice.choice([1, 2, 4]),
        }
        timeout = {"shutdown": dice.choice([0.0, 1.0, 100.0])}
        queue = self.queue | self.more_queue
        settings = {"queue": queue, "timeout": timeout, "threads": {"verify": 3}}
        self.checker = TraceChecker(
            bounds=QueueBounds(
                tickets=self.queue["tickets"], nbytes=self.queue["nbytes"]
            )
        )
        self.runtime = Runtime(
            store,
            self.device,
            layout=LAYOUT,
            config=UCMConfig.from_mapping(settings),
            counters=self.counters,
            log=traced(simulation, self.checker, "worker-0", self._note_time),
            threads=simulation.threads,
        )

    def _flip(self, key: PackedKey) -> None:
        entry = self.inner._entries[key]
        self.inner._pool[entry.slot, self.dice.randrange(BLOCK_BYTES)] ^= 1
        self.flipped.add(key)

    def _main(self) -> None:
        self._build()
        self.runtime.start()
        self._live()

    def _live(self) -> None:
        acts = self._acts()
        for _ in range(self.steps):
            self.dice.choice(acts)()
            self._poll()
        self._stop()
        if self.dice.random() < 0.5:
            self._calm()
            self.seen["drained"] += self.runtime.flush(1000.0)
        self.check_stored()
        start = self.simulation.now
        self.runtime.close()
        if not self._has_hung():
            assert self.simulation.now - start < 2.0, "the end takes long"
        self.simulation.sleep(200.0)  # threads that did not end in time still tell
        self._poll()
        self._check_end()

    @abstractmethod
    def _stop(self) -> None:
        """Let the engine take its last step."""

    def _note_time(self, event: Mapping[str, Any]) -> None:
        by_rows = event.get("transfer_id") in self.by_rows  # these wait for the engine
        if event["event"] == TICKET_SETTLED and not by_rows:
            after = self.settled_after
            direction = event["direction"]
            after[direction] = max(after[direction], event["total_s"])

    # What the engine does.

    def _rest(self) -> None:
        self.simulation.sleep(self.dice.choice([0.0, 1e-5, 1e-3, 0.1, 10.0]))
        if self.transfers and self.dice.random() < 0.3:
            start = self.simulation.now
            self.runtime.wait_for_notice(self.dice.choice([0.002, 1.0, 1000.0]))
            limit = 200.0 if self._has_hung() else 40.0
            assert self.simulation.now - start < limit, "a notice is overdue"

    def _take(self, free: Sequence[int]) -> list[int]:
        """Choose some of the blocks *free* of loads, and fence those that saves may read."""
        size = self.dice.choice([1, 1, 2, 4])
        if len(free) < size:
            return []
        blocks = self.dice.sample(free, size)
        readers = self.readers_of(blocks)
        if any(self.transfers[each].quarantined for each in readers):
            return []  # the engine never gets them back
        lost = {each: self._positions(each, blocks) for each in readers}
        for each in readers:  # what comes by rows is not written any further
            if each in self.by_rows or self.dice.random() < 0.5:
                del lost[each]
        self.runtime.fence(readers, lost=lost)
        self.seen["fenced"] += bool(readers)
        self.seen["fenced by position"] += bool(lost)
        return blocks

    def _positions(self, transfer_id: int, blocks: Collection[int]) -> list[int]:
        """Return which blocks of a save are among *blocks*."""
        own = self.transfers[transfer_id].order.block_ids
        return [at for at, block in enumerate(own) if block in blocks]

    def readers_of(self, blocks: Collection[int]) -> list[int]:
        """Return the saves that may still read some of *blocks*."""
        return [
            transfer_id
            for transfer_id, each in self.transfers.items()
            if each.order.kind is TransferKind.SAVE
            and not each.released
            and set(blocks).intersection(each.order.block_ids)
        ]

    def _submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        numbers: Sequence[int],
        fence: Fence,
    ) -> None:
        order = self._order(direction, blocks, numbers)
        self.runtime.submit(KEYSPACE_DIGEST, [order], fence)

    def _order(
        self,
        direction: Direction,
        blocks: Sequence[int],
        numbers: Sequence[int],
        generation: int = 0,
    ) -> SpanOrder:
        """
        Return an order, to be submitted, that is waited for from now on.

        Args:
            direction: Save or load.
            blocks: Of the engine.
            numbers: Of their content.
            generation: Which life of the request, whose alone it is then; drawn if not
                given.
        """
        request = self.dice.choice("abcd")
        may_share = direction is Direction.SAVE and not generation and len(blocks) > 1
        generation = generation or self.dice.randrange(2)
        order = span_order(
            self.next_id, direction, numbers, blocks, request, generation
        )
        if may_share and self.dice.random() < 0.5:
            rest = Owner(self.dice.choice("efg"), 0, len(blocks) - 1)
            owners = (Owner(request, generation, 1), rest)
            order = replace(order, owners=owners)
        self.transfers[self.next_id] = Transfer(order)
        self.next_id += 1
        return order

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
            self._blocks_over(self.transfers.pop(transfer_id))

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
            self.seen[f"{transfer.order.kind.name.lower()} {transfer.outcome}"] += 1
            self.seen[f"reason {notice.outcome.reason}"] += 1
            self._check_rows(transfer, notice.outcome)
            if notice.outcome.reason == "corrupt" and not self.flipped.intersection(
                keys_in(transfer.order)
            ):
                raise WrongBytesError("a block is corrupt though no byte of it rotted")

    def _check_rows(self, transfer: Transfer, outcome: Outcome) -> None:
        """No end is good before the last row came."""
        if not transfer.rows_left:
            return
        if outcome.kind in (OutcomeKind.COMMITTED, OutcomeKind.SKIPPED):
            raise WrongBytesError(f"{outcome} without rows {transfer.rows_left}")
        self.seen[f"rows missing: {outcome.reason}"] += 1

    def check_stored(self) -> None:
        """Whatever can be found is what belongs under its key, or rotted afterwards."""
        for key, entry in self.inner._entries.items():
            if key not in self.flipped:
                row = self.inner._pool[entry.slot].reshape(NUM_ROWS, PAGE_BYTES)
                number = NUMBERS[key]
                check_bytes(CONTENTS[number], row, f"key {number} is stored wrongly")

    def _has_hung(self) -> bool:
        return any(name.startswith("hang") for name in self.faults.done)

    def _threads_left(self) -> list[str]:
        return [name for name in self.simulation.names() if name.startswith("ucm")]

    def _check_end(self) -> None:
        """Every ticket ended once, in the log as well, and the sums are right."""
        self.checker.finish()
        assert all(each.outcome for each in self.transfers.values())
        for each in self.runtime._open.values():  # what never ends is not served beside
            assert self.runtime.failure
            assert each.is_given_up or each.guard.is_clearing
        assert not self.seen["reason over"], "an end without a reason"
        if not self.runtime.failure:
            pipeline = self.runtime._pipeline
            assert ([], 0) == (pipeline.queue.unfinished(), len(pipeline._lanes))
        for direction in ("save", "load"):
            offered = self.counters.total(
                "ucm_offered_parts_total", direction=direction
            )
            settled = self.counters.total(
                "ucm_settled_parts_total", direction=direction
            )
            assert offered == settled
        assert [] == self._threads_left()
        copies_hung = _COPY_HANGS.intersection(self.faults.done)
        stuck = 60.0 if copies_hung else 0.0
        for direction, limit in (("save", 30.0), ("load", 10.0)):
            latest = limit + stuck + 1.0 if self._has_hung() else 2.0
            assert self.settled_after[direction] < latest, "a ticket ended late"
        self.seen["failed"] += bool(self.runtime.failure)
        self.seen.update(self.faults.done)
