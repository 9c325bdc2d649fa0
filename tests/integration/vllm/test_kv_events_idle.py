# SPDX-License-Identifier: Apache-2.0
"""For how long an engine that has nothing to compute takes steps for its events."""

import pytest

from tests.integration.vllm.test_kv_events import World, request, stored
from ucm.integration.vllm.kv_events import NoTeller


@pytest.fixture
def world() -> World:
    """Return one that follows its key space."""
    return World()


class TestDue:
    def test_what_is_told_behind_the_last_request_is_published(self, world) -> None:
        """R-57: an engine that has nothing to compute takes a step for each batch, and is
        awake for a moment behind the last one; then it sleeps."""
        world.teller.begun(request(), [])
        assert world.teller.are_due()
        world.now += 0.2
        world.tell(stored(1), begins=True, listed=True)
        world.now += 10.0
        assert world.teller.are_due()
        assert 1 == len(world.teller.take())
        assert world.teller.are_due()
        world.now += 0.2
        assert world.teller.are_due()
        world.now += 0.1
        assert not world.teller.are_due()

    def test_engine_that_has_nothing_to_tell_sleeps(self, world) -> None:
        """A quarter of a second behind a request, however often it is asked, and again
        behind the next one."""
        world.tell(stored(1), begins=True, listed=True)
        world.teller.take()
        for _ in range(2):
            world.teller.begun(request(), [])
            world.now += 5.0
            assert world.teller.are_due()
            world.now += 0.2
            assert world.teller.are_due()
            world.now += 0.1
            assert not world.teller.are_due()
            world.now += 9.0
            assert not world.teller.are_due()

    def test_engine_that_starts_waits_for_what_is_there(self, world) -> None:
        """What was stored before it came is published before its first request, if an agent
        is there within seconds."""
        assert world.teller.are_due()
        world.now += 4.9
        assert world.teller.are_due()
        world.now += 0.2
        assert not world.teller.are_due()
        world.tell(stored(1), begins=True, listed=True)
        assert world.teller.are_due()

    def test_first_request_does_not_cut_the_wait_for_an_agent(self, world) -> None:
        """R-57: it may be over before there is one; an engine to which none ever tells
        anything waits so long once."""
        assert world.teller.are_due()
        for patience_s in (5.0, 0.25):
            world.teller.begun(request(), [])
            assert world.teller.are_due()
            world.now += patience_s - 0.1
            assert world.teller.are_due()
            world.now += 0.2
            assert not world.teller.are_due()

    def test_news_of_others_keep_no_engine_awake_for_ever(self, world) -> None:
        """A pause or a sleep waits until the engine has no work; half a minute at most, and
        anew behind a request."""
        world.tell(stored(1), begins=True, listed=True)
        assert world.teller.are_due()
        world.now += 29.9
        assert world.teller.are_due()
        world.now += 0.2
        assert not world.teller.are_due()
        world.teller.begun(request(), [])
        assert world.teller.are_due()

    def test_engine_without_events_is_never_kept_awake(self) -> None:
        """Where nobody asked for events it is as it was."""
        assert not NoTeller().are_due()
