# SPDX-License-Identifier: Apache-2.0
"""Our claims on the engine's blocks."""

from collections.abc import Iterator

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kit.consistency import validate_holds
from ucm.errors import LedgerError
from ucm.scheduler.holds import HoldLedger

LIFE = ("r", 1)


@pytest.fixture
def ledger() -> Iterator[HoldLedger]:
    """Return a ledger that must be consistent when the test ends."""
    ledger = HoldLedger()
    yield ledger
    validate_holds(ledger)


class TestHoldLedger:
    def test_hold_ends_when_the_last_rank_releases(self, ledger: HoldLedger) -> None:
        """Blocks are held until every rank has released them, and not longer."""
        ledger.take(1, [LIFE], (4, 5), (0, 1))
        ledger.release(1, 1)
        assert {1} == ledger.readers_of([5, 9])
        ledger.release(1, 0)
        assert set() == ledger.readers_of([4, 5])
        assert (0, 0) == (ledger.num_holds, ledger.held_blocks)

    def test_blocks_read_by_two_tickets_count_once(self, ledger: HoldLedger) -> None:
        """A block that two tickets read has both as readers and is one held block."""
        ledger.take(1, [LIFE], (4, 5), (0,))
        ledger.take(2, [("s", 9)], (5, 6), (0,))
        assert {1, 2} == ledger.readers_of([5])
        assert 3 == ledger.held_blocks
        ledger.release(1, 0)
        assert {2} == ledger.readers_of([4, 5])

    def test_block_stays_held_by_the_first_of_two_tickets(
        self, ledger: HoldLedger
    ) -> None:
        """Whoever of two readers ends first, the block is held for the other."""
        ledger.take(1, [LIFE], (4, 5), (0,))
        ledger.take(2, [("s", 9)], (5, 6), (0,))
        ledger.release(2, 0)
        assert ({1}, 2) == (ledger.readers_of([5, 6]), ledger.held_blocks)

    def test_holds_of_tells_lives_apart(self, ledger: HoldLedger) -> None:
        """S1-16: The holds of a former life of a request are not its present ones."""
        ledger.take(1, [("r", 1)], (4,), (0,))
        ledger.take(2, [("r", 2)], (5,), (0,))
        assert 1 == ledger.holds_of(("r", 2))
        assert 0 == ledger.holds_of(("r", 3))

    def test_release_twice_is_a_bug(self, ledger: HoldLedger) -> None:
        """A rank that releases twice raises while others hold, and afterwards."""
        ledger.take(1, [LIFE], (4,), (0, 1))
        ledger.release(1, 0)
        with pytest.raises(LedgerError, match="rank 0 does not hold"):
            ledger.release(1, 0)
        ledger.release(1, 1)
        assert not ledger.is_held(1)
        with pytest.raises(LedgerError, match="no such hold"):
            ledger.release(1, 1)

    def test_quarantined_part_is_not_waited_for(self, ledger: HoldLedger) -> None:
        """R-16: a hold ends when its ranks have released it or given it up, and counts
        as quarantined once."""
        ledger.take(1, [LIFE], (4,), (0, 1, 2))
        ledger.quarantine(1, 0)
        assert {1} == ledger.readers_of([4])
        with pytest.raises(LedgerError, match="rank 0 does not hold"):
            ledger.release(1, 0)
        ledger.quarantine(1, 2)
        assert ledger.is_held(1)
        ledger.release(1, 1)
        assert set() == ledger.readers_of([4])
        assert (0, 1) == (ledger.num_holds, ledger.quarantined)

    def test_hold_that_every_rank_gave_up_has_ended(self, ledger: HoldLedger) -> None:
        """R-16: nothing is left of a hold whose only rank gave it up."""
        ledger.take(1, [LIFE], (4,), (0,))
        ledger.quarantine(1, 0)
        assert 0 == ledger.holds_of(LIFE)
        assert (0, 1) == (ledger.held_blocks, ledger.quarantined)

    def test_take_twice_or_nothing_is_a_bug(self, ledger: HoldLedger) -> None:
        """A ticket holds once, and at least one block for at least one rank."""
        ledger.take(1, [LIFE], (4,), (0,))
        with pytest.raises(LedgerError, match="holds its blocks already"):
            ledger.take(1, [LIFE], (5,), (0,))
        with pytest.raises(LedgerError, match="would hold nothing"):
            ledger.take(2, [LIFE], (), (0,))
        with pytest.raises(LedgerError, match="would hold nothing"):
            ledger.take(2, [LIFE], (5,), ())

    def test_validate_sees_a_broken_ledger(self) -> None:
        """An index that lost a ticket and a hold of nobody are both found."""
        ledger = HoldLedger()
        ledger.take(1, [LIFE], (4,), (0,))
        ledger._by_block.clear()
        with pytest.raises(LedgerError, match="indexes"):
            validate_holds(ledger)
        ledger = HoldLedger()
        ledger.take(1, [LIFE], (4,), (0,))
        ledger._holds[1].ranks_left.clear()
        with pytest.raises(LedgerError, match="impossible"):
            validate_holds(ledger)


@attrs.define
class Hold:
    """A hold in the model: parts by rank."""

    lives: frozenset[tuple[str, int]]
    block_ids: tuple[int, ...]
    parts: dict[int, str]


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a dict of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HoldLedger()
        self.model: dict[int, Hold] = {}
        self.next_id = 0
        self.quarantined = 0

    @rule(
        lives=st.frozensets(
            st.tuples(st.sampled_from("rs"), st.integers(1, 2)), min_size=1
        ),
        block_ids=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
        ranks=st.integers(1, 3),
    )
    def take(
        self, lives: frozenset[tuple[str, int]], block_ids: list[int], ranks: int
    ) -> None:
        """Hold some blocks."""
        self.next_id += 1
        self.ledger.take(
            self.next_id, lives, block_ids, range(ranks), nbytes=7, now=self.next_id
        )
        parts = dict.fromkeys(range(ranks), "held")
        self.model[self.next_id] = Hold(lives, tuple(block_ids), parts)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rank=st.integers(0, 2), quarantine=st.booleans())
    def end(self, data: st.DataObject, rank: int, quarantine: bool) -> None:
        """Release or quarantine a part, which works once only."""
        transfer_id = data.draw(st.sampled_from(sorted(self.model)))
        parts = self.model[transfer_id].parts
        verb = self.ledger.quarantine if quarantine else self.ledger.release
        if parts.get(rank) != "held":
            with pytest.raises(LedgerError):
                verb(transfer_id, rank)
            return
        verb(transfer_id, rank)
        parts[rank] = "quarantined" if quarantine else "released"
        ended = "held" not in parts.values()
        assert self.ledger.is_held(transfer_id) is not ended
        self.quarantined += (
            quarantine and list(parts.values()).count("quarantined") == 1
        )
        if ended:
            del self.model[transfer_id]

    @invariant()
    def agrees(self) -> None:
        """Compare every question that can be asked."""
        validate_holds(self.ledger)
        holds = self.model.values()
        for block_id in range(1, 10):
            readers = {i for i, one in self.model.items() if block_id in one.block_ids}
            assert readers == self.ledger.readers_of([block_id])
        for life in {life for one in holds for life in one.lives}:
            ids = {i for i, one in self.model.items() if life in one.lives}
            assert len(ids) == self.ledger.holds_of(life)
        assert 7 * len(self.model) == self.ledger.held_nbytes
        assert len(self.model) == self.ledger.num_holds
        assert min(self.model, default=None) == self.ledger.oldest
        blocks = frozenset[int]().union(*(one.block_ids for one in holds))
        assert len(blocks) == self.ledger.held_blocks
        assert self.quarantined == self.ledger.quarantined


@pytest.mark.slow
class TestLedgerMachine(LedgerMachine.TestCase):
    """The ledger answers like a dict of holds after any calls."""

    settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
