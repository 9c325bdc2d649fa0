# SPDX-License-Identifier: Apache-2.0
"""
A runtime on a simulated accelerator under an adversarial engine, from one seed.

The engine computes late: what it launches runs whenever the hardware gets there. It
proves its writes with the current stream or with events, some of which prove nothing; it
records events again and drops them, reuses blocks the moment it may, and reads what was
loaded. Each block it computes has content of its own, so that a copy that came too early
or too late, or read a block that was given back, stores or shows wrong bytes.
"""

import functools
import gc
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from tests.kit.accelerator_ops import Copy
from tests.kit.accelerator_streams import CUDA, NPU, Bias, SimHardware
from tests.rig import keys_in
from tests.simulation.accelerator_parts import Parts, WatchedDevice
from tests.simulation.accelerator_proofs import PROOFS, Prover
from tests.simulation.accelerator_rows import RowKernels
from tests.simulation.contents import (
    BLOCK_BYTES,
    CONTENTS,
    LAYERS,
    LAYOUT,
    NEVER,
    NUM_BLOCKS,
    NUM_CONTENTS,
    NUM_ROWS,
    NUMBERS,
    PAGE_BYTES,
    POISON,
    WrongBytesError,
    check_bytes,
)
from tests.simulation.runtime_world import LINE_MODULES, Transfer
from ucm.devices import accelerator, digests, events, poller
from ucm.devices.abc import Device
from ucm.devices.driver import Direction as CopyDirection
from ucm.devices.selection import EventSelector
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.scheduler.messages import TransferKind

_LINES = (
    *LINE_MODULES,
    *(str(m.__file__) for m in (accelerator, digests, events, poller)),
)
_FAILING = ("record", "make_event", "wait", "copy", "is_done", "synchronize")
_LATE = (0, 8, 40, 100)
_MOST_AHEAD = 100
_POISONED = -1


class AcceleratorWorld(RowKernels):
    """
    One simulated run.

    Args:
        seed: Decides everything, also which troubles there are.
        steps: Acts of the engine.
        parts: Of the device.
    """

    def __init__(self, seed: int, steps: int, parts: Parts | None = None) -> None:
        super().__init__(seed, steps, _LINES)
        self.has_digests = seed % 2 == 1
        self.parts = parts or Parts()
        self.next_number = 0
        self.saved: list[int] = []
        self.wrong: list[WrongBytesError] = []
        # By block: what it holds once all kernels ran, if known; and how many have not.
        self.content: list[int | None] = [_POISONED] * NUM_BLOCKS
        self.busy = Counter[int]()
        self.loading: set[int] = set()
        self.lost: set[int] = set()
        self.has_failed = False

    # How it is built.

    def _make_device(self) -> Device:
        dice, simulation = self.dice, self.simulation
        self.semantics = dice.choice([CUDA, NPU])
        self.hardware = SimHardware(
            dice,
            semantics=self.semantics,
            bias=dice.choice([None, None, *Bias]),
            pause=simulation.pause,
        )
        self.pins = dice.choice(["all", "all", "staging", "none"])
        self.more_queue["staging_bytes"] = BLOCK_BYTES * dice.choice([1, 4, 64])
        self.driver = self.parts.driver(
            *(self.hardware, simulation, self.faults),
            pins=self.pins,
            digests=self.has_digests,
        )
        self.compute = self.hardware.make_stream(0, "compute")
        self.accelerator = self.parts.device(
            self.driver, NUM_BLOCKS, simulation.threads
        )
        memory = self.driver.allocate(NUM_ROWS * NUM_BLOCKS * PAGE_BYTES)
        memory.fill_(POISON)
        parts = 2 if self.semantics.has_tuple_caches else 1
        whole = memory.view(NUM_ROWS, parts, NUM_BLOCKS, PAGE_BYTES // parts)
        self.pages = whole.numpy()
        caches = [tuple(row) if parts > 1 else row[0] for row in whole]
        self.accelerator.register(LAYOUT, dict(zip(LAYERS, caches, strict=True)))
        return WatchedDevice(self.accelerator, self.faults, self.driver)

    def _build(self) -> None:
        super()._build()
        dice = self.dice
        selector = EventSelector(
            self.device,
            self.counters,
            enable_event_sync=dice.random() < 0.9,
            enable_reshape_cache_event_sync=dice.random() < 0.9,
        )
        self.prover = Prover(selector, self.hardware, self.compute, dice)
        self.parts.tamper(self.runtime)

    def _acts(self) -> Sequence[Callable[[], None]]:
        if self.dice.random() < 0.4:
            verb = self.dice.choice(_FAILING)
            stays = self.dice.random() < 0.5
            self.driver.fail_at(verb, self.dice.randrange(1, 120), stays=stays)
        often = (self._compute, self._compute, self._compute, self._load, self._load)
        rows = (self._forward, self._forward)
        return (
            *often,
            *rows,
            self._save_again,
            self._abort,
            self._tick,
            self._rest,
            self._look,
        )

    def _live(self) -> None:
        with self.driver.on_stream(self.compute):
            super()._live()

    # What the engine does.

    def _compute(self) -> None:
        """Run a step: write blocks late, and save them behind a proof."""
        self.prover.begin_step()
        blocks = self._blocks_to_write()
        numbers = [self._new_number() for _ in blocks]
        self._work()
        for block, number in zip(blocks, numbers, strict=True):
            self._write(block, number)
        self._save(blocks, numbers)

    def _save_again(self) -> None:
        """Save what is there already, such as a prefix that requests share."""
        self.prover.begin_step()
        there = [
            block
            for block, number in enumerate(self.content)
            if number is not None and number >= 0 and block not in self.loading
        ]
        blocks = self.dice.sample(there, min(len(there), 2))
        numbers = [self.content[block] or 0 for block in blocks]
        if len(set(numbers)) == len(numbers):
            self._save(blocks, numbers)

    def _save(self, blocks: list[int], numbers: list[int]) -> None:
        fence = self.prover.after_write() if blocks else None
        if fence is not None:
            self.saved += numbers
            self._submit(Direction.SAVE, blocks, numbers, fence)

    def _load(self) -> None:
        """Load blocks behind whatever kernels still do to their places."""
        stored = [NUMBERS[key] for key in self.inner._entries]
        known = stored if self.dice.random() < 0.9 else self.saved
        blocks = self._blocks_to_write()[: len(set(known))]
        fence = self.prover.before_load() if blocks else None
        if fence is not None:
            numbers = self.dice.sample(sorted(set(known)), len(blocks))
            self.loading.update(blocks)
            for block in blocks:
                self.content[block] = None
            self._submit(Direction.LOAD, blocks, numbers, fence)

    def _abort(self) -> None:
        """Give blocks up that nobody holds; somebody else writes them at once."""
        free = self._free_blocks()
        for block in self.dice.sample(free, min(len(free), 3)):
            if not self.readers_of([block]):
                self.seen["aborted"] += 1
                self._poison(block)

    def _tick(self) -> None:
        """Let the hardware get on."""
        if not self.driver.stands_still:
            self.hardware.run(self.dice.choice([1, 4, 32]))

    def _look(self) -> None:
        for block, number in enumerate(self.content):
            if number is not None and not self.busy[block]:
                self._check_block(block, number, "changed behind the engine's back")
        if self.dice.random() < 0.2:
            self.check_stored()
        if not self.runtime.failure:
            # A load that is staged has copies of its own for each part.
            most = self.queue["window"] * (1 if self.pins == "all" else NUM_BLOCKS)
            assert most >= self.copies_under_way(CopyDirection.TO_DEVICE)
            assert self.queue["window"] >= self.copies_under_way(CopyDirection.TO_HOST)

    def copies_under_way(self, direction: CopyDirection) -> int:
        """Return how many batches the device has not done."""
        return sum(
            isinstance(op, Copy) and op.direction is direction
            for op in self.hardware.pending(0)
        )

    def _new_number(self) -> int:
        self.next_number = (self.next_number + 1) % NUM_CONTENTS
        return self.next_number

    def _free_blocks(self) -> list[int]:
        return [at for at in range(NUM_BLOCKS) if at not in self.loading | self.lost]

    def _blocks_to_write(self) -> list[int]:
        return self._take(self._free_blocks())

    # What it launches.

    def _work(self) -> None:
        """Launch kernels that hold up what comes behind them."""
        for _ in range(self.dice.choice(_LATE)):
            if len(self.compute.ops) > _MOST_AHEAD:
                break
            self.hardware.launch(self.compute, lambda: None)

    def _write(self, block: int, number: int) -> None:
        """Let each row be written some time."""
        self.content[block] = number
        for row in range(NUM_ROWS):
            self._launch(block, functools.partial(self._put, block, row, number))

    def _poison(self, block: int) -> None:
        """Overwrite a block that is ours no more: at once where no kernel is left."""
        self.content[block] = _POISONED
        put = [
            functools.partial(self._put, block, row, _POISONED)
            for row in range(NUM_ROWS)
        ]
        if self.busy[block] or self.dice.random() < 0.5:
            for each in put:
                self._launch(block, each)
        else:
            for each in put:
                each()

    def _read(self, block: int, number: int) -> None:
        """Let a kernel read a block some time."""
        self._launch(block, functools.partial(self._compare, block, number))

    def _launch(self, block: int, kernel: Callable[[], None]) -> None:
        def run() -> None:
            self.busy[block] -= 1
            kernel()

        self.busy[block] += 1
        self.hardware.launch(self.compute, run)
        self.simulation.pause()

    def _put(self, block: int, row: int, number: int) -> None:
        content = _content(number)[row]
        self.pages[row, :, block] = content.reshape(self.pages.shape[1], -1)

    def _compare(self, block: int, number: int) -> None:
        try:
            self._check_block(block, number, "is read by a kernel")
        except WrongBytesError as exc:
            self.wrong.append(exc)
        self.seen["read by a kernel"] += 1

    def _check_block(self, block: int, number: int, what: str) -> None:
        found = self.pages[:, :, block].reshape(NUM_ROWS, PAGE_BYTES)
        check_bytes(_content(number), found, f"block {block} {what}")

    # What it hears, and what must hold.

    def _poll(self) -> None:
        super()._poll()
        if self.wrong:
            raise self.wrong[0]
        self.has_failed |= self.accelerator._failure is not None
        assert not self.hardware.violations, self.hardware.violations

    def _note(self, notice: Notice) -> None:
        super()._note(notice)
        ticket = notice.ticket
        blocks = {int(block) for block in ticket.span.block_ids}
        if notice.kind is NoticeKind.QUARANTINED:
            self.lost |= blocks
        elif notice.kind is NoticeKind.RELEASED and ticket.direction is Direction.SAVE:
            self._reuse(blocks)

    def _blocks_over(self, transfer: Transfer) -> None:
        order = transfer.order
        if transfer.order.kind is TransferKind.SAVE:
            return
        if self._row_load_over(transfer):
            return
        self.loading.difference_update(order.block_ids)
        for block, key in zip(order.block_ids, keys_in(order), strict=True):
            if transfer.outcome == OutcomeKind.COMMITTED.value:
                number = NUMBERS[key]
                self._check_block(block, number, "was loaded with something else")
                self.content[block] = number
                self._read(block, number)

    def _reuse(self, blocks: Collection[int]) -> None:
        """Let somebody else write blocks that no ticket holds any more."""
        for block in set(self._free_blocks()).intersection(blocks):
            if not self.readers_of([block]) and self.dice.random() < 0.7:
                self._poison(block)

    def _may_stand_still(self) -> bool:
        return self._has_hung() or self.accelerator._failure is not None

    def _threads_left(self) -> list[str]:
        """Return threads that should have ended; a device left open keeps its poller."""
        left = super()._threads_left()
        return left if self.driver.is_closed else [n for n in left if "events" not in n]

    def _check_end(self) -> None:
        super()._check_end()
        hardware, driver = self.hardware, self.driver
        hardware.drain()
        self._poll()
        assert not driver.foreign_uses
        self.seen["device failed"] += self.has_failed
        kinds = [f"semantics {self.semantics.name}", f"pins {self.pins}"]
        self.seen.update([*kinds, f"closed {driver.is_closed}"])
        for proof in PROOFS:
            count = self.counters.total(f"ucm_dump_event_{proof}_total")
            self.seen[f"proof {proof}"] += int(count)
        if not self.runtime.failure:
            assert not self.transfers, "blocks are held"
            assert not self.inner._writing, "slots are leased"
        if driver.is_closed:
            self._check_closed()

    def _check_closed(self) -> None:
        """Nothing of ours is left: no event, loan or pin; what has failed keeps loans."""
        kept = [e for e in events._ABANDONED if e._hardware is self.hardware]
        assert not kept or self.accelerator._failure is not None
        while kept:
            events._ABANDONED.remove(kept.pop())
        self.prover.kept.clear()
        gc.collect()
        left = (self.accelerator.events.num_own, self.accelerator.events.borrowed)
        assert (0, {}) == left
        assert not self.hardware.live_events
        if not self.has_failed:
            assert not self.driver.pins


def _content(number: int) -> npt.NDArray[np.uint8]:
    return NEVER if number == _POISONED else CONTENTS[number]
