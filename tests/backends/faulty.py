# SPDX-License-Identifier: Apache-2.0
"""What befalls a tier or its agent, and by which words of metrics and log it is seen."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs

from tests.backends.servers import Server, redis_server
from tests.backends.spoiling import Spoiler, Way, spoiled
from tests.kit.wall_clock import WallClock
from ucm.tracing import AGENT_LOST, TIER_FAILED, TIER_SILENT

__all__ = ["FAULTS", "Fault", "Scene", "scene"]

_TWO_DAYS = 2 * 86400
"""Longer than values live in the server."""
_TIER_UP, _AGENT_UP = "ucm_tier_up|redis", "ucm_agent_up"
_AGENTS = "ucm_agents_total"
_NOT_TAKEN = "ucm_unspilled_parts_total|redis|"
_WANTS = "ucm_fetch_wants_total|"


@attrs.frozen
class Scene:
    """
    A server behind a spoiler, for an agent.

    Args:
        server: Valkey's.
        port: Of it.
        spoiler: What agents talk to.
        clock: Of the server, and of who is started with its variables.
        agent_pid: Tells who the agent is, once there is one.
    """

    server: Server
    port: int
    spoiler: Spoiler
    clock: WallClock
    agent_pid: Callable[[], int]

    @property
    def url(self) -> str:
        """Where a tier finds it."""
        return f"redis://127.0.0.1:{self.spoiler.port}/0"

    def say(self, *commands: str) -> None:
        """Have the server obey."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as peer:
            for command in commands:
                peer.sendall(f"{command}\r\n".encode())
                assert b"+OK" in peer.recv(1 << 10)

    def signal(self, number: int) -> None:
        """Send the agent a signal."""
        os.kill(self.agent_pid(), number)


@contextlib.contextmanager
def scene(
    folder: Path, clock: WallClock, agent_pid: Callable[[], int]
) -> Iterator[Scene]:
    """Run a server and what stands before it."""
    (folder / "server").mkdir()
    with (
        redis_server(folder / "server", env=clock.env) as (server, port),
        spoiled(folder, port) as spoiler,
    ):
        yield Scene(server, port, spoiler, clock, agent_pid)


@attrs.frozen
class Fault:
    """
    One of them.

    Args:
        name: For people.
        begin: Has it begin.
        end: Has it end.
        event: The log's line that names it; empty: nothing of ours fails.
        why: The reason in that line, if it has one.
        metric: Likewise, by the text of ``sample_key``: a gauge that is 0, or what counts on.
        reason: What wants hear that fall short meanwhile; empty: they do not have to.
    """

    name: str
    begin: Callable[[Scene], None]
    end: Callable[[Scene], None]
    event: str = TIER_SILENT
    why: str = ""
    metric: str = _TIER_UP
    reason: str = "unavailable"

    def is_counted(
        self, before: Mapping[str, float], after: Mapping[str, float]
    ) -> bool:
        """Return whether metrics show it, which were so before and are so now."""
        if self.metric in (_TIER_UP, _AGENT_UP):
            return after.get(self.metric) == 0
        return after.get(self.metric, 0) > before.get(self.metric, 0)


def _spoil(way: Way, scene: Scene) -> None:
    scene.spoiler.do(way)


def _jump(seconds: int, scene: Scene) -> None:
    scene.clock.jump(seconds)


def _end_future(scene: Scene) -> None:
    """Go back to now, without what was stored by then: it would outlive the next jump."""
    scene.clock.jump(0)
    scene.say("FLUSHALL")


_forward = partial(_spoil, Way.FORWARD)
_no_jump = partial(_jump, 0)
FAULTS = (
    Fault("server stopped", lambda on: on.server.stop(), lambda on: on.server.go_on()),
    Fault("server killed", lambda on: on.server.kill(), lambda on: on.server.start()),
    Fault("slow", partial(_spoil, Way.SLOW), _forward),
    Fault("garbage", partial(_spoil, Way.GARBAGE), _forward),
    Fault(
        "damaged",
        partial(_spoil, Way.DAMAGED),
        _forward,
        *(TIER_FAILED, "corrupt", f"{_WANTS}corrupt", "corrupt"),
    ),
    Fault("partial batch", partial(_spoil, Way.PARTIAL), _forward),
    Fault(
        "full",
        lambda on: on.say("FLUSHALL", "CONFIG SET maxmemory 1"),
        lambda on: on.say("CONFIG SET maxmemory 0"),
        *(TIER_FAILED, "store_full", f"{_NOT_TAKEN}store_full", "absent"),
    ),
    Fault(
        "clock ahead",
        partial(_jump, _TWO_DAYS),
        _end_future,
        *("", "", f"{_WANTS}absent", "absent"),
    ),
    Fault("clock behind", partial(_jump, -_TWO_DAYS), _no_jump, "", "", "", ""),
    Fault(
        "agent stopped",
        lambda on: on.signal(signal.SIGSTOP),
        lambda on: on.signal(signal.SIGCONT),
        *(AGENT_LOST, "", _AGENT_UP, ""),
    ),
    Fault(
        "agent killed",
        lambda on: on.signal(signal.SIGKILL),
        lambda _: None,
        *(AGENT_LOST, "", _AGENTS, ""),
    ),
)
