# SPDX-License-Identifier: Apache-2.0
"""Loads whose layers ran without waiting: too late, whatever became of them."""

from tests.pipeline.kit import make_ticket
from tests.rig import KEYSPACE_DIGEST, LAYERS, LAYOUT, NUM_ROWS, order, running
from ucm.blocks import Owner, RowId
from ucm.devices.events import DoneFence
from ucm.layerwise import RowLoads, SpanGroup
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.progress import Progress
from ucm.reasons import Reason
from ucm.scheduler.messages import SpanOrder, TransferKind

SAVE, LOAD = Direction.SAVE, Direction.LOAD
ROWS = tuple(RowId(row) for row in range(NUM_ROWS))
TIMEOUT = 60.0


def load(number):
    """Return the order of one load of two blocks."""
    return order(number, LOAD, range(2), range(20, 22))


def group_of(*orders):
    """Return orders whose rows go together."""
    return SpanGroup(KEYSPACE_DIGEST, orders, frozenset(ROWS))


class Landed:
    """A runtime whose loads are over at once; *bad* ones have failed."""

    def __init__(self, bad):
        self.bad = bad

    def submit(self, digest, orders, fence, row_ids):
        """Take the first rows."""

    def add_rows(self, transfer_ids, row_ids, fence):
        """Take more rows."""

    def abandon(self, transfer_ids, reason):
        """Come too late."""

    def wait_rows(self, transfer_ids, row_ids):
        """Return those that have failed."""
        return sorted(self.bad.intersection(transfer_ids))

    def wait_loaded(self, transfer_ids):
        """Return those that have failed."""
        return sorted(self.bad.intersection(transfer_ids))


class TestUnasked:
    def stored(self, rig):
        """Store what is loaded below."""
        rig.submit(order(1, SAVE, range(4), range(1, 5)))
        assert OutcomeKind.COMMITTED is rig.settle()[1].kind

    def landed(self, rig, loads, *orders):
        """Begin a step and wait for its first layer, with every row on its way."""
        loads.begin([group_of(*orders)], DoneFence())
        loads.wait_for(LAYERS[0])
        assert rig.runtime.flush(TIMEOUT)

    def test_load_is_late_also_when_all_of_it_has_landed(self):
        """S4-13: nobody knows whether a row was there when its layer ran without
        waiting; that it is there at the end of the step does not count."""
        with running() as rig:
            self.stored(rig)
            loads = RowLoads(rig.runtime, LAYOUT, NUM_ROWS)
            self.landed(rig, loads, load(2))
            loads.wait_for(LAYERS[2])
            assert [2] == loads.finish()
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind

    def test_load_of_a_single_row_that_no_layer_asked_for_is_late(self):
        """S4-13: a load whose one row went at once, in a step without hooks, is told to
        be late whether or not it is over."""
        with running() as rig:
            self.stored(rig)
            loads = RowLoads(rig.runtime, LAYOUT, 0)
            one = order(2, LOAD, range(2), range(20, 22))
            loads.begin(
                [SpanGroup(KEYSPACE_DIGEST, (one,), frozenset(ROWS[:1]))], DoneFence()
            )
            rig.runtime.add_rows([2], ROWS[1:], DoneFence())
            assert rig.runtime.flush(TIMEOUT)
            assert [2] == loads.finish()

    def test_load_that_every_layer_waited_for_is_not_late(self):
        """A load that was waited for row by row is what its ticket says."""
        with running() as rig:
            self.stored(rig)
            loads = RowLoads(rig.runtime, LAYOUT, NUM_ROWS)
            self.landed(rig, loads, load(2))
            for layer in LAYERS[1:]:
                loads.wait_for(layer)
            assert [] == loads.finish()
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind

    def test_load_beside_a_failed_one_is_late_if_a_layer_did_not_wait(self):
        """Another load of the request that has failed does not excuse one that landed
        behind its layer; layers that ask behind the failure have asked."""
        for layers, late in ((LAYERS, []), (LAYERS[1:], [2])):
            loads = RowLoads(Landed(bad={3}), LAYOUT, NUM_ROWS)
            loads.begin([group_of(load(2), load(3))], DoneFence())
            for layer in layers:
                loads.wait_for(layer)
            assert late == loads.finish()

    def test_late_load_is_told_as_failed_with_its_blocks(self):
        """S4-13: the engine hears of a late load as of one that failed, by its blocks,
        and no block of the store is blamed."""
        progress = Progress()
        ticket = make_ticket(5, LOAD, num_blocks=2, row_ids=ROWS)
        ticket.guard.revoke("")
        asked = SpanOrder(
            transfer_id=5,
            kind=TransferKind.LOAD,
            owners=(Owner("r", generation=1, num_blocks=2),),
            group_id=0,
            block_ids=(5, 6),
            hashes=bytes(64),
        )
        progress.begin_loads([asked])
        progress.came_late([5, 99])
        assert 1 == progress.counts()["late"]
        well = Outcome(OutcomeKind.COMMITTED, committed=2)
        progress.note([Notice(NoticeKind.SETTLED, ticket, well)])
        (load_over,) = progress.take_loaded().values()
        assert (True, {5, 6}) == (load_over.failed, load_over.bad_blocks)
        (failure,) = progress.outbox.failures
        assert (Reason.UNASKED, b"") == (failure.reason, failure.bad_hash)
        assert 0 == progress.counts()["late"]
