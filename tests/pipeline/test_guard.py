# SPDX-License-Identifier: Apache-2.0
"""Who may touch a ticket's blocks: a guard against the table of its states."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.pipeline.kit import TIMEOUT
from ucm.pipeline.guard import BlockGuard


class GuardMachine(RuleBasedStateMachine):
    """A guard beside the table of its states."""

    def __init__(self):
        super().__init__()
        self.releases = 0
        self.guard = BlockGuard(self.count, num_blocks=3)
        self.lost, self.lost_as = set(), ""
        self.state, self.revoked, self.torn = "free", "", ""
        self.copies = 0

    def count(self):
        """Note a release."""
        self.releases += 1

    def release(self, reason):
        """Move the model to its end."""
        self.state, self.revoked = "released", reason

    def take_back(self, reason):
        """Move the model as far as blocks can be taken back."""
        if self.state == "free":
            self.release(reason)
        elif self.state != "released":
            self.torn = self.torn or reason

    @rule()
    def begin(self):
        """Copies of several rows may be under way, none after blocks were taken back."""
        may_begin = self.state in ("free", "copying") and not self.torn
        if may_begin:
            self.state = "copying"
            self.copies += 1
        assert may_begin == self.guard.begin()

    @rule(last=st.booleans())
    def end(self, last):
        """The end of the last copy releases, except blocks in quarantine; the end of
        any other does so only if the blocks were asked for meanwhile."""
        if self.state in ("free", "copying"):
            self.copies = max(0, self.copies - 1)
            if not self.copies and (last or self.torn):
                self.release("")
            elif not self.copies:
                self.state = "free"
        self.guard.end(last=last)

    @rule(reason=st.sampled_from(["deadline", "recycled"]))
    def revoke(self, reason):
        """Blocks that nobody copies come back at once, others are marked torn."""
        self.take_back(reason)
        assert (self.state == "released") == self.guard.revoke(reason)

    @rule(
        reason=st.sampled_from(["deadline", "recycled"]),
        positions=st.sets(st.integers(0, 2), min_size=1),
    )
    def lose(self, reason, positions):
        """Blocks are lost until the copies are over; who loses all is taken back."""
        untouched = self.state in ("free", "released")
        if self.state != "released":
            self.lost |= positions
            self.lost_as = self.lost_as or reason
            if len(self.lost) == 3:
                self.take_back(reason)
        assert untouched == self.guard.revoke(reason, positions)

    @rule()
    def quarantine(self):
        """Only a copy under way can be given up."""
        copying = self.state == "copying"
        if copying:
            self.state, self.torn = "quarantined", self.torn or "stuck"
        assert copying == self.guard.quarantine()

    @invariant()
    def agrees(self):
        """Guard and model agree; the release was told exactly once, or not yet."""
        guard = self.guard
        released = self.state == "released"
        assert released == guard.is_released == guard.wait_released(0)
        assert (self.state == "copying") == guard.is_copying
        assert (self.revoked, self.torn) == (guard.revoked, guard.torn)
        assert (self.lost, self.lost_as) == (guard.lost, guard.lost_as)
        assert int(released) == self.releases


@pytest.mark.slow
class TestGuardMachine(GuardMachine.TestCase):
    """S1-26: a guard answers like its table of states after any calls."""

    settings = settings(max_examples=100, stateful_step_count=12, deadline=None)


class TestBlockGuard:
    @pytest.mark.slow
    def test_copy_and_revoke_on_two_threads_never_overlap(self):
        """Over many races the blocks are never copied and released at once, and the
        release is told once."""
        rounds, clashes, told = 2000, [], []
        meet = threading.Barrier(2, timeout=TIMEOUT)
        guards = [BlockGuard(lambda at=at: told.append(at)) for at in range(rounds)]

        def copy():
            for guard in guards:
                meet.wait()
                if guard.begin():
                    if guard.is_released or not guard.is_copying:
                        clashes.append("released under a copy")
                    guard.end()

        def revoke():
            for guard in guards:
                meet.wait()
                if guard.revoke("recycled") and guard.is_copying:
                    clashes.append("copied after the release")

        threads = [threading.Thread(target=one) for one in (copy, revoke)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert [] == clashes
        assert list(range(rounds)) == sorted(told)
        assert all(guard.is_released for guard in guards)

    def test_no_copy_begins_once_the_blocks_were_asked_for(self):
        """The copy of one row is waited for, that of the next does not begin, and the
        blocks are free when the first is over, though rows are missing."""
        guard = BlockGuard(lambda: None)
        assert guard.begin()
        assert not guard.revoke("recycled")
        assert not guard.begin()
        guard.end(last=False)
        assert guard.is_released

    def test_row_behind_a_copy_that_was_given_up_knows_why_it_is_not_copied(self):
        """It may end the ticket before whoever gave up does: not without a reason."""
        guard = BlockGuard(lambda: None)
        assert guard.begin()
        assert guard.quarantine()
        assert not guard.begin()
        assert "stuck" == guard.taken_back

    def test_block_is_not_lost_behind_the_end_of_the_copy(self):
        """A copy that ends while somebody gives up waiting for it has lost nothing."""
        guard = BlockGuard(lambda: None, num_blocks=2)
        assert guard.begin()
        guard.end()
        assert guard.revoke("recycled", [1])
        assert (frozenset(), "") == (guard.lost, guard.lost_as)

    def test_waiter_is_woken_by_the_release(self):
        """Whoever waits for the blocks goes on as soon as the copy has ended."""
        guard = BlockGuard(lambda: None)
        guard.begin()
        waiting, seen = threading.Event(), []

        def wait():
            waiting.set()
            seen.append(guard.wait_released(TIMEOUT))

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(TIMEOUT)
        guard.end()
        thread.join(TIMEOUT)
        assert [True] == seen
