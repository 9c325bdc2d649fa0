# SPDX-License-Identifier: Apache-2.0
"""The stages themselves, also for tickets whose rows come as several items."""

import asyncio
import contextlib

import attrs
import numpy as np
import pytest
import torch

from tests.pipeline.kit import AsyncDevice, HandFence, make_ticket
from tests.rig import (
    BLOCK_BYTES,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    NUM_ROWS,
    PAGE_BYTES,
    keys_of,
)
from ucm.blocks import RowId
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import BlockNotFoundError, DeviceTimeoutError, StoreFullError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.load import Fetch, Publish, Scatter, ScatterWait
from ucm.pipeline.save import (
    Commit,
    Gather,
    GatherWait,
    Transfer,
)
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore
from ucm.uses import Uses

ROWS = tuple(RowId(row) for row in range(NUM_ROWS))


@pytest.fixture
def memory():
    """Return an engine's memory with a byte of its own in every page."""
    pages = torch.arange(NUM_ROWS * NUM_BLOCKS, dtype=torch.uint8)
    return pages.reshape(NUM_ROWS, NUM_BLOCKS, 1).repeat(1, 1, PAGE_BYTES)


@pytest.fixture
def store():
    """Return a store of a few blocks."""
    with MemoryStore(8, BLOCK_BYTES) as store:
        yield store


@pytest.fixture(params=[CPUDevice, AsyncDevice])
def device(request, memory):
    """Return the engine's device; an asynchronous one opens fences at once."""
    make = request.param
    device = make(NUM_BLOCKS)
    if make is AsyncDevice:
        device._on_fence = HandFence.open
    device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
    with contextlib.closing(device):
        yield device


def copied(ticket, fence):
    """Return an item of all rows behind their copy."""
    item = Item(ticket, ROWS, DoneFence())
    item.copy, item.is_whole = fence, True
    return item


def save_rows(store, device, ticket, *parts):
    """Run the save stages for each part of the rows; return each end."""
    ends = []
    for rows in parts:
        gathered = Gather(store, device).run(Item(ticket, rows, DoneFence()))
        gathered = asyncio.run(GatherWait().run(gathered))
        ends.append(Commit().run(Transfer().run(gathered)).outcome)
    return ends


def load_rows(store, device, ticket, *parts):
    """Run the load stages for each part of the rows; return each end."""
    ends = []
    for rows in parts:
        scattered = Scatter(store, device).run(
            Fetch(store).run(Item(ticket, rows, DoneFence()))
        )
        waited = asyncio.run(ScatterWait().run(scattered))
        ends.append(Publish(store, device).run(waited).outcome)
    return ends


def uses_at(*moments):
    """Return uses of nobody's blocks."""
    return Uses(np.array(moments), np.zeros(len(moments), dtype=np.uint32))


class TestRows:
    def test_block_is_stored_with_its_last_row_only(self, store, device):
        """X-01, S4-07: rows that come one by one are stored together, and the source
        is released with the last of them."""
        ticket = make_ticket(1, num_blocks=2, row_ids=ROWS)
        assert [None] == save_rows(store, device, ticket, ROWS[:1])
        assert not ticket.guard.is_released
        assert 0 == store.match(ticket.span.keys)
        middle, last = save_rows(store, device, ticket, ROWS[1:2], ROWS[2:])
        assert middle is None
        assert (OutcomeKind.COMMITTED, 2) == (last.kind, last.committed)
        assert ticket.guard.is_released
        assert 2 == store.match(ticket.span.keys)

    def test_rows_that_come_one_by_one_load_as_one_block(self, store, device, memory):
        """Each row is copied by its own item; the load ends with the last."""
        save_rows(store, device, make_ticket(1, num_blocks=2, row_ids=ROWS), ROWS)
        saved = memory[:, 1:3].clone()
        memory[:, 1:3] = 0
        ticket = make_ticket(1, Direction.LOAD, num_blocks=2, row_ids=ROWS)
        first, last = load_rows(store, device, ticket, ROWS[2:], ROWS[:2])
        assert first is None
        assert (OutcomeKind.COMMITTED, 2) == (last.kind, last.committed)
        assert ticket.guard.is_released
        assert torch.equal(saved, memory[:, 1:3])

    def test_block_that_is_stored_already_counts_as_used(self, store, device):
        """R-29: whoever saves a block again uses it, also where another one has stored
        it meanwhile."""
        for number, moment in ((1, 10), (2, 20), (1, 30)):
            ticket = make_ticket(number, row_ids=ROWS)
            ticket.span = attrs.evolve(ticket.span, uses=uses_at(moment))
            save_rows(store, device, ticket, ROWS)
        others = keys_of(*range(10, 17))
        with store.reserve(others, BLOCK_BYTES, uses_at(*range(46, 39, -1))) as lease:
            lease.seal(0, 7)
            lease.commit()
        assert [True, False] == store.contains(keys_of(1, 2))

    def test_rows_under_way_together_are_whole_with_the_last_copy(self, memory):
        """X-01: a row whose copy is over seals, commits and releases nothing while the
        copy of another one is still under way."""
        fences = []
        device = AsyncDevice(NUM_BLOCKS)
        device._on_fence = fences.append
        device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
        with contextlib.closing(device), MemoryStore(8, BLOCK_BYTES) as store:
            ticket = make_ticket(1, num_blocks=2, row_ids=ROWS)
            gather, wait = Gather(store, device), GatherWait()
            first = gather.run(Item(ticket, ROWS[:1], DoneFence()))
            last = gather.run(Item(ticket, ROWS[1:], DoneFence()))
            fences[0].open()
            first = asyncio.run(wait.run(first))
            assert Commit().run(Transfer().run(first)).outcome is None
            assert ticket.guard.is_copying
            fences[1].open()
            last = asyncio.run(wait.run(last))
            assert ticket.guard.is_released
            assert 2 == Commit().run(Transfer().run(last)).outcome.committed
            ticket.unwind()

    def test_torn_ticket_is_neither_stored_nor_loaded(self, store, device):
        """Bytes that the engine overwrote under the copy count in no direction."""
        save_rows(store, device, make_ticket(4, row_ids=ROWS), ROWS)
        for number, direction, run in (
            (1, Direction.SAVE, save_rows),
            (4, Direction.LOAD, load_rows),
        ):
            ticket = make_ticket(number, direction, row_ids=ROWS)
            assert ticket.guard.begin()
            assert not ticket.guard.revoke("recycled")
            with pytest.raises(TicketOverError, match="recycled"):
                run(store, device, ticket, ROWS)
        assert 0 == store.match(make_ticket(1).span.keys)

    def test_revoked_ticket_is_not_begun(self, store, device, memory):
        """Blocks that were taken back are neither read nor written."""
        save_rows(store, device, make_ticket(4, row_ids=ROWS), ROWS)
        memory[:] = 0
        for direction, run in (
            (Direction.SAVE, save_rows),
            (Direction.LOAD, load_rows),
        ):
            ticket = make_ticket(4, direction, row_ids=ROWS)
            assert ticket.guard.revoke("recycled")
            with pytest.raises(TicketOverError, match="recycled"):
                run(store, device, ticket, ROWS)
        assert 0 == int(memory.max())

    def test_recycled_slot_fails_the_load(self, store, device):
        """A block that was forgotten while it was copied is not published."""
        save_rows(store, device, make_ticket(1, row_ids=ROWS), ROWS)
        ticket = make_ticket(1, Direction.LOAD, row_ids=ROWS)
        load_rows(store, device, ticket, ROWS[:1])
        store.forget(ticket.span.keys)
        with pytest.raises(BlockNotFoundError):
            load_rows(store, device, ticket, ROWS[1:])


class TestOrder:
    def test_slots_are_not_sealed_before_their_copy(self):
        """A fence that has not passed stops a save, whatever led there."""
        with pytest.raises(DeviceTimeoutError):
            Transfer().run(copied(make_ticket(), HandFence()))

    def test_blocks_are_not_published_before_their_copy(self):
        """A fence that has not passed stops a load, whatever led there."""
        publish = Publish(MemoryStore(1, BLOCK_BYTES), AsyncDevice(1))
        with pytest.raises(DeviceTimeoutError):
            publish.run(copied(make_ticket(), HandFence()))

    def test_ticket_without_slots_is_not_committed(self):
        """A ticket that never leased slots has nothing to seal."""
        ticket = make_ticket(row_ids=ROWS)
        with pytest.raises(StoreFullError, match="transfer 1"):
            Transfer().run(copied(ticket, DoneFence()))

    def test_late_ticket_is_not_committed(self, store, device):
        """What was sealed after its deadline does not become visible."""
        ticket = make_ticket(row_ids=ROWS)
        gathered = Gather(store, device).run(Item(ticket, ROWS, DoneFence()))
        sealed = Transfer().run(asyncio.run(GatherWait().run(gathered)))
        assert sealed.is_whole
        ticket.deadline = 0.0
        with pytest.raises(TicketOverError, match="deadline"):
            Commit().run(sealed)
        ticket.unwind()
        assert 0 == store.match(ticket.span.keys)
        assert 0 == store.stats().reserved_blocks
