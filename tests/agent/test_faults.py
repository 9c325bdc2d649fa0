# SPDX-License-Identifier: Apache-2.0
"""A real agent before a real server, and what befalls either: found out, named and over."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.agent.test_process import KEYS, Place, until
from tests.backends.faulty import FAULTS, Fault, scene
from tests.kit.wall_clock import COMPILER, WallClock
from tests.stores.slab_kit import open_slab
from ucm.agent.client import AgentClient, Answer
from ucm.agent.health import AgentHealth
from ucm.metrics import Counters
from ucm.testing.store_blocks import BLOCK_BYTES, load, payload, save
from ucm.tracing import TIER_FAILED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILER, reason="no C compiler for the clock"),
]
SIZES = [BLOCK_BYTES] * len(KEYS)
TIER_S, SHORT_S, LONG_S = 0.3, 1.0, 60.0


class Log:
    """What an engine logs."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_: object) -> None:
        """Take a line."""
        self.events.append(event)

    warning = info


class Node:
    """An agent between a slab and a server, and an engine's end of its socket."""

    def __init__(self, place: Place, up: ExitStack, folder: Path) -> None:
        clock = WallClock(folder)
        place.env |= clock.env
        self.scene = up.enter_context(scene(folder, clock, lambda: self._agent.pid))
        self.slab = up.enter_context(open_slab(place.slab, 64))
        tier = {"type": "redis", "url": self.scene.url}
        started = place.agent("--linger", "-1", tiers=[tier], timeout={"tier": TIER_S})
        self._agent = up.enter_context(started)
        self.log, self._agents_log, self._number = Log(), place.log, 0
        self.client = up.enter_context(
            closing(AgentClient(place.slab, BLOCK_BYTES, self.log))
        )
        self.counters, self._place = Counters(), place
        self.health = AgentHealth(self.client, self.counters)
        until(lambda: self.client.is_up)

    def ask(self, seconds: float = LONG_S) -> Answer | None:
        """Ask for all blocks, see that what comes is right, and return the answer."""
        name = str(self._number)
        self._number += 1
        self.client.want(name, KEYS, SIZES, seconds=seconds, hold_s=0.0)
        until(lambda: not self.client.is_pending(name))
        answer = self.client.answer(name)
        if answer is not None:
            known = KEYS[: answer.found]
            assert [payload(key) for key in known] == load(self.slab, known)
        self.client.drop(name)
        return answer

    def is_whole(self) -> bool:
        """Fill slab and tier, empty the slab, and return whether all comes back."""
        there = self.slab.contains(KEYS)
        missing = [
            key for key, is_there in zip(KEYS, there, strict=True) if not is_there
        ]
        offered = self._spilled()["offered"] + len(missing)
        save(self.slab, missing)
        until(lambda: self._is_over(offered))
        self.slab.clear(b"")
        return self.ask() == (len(KEYS), "", b"\1" * len(KEYS), 0)

    def _spilled(self) -> dict[str, int]:
        (core,) = self._place.status()["slots"].values()
        (told,) = core["spilled"]
        return told

    def _is_over(self, offered: int) -> bool:
        told = self._spilled()
        is_idle = not told["waiting"] and not told["moving"]
        return is_idle and told["offered"] >= offered

    def events(self) -> Counter[tuple[str, str]]:
        """Return how often what was logged, by agent and engine, with the reasons."""
        lines = [
            json.loads(line)
            for path in self._agents_log.iterdir()
            for line in path.read_text().splitlines()
        ]
        told = [(line["event"], line.get("reason", "")) for line in lines]
        return Counter(told + [(event, "") for event in self.log.events])

    def numbers(self) -> dict[str, float]:
        """Return counters and gauges as they are told by now."""
        self.health.refresh()
        now = self.counters.snapshot()
        return now.counters | now.gauges


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Return a node on which all is well."""
    folder = tmp_path_factory.mktemp("faults")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, ExitStack() as up:
        made = Node(Place(folder, Path(shm)), up, folder)
        until(made.is_whole)
        yield made


def of(name: str) -> Fault:
    """Return a fault by its name."""
    return next(fault for fault in FAULTS if fault.name == name)


def named(fault: Fault) -> list[Fault]:
    """Return a fault as a list, if this engine's own counts have no part in its metric."""
    return [] if fault.metric.startswith("ucm_fetch_wants") else [fault]


@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if not fault.name.startswith(("agent", "clock"))],
    ids=lambda fault: fault.name,
)
def test_fault_of_a_tier_is_named_and_ends_with_it(node: Node, fault: Fault) -> None:
    """R-52: while a server is stopped, dead, slow, full or wrong each call ends by the tier's
    deadline, with what is right or nothing; metric and log name it; and behind it all that
    is wanted comes from the tier as before."""
    until(node.is_whole)
    before, line = node.numbers(), (fault.event, fault.why)
    is_rare = fault.event == TIER_FAILED  # once a minute, maybe in a test before
    lines = 0 if is_rare else node.events()[line]
    seen = set()
    fault.begin(node.scene)

    def is_named() -> bool:
        node.slab.clear(b"")
        answer = node.ask()
        assert answer is not None
        if is_rare:
            save(node.slab, KEYS)
        if answer.reason == fault.reason:
            seen.add("reason")
        if not named(fault) or fault.is_counted(before, node.numbers()):
            seen.add("metric")
        if node.events()[line] > lines:
            seen.add("event")
        return len(seen) == 3

    try:
        until(is_named)
    finally:
        fault.end(node.scene)
    node.slab.clear(b"")
    until(node.is_whole)


def test_agent_that_stands_still_is_named_and_serves_again(node: Node) -> None:
    """R-52, R-63: while the agent is stopped a want ends at its own deadline, with no; metric
    and log name it; and as soon as it goes on it is asked again."""
    fault = of("agent stopped")
    until(node.is_whole)
    before = node.numbers()
    fault.begin(node.scene)
    try:
        assert node.ask(SHORT_S) is None
        until(lambda: fault.is_counted(before, node.numbers()))
        until(lambda: (fault.event, "") in node.events())
        assert not node.client.want("no", KEYS, SIZES, seconds=1.0, hold_s=0.0)
    finally:
        fault.end(node.scene)
    until(lambda: node.client.is_up)
    assert "agent.joined" == node.log.events[-1]
    node.slab.clear(b"")
    until(node.is_whole)


def test_clock_that_jumps_back_changes_nothing(node: Node) -> None:
    """R-52: two days back, for agent and server: nothing of ours waits or ends by the clock
    on the wall."""
    fault = of("clock behind")
    until(node.is_whole)
    fault.begin(node.scene)
    try:
        until(node.is_whole)
    finally:
        fault.end(node.scene)


def test_clock_that_jumps_ahead_is_what_the_server_makes_of_it(node: Node) -> None:
    """R-52: two days ahead the server drops what has outlived its time: a miss, not a tier
    that does not answer; what is stored then is found."""
    fault = of("clock ahead")
    until(node.is_whole)
    fault.begin(node.scene)
    try:
        node.slab.clear(b"")
        until(lambda: (node.ask() or Answer(0, "")).reason == fault.reason)
        until(node.is_whole)
    finally:
        fault.end(node.scene)
    until(node.is_whole)
