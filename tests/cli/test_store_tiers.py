# SPDX-License-Identifier: Apache-2.0
"""``ucm store rm --tiers`` has the slab's agent take blocks from its tiers, and says what it could not."""

import threading

import pytest

from tests.agent.conftest import place
from tests.agent.test_client import WELCOME, Agent
from tests.agent.test_process import until
from tests.cli.store_kit import ask, tell
from tests.stores.slab_kit import open_slab
from ucm.agent import parting
from ucm.agent.protocol import (
    LOCK_NAME,
    LONGEST_S,
    PROTOCOL_VERSION,
    Done,
    Forget,
    Hello,
    Refused,
)
from ucm.cli.main import NOT_WELL
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys, save

__all__ = ["place"]

KEYS = make_keys(6)


@pytest.fixture
def path(place):
    """Return a slab with six blocks that had an agent once."""
    with open_slab(place.slab) as store:
        save(store, KEYS)
    (place.slab / LOCK_NAME).touch()
    return place.slab


def remove(path, says, code: int, *words: str):
    """Remove all blocks while an agent says something; return the answer, and what it heard."""
    agent, heard = Agent(path), []

    def serve() -> None:
        for messages in says:
            heard.append(agent.accept() if not heard else agent.hear())
            agent.say(*messages)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        chosen = ("--all", "--yes", "--tiers", *words)
        return ask("store", "rm", path, *chosen, code=code)["tiers"], heard
    finally:
        thread.join()
        agent.close()


class TestRm:
    @pytest.mark.slow
    def test_blocks_go_from_the_tiers_of_the_agent_too(self, place) -> None:
        """What is removed was fetched again from a tier; without --tiers it still is."""

        def spilled() -> int:
            slots = place.status()["slots"]
            return slots["4096"]["spilled"][0]["spilled"] if slots else 0

        def files() -> int:
            return sum(each.is_file() for each in place.tier.rglob("*"))

        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1"),
            place.client(),
        ):
            save(slab, KEYS)
            until(lambda: spilled() == len(KEYS))
            chosen = ("store", "rm", place.slab, "--key", KEYS[0].hex(), "--yes")
            assert ask(*chosen)["tiers"] is None
            assert len(KEYS) == files()
            answer = ask("store", "rm", place.slab, "--all", "--yes", "--tiers")
            assert 5 == answer["forgotten"] == answer["tiers"]["forgotten"]
            assert (0, []) == (answer["tiers"]["unasked"], answer["tiers"]["kept"])
            assert 1 == files()

    def test_tier_that_may_have_some_yet_is_named(self, path) -> None:
        """Something is left undone then; the agent is asked behind the slab, with a deadline."""
        says = [[WELCOME], [Done(1, 4, Reason.KEPT, b"\1")]]
        told, heard = remove(path, says, NOT_WELL)
        assert (4, ["memory"], 0) == (told["forgotten"], told["kept"], told["unasked"])
        hello, forget = heard
        assert isinstance(hello, Hello)
        assert PROTOCOL_VERSION == hello.version
        assert isinstance(forget, Forget)
        assert (set(KEYS), LONGEST_S) == (set(forget.keys), forget.deadline_s)

    @pytest.mark.parametrize(
        ("says", "problem"),
        [
            ([[Refused("another release")]], "another release"),
            ([[WELCOME], [Done(1, 0, Reason.QUEUE_TICKETS)]], "queue_tickets"),
            ([[Done(1, 0, Reason.NONE)]], "no welcome"),
            ([[WELCOME], [Done(1, 0, Reason.KEPT, b"\7")]], "last of 1"),
            ([[], []], "in time"),
        ],
    )
    def test_agent_that_takes_nothing_from_tiers_is_told_of(
        self, path, monkeypatch, says, problem
    ) -> None:
        """The slab's blocks are gone; how many tiers may have, and why, is said, and ends in time."""
        monkeypatch.setattr(parting, "MOST_KEYS", 2)  # it is asked once all the same
        if not says[0]:
            monkeypatch.setattr(parting, "_ANSWER_S", 0.01)
            says = says[:1]
        told, _ = remove(path, says, NOT_WELL)
        assert (0, len(KEYS)) == (told["forgotten"], told["unasked"])
        assert problem in told["problem"]

    def test_where_no_agent_runs_tiers_may_have_them(self, path) -> None:
        """It is said plainly, with what to do; a dry run asks nobody and is well."""
        chosen = ("store", "rm", path, "--all")
        assert "--tiers takes them from there" in tell(*chosen, "--dry-run")[1]
        dry = tell(*chosen, "--dry-run", "--tiers")
        assert 0 == dry[0]
        assert "tiers are asked to forget them, too" in dry[1]
        code, said, _ = tell(*chosen, "--yes", "--tiers")
        assert NOT_WELL == code
        assert "6 forgotten" in said
        assert (
            "tiers may have 6 of them yet: no agent has answered (none is there)"
            in (" ".join(said.split()))
        )
