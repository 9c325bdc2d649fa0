# SPDX-License-Identifier: Apache-2.0
"""When agents are started, and how often one is looked for."""

import errno

import pytest

from ucm.agent import launch
from ucm.agent.launch import REFUSED, Launcher, Pauses
from ucm.config import UCMConfig


class Process:
    """An agent that ends when a test says so."""

    def __init__(self, *_, **__) -> None:
        self.problem = ""
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return how it ended."""
        return self.code


class World:
    """A launcher, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.launch = Launcher(UCMConfig(), lambda: self.now)

    def starts(self) -> bool:
        """Find no agent; return whether one is started."""
        before = self.launch._agent
        self.launch()
        return before is not self.launch._agent

    def ends(self, code: int, seconds: float) -> None:
        """Let the one that was started end after so long."""
        self.now += seconds
        self.launch._agent.code = code


@pytest.fixture
def world(monkeypatch) -> World:
    """Return a launcher of processes that are none."""
    monkeypatch.setattr(launch, "_Agent", Process)
    return World()


class TestPauses:
    def test_agent_on_its_way_is_looked_for_all_the_time(self) -> None:
        """R-63: hits are back a tenth of a second behind the agent, however long that took."""
        pauses = Pauses(lambda: True)
        assert {0.1} == {pauses.next(0.0) for _ in range(50)}

    def test_nobody_is_looked_for_less_and_less_often(self) -> None:
        """R-63: twice as long each time, ten seconds at most, and anew behind one that served."""
        pauses = Pauses()
        seconds = [pauses.next(0.0) for _ in range(9)]
        assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0] == pytest.approx(seconds)
        assert 0.1 == pauses.next(60.0)


class TestLauncher:
    def test_agent_that_was_started_is_on_its_way(self, world) -> None:
        """R-63: as long as its process lives, and for a minute; no other is started."""
        assert not world.launch.is_coming()
        assert world.starts()
        assert world.launch.is_coming()
        world.now += 59.0
        assert world.launch.is_coming()
        assert not world.starts()
        world.now += 2.0
        assert not world.launch.is_coming()

    def test_agent_that_served_is_replaced_at_once(self, world) -> None:
        """R-63: one that dies after an hour costs no pause."""
        world.starts()
        world.ends(-9, 3600.0)
        assert not world.launch.is_coming()
        assert world.starts()
        assert world.launch.is_coming()

    def test_agent_that_dies_soon_is_started_less_and_less_often(self, world) -> None:
        """R-63: a machine is not kept busy by starts of what does not run."""
        world.starts()
        waits = []
        for _ in range(9):
            world.ends(-11, 0.5)
            died_at = world.now
            while not world.starts():
                assert not world.launch.is_coming()
                world.now += 0.1
            waits.append(world.now - died_at)
        expected = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
        assert expected == pytest.approx(waits, abs=0.11)

    def test_agent_of_another_engine_is_waited_for(self, world) -> None:
        """R-63: of engines that lose their agent together each starts one, and one of these
        serves; the others look for that, and start no more meanwhile."""
        world.starts()
        world.ends(0, 0.5)
        assert not world.starts()
        assert world.launch.is_coming()
        world.now += 5.1
        assert not world.launch.is_coming()
        assert world.starts()

    def test_agent_that_left_in_order_is_replaced(self, world) -> None:
        """R-63: one that was told to end, having served, has met nobody."""
        world.starts()
        world.ends(0, 60.0)
        assert world.starts()

    def test_agent_that_refuses_is_started_after_a_minute(self, world) -> None:
        """R-63: what stands against its settings may be gone by then."""
        world.starts()
        world.ends(REFUSED, 0.5)
        assert not world.starts()
        assert not world.launch.is_coming()
        world.now += 61.0
        assert world.starts()

    def test_agents_that_cannot_live_are_told_of(self, world) -> None:
        """R-63: an engine whose agents died as they started said nothing of why it had no tiers;
        that one has ended which served is seen at its socket."""
        world.starts()
        world.ends(1, 3600.0)
        assert not world.launch()
        world.ends(1, 0.5)
        assert "dies as it starts" in world.launch()

    def test_agent_that_cannot_be_started_is_told_of(self, world, monkeypatch) -> None:
        """R-63: likewise, as by a machine that starts no more processes."""

        def refuse(*_, **__) -> None:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

        monkeypatch.setattr(launch, "_Keeper", refuse)
        told = "none can be started: [Errno 11] no more processes"
        assert [told] * 2 == [world.launch(), world.launch()]
