# SPDX-License-Identifier: Apache-2.0
"""A second agent of a slab, and what who started it is told."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.test_process import LIMIT_S, ROOT, Place, until
from tests.stores.slab_kit import open_slab
from ucm.agent.launch import REFUSED, TAKEN
from ucm.agent.node import AgentLock
from ucm.agent.protocol import LOCK_NAME, SOCKET_NAME

pytestmark = pytest.mark.slow


class TestSecond:
    def test_slab_has_one_agent(self, place: Place) -> None:
        """R-63: a second agent of a slab says which process has it, and ends with a code of
        its own; one that was killed is followed by the next."""
        with open_slab(place.slab, 64):
            with place.agent("--linger", "-1") as first:
                until((place.slab / SOCKET_NAME).exists)
                with place.agent("--linger", "0.5") as second:
                    _, told = second.communicate(timeout=LIMIT_S)
                assert TAKEN == second.returncode
                whose = f"process {first.pid} is the agent of {place.slab}"
                assert f"ucm agent: {whose}\n" == told
                assert 1 == len(list(place.log.iterdir()))
            with place.agent("--linger", "-1"), place.client() as client:
                assert client.is_up

    def test_service_without_a_slab_ends_when_it_is_told_to(self, place: Place) -> None:
        """R-63: SIGTERM is handled before it serves: what ends others by itself does not end the
        first process of a container, which waited for its slab until it was killed."""
        settings = place.slab.parent / "settings"
        os.mkfifo(settings)
        command = [sys.executable, "-m", "ucm.agent", "--config", str(settings)]
        with subprocess.Popen(command, cwd=ROOT) as agent:
            writers: list[int] = []
            until(lambda: writers.extend(_writers_to(settings)) or writers)
            agent.send_signal(signal.SIGTERM)
            assert 0 == agent.wait(LIMIT_S)
            os.close(*writers)

    def test_service_that_imports_what_it_needs_ends_when_it_is_told_to(
        self, place: Place, tmp_path: Path
    ) -> None:
        """R-63: as the first process of a container it lost a signal of its first second, and waited on."""
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        (tmp_path / "anyio.py").write_text(f"open({str(fifo)!r}).read()\n")
        command = [sys.executable, "-m", "ucm.agent"]
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(command, cwd=ROOT, env=env) as agent:
            writers: list[int] = []
            until(lambda: writers.extend(_writers_to(fifo)) or writers)
            agent.send_signal(signal.SIGTERM)
            assert 0 == agent.wait(LIMIT_S)
            os.close(*writers)

    def test_service_that_meets_no_slab_says_so(self, place: Place) -> None:
        """R-63: it ended in silence, and who had misspelt the path saw it end well."""
        with place.agent("--linger", "0.1") as agent:
            _, told = agent.communicate(timeout=LIMIT_S)
        assert 0 == agent.returncode
        where = f"no engine has made a slab in {place.slab} within 0.1 s"
        assert f"ucm agent: {where}; --linger -1 waits for it\n" == told

    def test_one_that_an_engine_has_started_ends_well_and_in_silence(
        self, place: Place
    ) -> None:
        """R-63: of engines that come together each starts one; its engine finds the other."""
        reader, writer = os.pipe()
        with open_slab(place.slab, 64):
            lock = AgentLock(place.slab)
            agent = subprocess.run(
                [sys.executable, "-m", "ucm.agent", "--engine-fd", str(writer)],
                input=json.dumps(place.settings).encode(),
                pass_fds=(writer,),
                env=os.environ | place.env,
                cwd=ROOT,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
            lock.close()
        os.close(writer)
        with open(reader, "rb") as told:
            assert b"0\n" == told.read()
        assert (0, b"", b"") == (agent.returncode, agent.stdout, agent.stderr)

    @pytest.mark.parametrize("streams", ["2>&-", "<&- >&- 2>&-", "2>/dev/full"])
    def test_service_that_cannot_write_its_streams_tells_how_it_ends(
        self, place: Place, streams: str
    ) -> None:
        """R-63: where standard error is closed, full or a terminal that is gone it failed as it told that a
        setting cannot be used; its engine heard nothing of that."""
        reader, writer = os.pipe()
        settings = place.slab.parent / "settings.json"
        settings.write_text('{"tiers": []}')
        command = [sys.executable, "-m", "ucm.agent", "--config", str(settings)]
        agent = subprocess.run(
            ["sh", "-c", f'"$@" {streams}', "", *command, "--engine-fd", str(writer)],
            pass_fds=(writer,),
            cwd=ROOT,
            timeout=LIMIT_S,
            check=False,
        )
        os.close(writer)
        with open(reader, "rb") as told:
            assert told.read().startswith(b"2\ntiers=[]: no tier.")
        assert REFUSED == agent.returncode


class TestLock:
    def test_holder_that_said_nothing_is_another_process(self, place: Place) -> None:
        """R-63: one of an earlier release, or that had no room to write its number."""
        with open_slab(place.slab, 64):
            lock = AgentLock(place.slab)
            os.truncate(place.slab / LOCK_NAME, 0)
            with pytest.raises(BlockingIOError, match=r"^another process is the agent"):
                AgentLock(place.slab)
            lock.close()
            AgentLock(place.slab).close()


def _writers_to(fifo: Path) -> list[int]:
    """Open a pipe with a name if somebody waits for what comes from it; nothing if nobody does."""
    try:
        return [os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError:
        return []
