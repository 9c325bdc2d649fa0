# SPDX-License-Identifier: Apache-2.0
"""The adapter under a small engine that does what it likes."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from tests.kit.consistency import validate
from tests.scheduler.host import Host
from tests.scheduler.model import DIGEST, STATE, Reach, make_layout
from ucm.config import SaveDecoded

HYBRID = ((4, None), (8, 10), (8, 5))
STATES = ((4, STATE),)
RECURRENT = ((4, None), (8, STATE), (8, STATE), (4, 10))
EACH, AT_END, NEVER = SaveDecoded.EACH_BLOCK, SaveDecoded.AT_END, SaveDecoded.NEVER
NAMES = [f"r{at}" for at in range(6)]


def _act(host: Host, dice: random.Random) -> None:
    """Do one random thing."""
    by_state = {
        state: [name for name, each in host.requests.items() if each.state == state]
        for state in ("waiting", "loading", "loaded", "running", "deferred")
    }
    what = dice.random()
    calm = host.lives % 200 < 100  # long enough for what waits to wait
    if what < 0.12:
        unused = [name for name in NAMES if name not in host.requests]
        if unused:
            # Lengths that end with a block are likely, so that whole prompts hit.
            length = dice.choice([dice.randint(3, 60), 8 * dice.randint(1, 2)])
            host.add(dice.choice(unused), dice.choice("abc"), length)
    elif what < 0.5:
        ready = by_state["waiting"] + by_state["loaded"]
        running = by_state["running"]
        host.step(
            admit=[name for name in ready if dice.random() < 0.7],
            preempt=[name for name in running if not calm and dice.random() < 0.1],
            chunk=dice.choice([1, 3, 8, 24]),
            overwrite=dice.choice([0, 0, 3]),
        )
    elif what < 0.78:
        host.work(
            dice.randrange(len(host.ranks)),
            dice.randrange(100),
            stored=dice.random() < 0.9,
        )
    elif what < 0.9:
        host.report(dice.randrange(len(host.ranks)))
    elif what < 0.97:
        alive = [name for state in by_state for name in by_state[state]]
        alive = [name for name in alive if name not in by_state["deferred"]]
        if alive:
            host.finish(dice.choice(alive))
    elif what < 0.975:
        host.fail_next_load = dice.choice(["corrupt", "deadline"])
    elif what < 0.98:
        _trouble(host, dice)


def _trouble(host: Host, dice: random.Random) -> None:
    """Let the weights be doubted, or time go by."""
    if dice.random() < 0.2:
        host.adapter.doubt(1)
        host.adapter.rekey(DIGEST)
    else:
        host.now += dice.choice([1, 20])
        host.adapter.tick(host.now)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "loads_in_step", "max_step_blocks", "decoded", "acts", "company"),
    [
        pytest.param(HYBRID, False, 1000, EACH, 10_000, 0, id="hybrid"),
        pytest.param(HYBRID, False, 1000, AT_END, 10_000, 0, id="hybrid-at-end"),
        pytest.param(HYBRID, False, 1000, EACH, 4000, 3, id="hybrid-company"),
        pytest.param(
            HYBRID, False, 1000, AT_END, 10_000, 3, id="hybrid-at-end-company"
        ),
        pytest.param(HYBRID, False, 2, AT_END, 4000, 3, id="hybrid-few-blocks-company"),
        pytest.param(HYBRID, False, 2, EACH, 4000, 0, id="hybrid-few-blocks-a-step"),
        pytest.param(HYBRID, False, 2, AT_END, 4000, 0, id="hybrid-at-end-few-blocks"),
        pytest.param(RECURRENT, False, 1000, EACH, 10_000, 0, id="recurrent"),
        pytest.param(RECURRENT, False, 2, AT_END, 4000, 0, id="recurrent-few-blocks"),
        pytest.param(
            RECURRENT, False, 1000, NEVER, 4000, 0, id="recurrent-prompts-only"
        ),
        pytest.param(STATES, False, 1000, EACH, 4000, 0, id="states-only"),
        pytest.param(((4, None),), True, 1000, AT_END, 4000, 0, id="loads-in-step"),
        pytest.param(((4, 9),), False, 1000, NEVER, 10_000, 0, id="windows-only"),
    ],
)
def test_random_acts_leave_nothing_behind(
    groups: tuple[tuple[int, Reach], ...],
    loads_in_step: bool,
    max_step_blocks: int,
    decoded: SaveDecoded,
    acts: int,
    company: int,
) -> None:
    """S1-15: After thousands of acts of every kind no container has anything left.

    No save read a block that was not its own any more, and every kind of act happened.
    """
    dice = random.Random(8)
    layout = make_layout(*groups)
    host = Host(
        layout,
        # A state takes few blocks, and what waits goes where blocks are short.
        num_blocks=12 if groups == STATES else 120 if decoded is AT_END else 60,
        loads_in_step=loads_in_step,
        max_step_blocks=max_step_blocks,
        decoded=decoded,
        tickets=3,
        company=company * layout.max_block_bytes,
    )
    for _ in range(acts):
        _act(host, dice)
    host.drain()
    assert 0 == host.adapter.totals.stray_reports
    kinds = {"load", "fenced", "preempted", "defer", "free_now", "corrupt", "deadline"}
    if max_step_blocks > 2 and len(groups) > 1:
        kinds |= {"recycled"}
        kinds |= {"full_hit"} if groups is HYBRID and not company else set()
        kinds |= {"shared", "lost"} if decoded is not NEVER else set()
    if loads_in_step:
        kinds |= {"ended_in_step", "left"}
    if decoded is AT_END and groups is HYBRID:
        kinds |= {"left", "not_due"}
    assert kinds <= set(host.seen), host.seen


class HostMachine(RuleBasedStateMachine):
    """A random engine, shrunk to the shortest run that breaks something."""

    groups: tuple[tuple[int, Reach], ...] = HYBRID
    decoded = EACH
    company = 0

    def __init__(self) -> None:
        super().__init__()
        layout = make_layout(*self.groups)
        self.host = Host(
            layout,
            num_blocks=40,
            decoded=self.decoded,
            tickets=2,
            company=self.company * layout.max_block_bytes,
        )

    def _in(self, *states: str) -> list[str]:
        return [
            name for name, each in self.host.requests.items() if each.state in states
        ]

    @precondition(lambda self: len(self.host.requests) < len(NAMES))
    @rule(family=st.sampled_from("ab"), num_tokens=st.integers(3, 40))
    def add(self, family: str, num_tokens: int) -> None:
        """Let a request come in."""
        name = next(name for name in NAMES if name not in self.host.requests)
        self.host.add(name, family, num_tokens)

    @rule(
        data=st.data(),
        chunk=st.sampled_from([1, 3, 8, 24]),
        overwrite=st.integers(0, 3),
    )
    def step(self, data: st.DataObject, chunk: int, overwrite: int) -> None:
        """Run one engine step."""
        admit = data.draw(st.sets(st.sampled_from(NAMES)), label="admit")
        preempt = data.draw(st.sets(st.sampled_from(NAMES)), label="preempt")
        self.host.step(
            admit=[each for each in self._in("waiting", "loaded") if each in admit],
            preempt=[each for each in self._in("running") if each in preempt],
            chunk=chunk,
            overwrite=overwrite,
        )

    @rule(rank=st.integers(0, 1), pick=st.integers(0, 9), stored=st.booleans())
    def work(self, rank: int, pick: int, stored: bool) -> None:
        """Let a worker do one thing."""
        self.host.work(rank, pick, stored=stored)

    @rule(rank=st.integers(0, 1))
    def report(self, rank: int) -> None:
        """Let a worker report."""
        self.host.report(rank)

    @rule(reason=st.sampled_from(["corrupt", "deadline"]))
    def fail(self, reason: str) -> None:
        """Plan the failure of the next load."""
        self.host.fail_next_load = reason

    @precondition(lambda self: self._in("waiting", "loading", "loaded", "running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """End or abort a request."""
        alive = self._in("waiting", "loading", "loaded", "running")
        self.host.finish(data.draw(st.sampled_from(alive)))

    @invariant()
    def holds(self) -> None:
        """Check the adapter's own invariants."""
        validate(self.host.adapter)

    def teardown(self) -> None:
        """Bring everything to an end; nothing may be left."""
        self.host.drain()


class TestHostMachine(HostMachine.TestCase):
    """S1-15, S1-16, S1-22: No order of acts breaks a fence, a deferral or a hold."""

    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class RecurrentMachine(HostMachine):
    """The same over groups with states, where decoded blocks wait."""

    groups = RECURRENT
    decoded = AT_END
    company = 3


class TestRecurrentMachine(RecurrentMachine.TestCase):
    """S1-15, S1-22: Nor where states are offered, nulled and written over."""

    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


pytest.mark.slow(TestHostMachine)
pytest.mark.slow(TestRecurrentMachine)
