# SPDX-License-Identifier: Apache-2.0
"""The agent is no child of an engine's, and leaves nothing with who started it."""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.test_process import ROOT
from tests.kit.agents import agent_pid, end_agent, exit_code
from ucm.agent.launch import _KEEPER, REFUSED, Launcher, _environment
from ucm.config import UCMConfig

_SUBREAPER = 36
"""Who is left with orphans, for prctl(2)."""
_HOST = """
import json, sys
sys.path[:] = [None, *sys.argv[2:]]
from tests.kit.agents import exit_code
from ucm.agent.launch import Launcher
from ucm.config import UCMConfig
launch = Launcher(UCMConfig.from_mapping(json.loads(sys.argv[1])))
launch()
print(exit_code(launch), launch._agent.problem)
"""


@pytest.fixture
def settings(place, monkeypatch) -> UCMConfig:
    """Of an engine whose agents are of this checkout."""
    monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
    monkeypatch.chdir(ROOT)
    return UCMConfig.from_mapping(place.settings)


class TestOrphan:
    def test_agent_is_no_child_of_the_engine_that_starts_it(self, settings) -> None:
        """R-55, R-63: vLLM kills all that descends from its processes when it ends; the
        agent goes on, with what is to be spilled."""
        launch = Launcher(settings)
        launch()
        pid = agent_pid(launch)
        try:
            ancestors = [pid]
            while ancestors[-1] > 1:
                ancestors.append(_parent_of(ancestors[-1]))
            assert os.getpid() not in ancestors
        finally:
            assert -1 == end_agent(launch)

    def test_agents_that_have_ended_are_not_left_to_the_first_process(
        self, settings
    ) -> None:
        """R-63: in a container whose first process is an engine's server, which buries nobody,
        agents that end again and again do not fill the table of processes."""
        now = [0.0]
        system = ctypes.CDLL(None)
        system.prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            launch = Launcher(settings, lambda: now[0])
            launch()
            pid = agent_pid(launch)
            keeper = _parent_of(pid)
            end_agent(launch)
            with pytest.raises(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            launch()
            now[0] = 61.0
            launch()
            assert (False, keeper) == (
                Path(f"/proc/{pid}").exists(),
                _parent_of(agent_pid(launch)),
            )
            end_agent(launch)
            del launch
            gc.collect()
            assert (keeper, 0) == os.waitpid(keeper, 0)
        finally:
            system.prctl(_SUBREAPER, 0, 0, 0, 0)

    def test_python_without_files_in_memory_starts_agents(
        self, place, settings, monkeypatch
    ) -> None:
        """R-63: one that is built for an old C library has none; an agent reads what it is given, however long."""
        monkeypatch.delattr(os, "memfd_create", raising=False)
        place.slab.mkdir()
        (place.slab / "slab.json").touch()
        tier = {"type": "nowhere", "path": "x" * (1 << 19)}
        launch = Launcher(UCMConfig.from_mapping(place.settings | {"tiers": [tier]}))
        launch()
        assert REFUSED == exit_code(launch)
        assert launch._agent is not None
        assert "unknown name" in launch._agent.problem

    def test_engine_whose_agents_parent_was_killed_starts_agents(
        self, settings
    ) -> None:
        """R-63: at the next try but one, by another parent."""
        now = [0.0]
        launch = Launcher(settings, lambda: now[0])
        launch()
        first = agent_pid(launch)
        os.kill(_parent_of(first), signal.SIGKILL)
        end_agent(launch)
        for now[0] in (0.0, 61.0, 122.0):
            launch()
        assert first != agent_pid(launch)
        end_agent(launch)

    def test_parent_that_gets_no_process_for_an_agent_is_followed_by_another(
        self, settings, monkeypatch
    ) -> None:
        """R-63: it ends, and has started nobody; the next try has one of its own."""
        launch = Launcher(settings)
        with monkeypatch.context() as short:
            begins, _, _ = _KEEPER.partition("try:")
            short.setattr("ucm.agent.launch._KEEPER", f"{begins}own.recv(9)")
            launch()
        assert not launch.is_coming()
        launch()
        assert _parent_of(agent_pid(launch)) > 1
        end_agent(launch)

    def test_agent_that_is_started_anew_has_the_environment_of_now(
        self, settings, monkeypatch
    ) -> None:
        """R-63: credentials that a host has changed meanwhile, as those that it first had may be over."""
        now = [0.0]
        launch = Launcher(settings, lambda: now[0])
        launch()
        end_agent(launch)
        launch()
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of now")
        now[0] = 61.0
        launch()
        keeper = _parent_of(agent_pid(launch))  # an agent may not have begun yet
        environment = Path(f"/proc/{keeper}/environ").read_bytes()
        assert b"AWS_SESSION_TOKEN=of now" in environment.split(b"\0")
        end_agent(launch)

    @pytest.mark.parametrize("flags", [["-I", "-S"], ["-S"]])
    def test_agent_finds_the_modules_of_who_starts_it(self, place, flags) -> None:
        """R-63: of a host that has them by ``sys.path`` alone each one ended at once, without a word in any
        log; of one that does not listen to ``PYTHONPATH``, or has others before, it ran what that names."""
        place.slab.mkdir()
        (place.slab / "slab.json").touch()
        other = place.slab / "ucm"
        other.mkdir()
        (other / "__init__.py").write_text("raise SystemExit")
        settings = place.settings | {"tiers": [{"type": "nowhere"}]}
        told = subprocess.run(
            [sys.executable, *flags, "-c", _HOST, json.dumps(settings), *sys.path],
            env=os.environ | {"PYTHONPATH": str(place.slab)},
            capture_output=True,
            check=True,
            text=True,
        )
        assert told.stdout.startswith(f"{REFUSED} tiers.0.type='nowhere'")

    def test_agent_of_a_notebook_finds_what_lies_beside_that(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: who is asked line by line finds modules where it is, and has that as an empty place."""
        (tmp_path / "beside.py").touch()
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        command = [sys.executable, "-P", "-c", "import beside"]
        subprocess.run(command, env=_environment(), cwd=tmp_path, check=True)

    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_child_of_an_engine_has_no_part_in_its_agents_parent(
        self, settings
    ) -> None:
        """R-63: that process lasted as long as whatever the engine had forked off meanwhile."""
        launch = Launcher(settings)
        launch()
        assert launch._keeper is not None
        own = launch._keeper._own
        if not (child := os.fork()):
            os._exit(own.fileno() >= 0)
        assert (child, 0) == os.waitpid(child, 0)
        end_agent(launch)

    def test_engine_that_lets_go_of_its_agent_keeps_no_pipe_to_it(
        self, settings
    ) -> None:
        """R-63: a host that opens and closes its cache all day does not run out of files."""
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        launch = Launcher(settings)
        launch()
        pid = agent_pid(launch)
        try:
            assert before + 2 == len(os.listdir("/proc/self/fd"))
            del launch
            gc.collect()
            assert before == len(os.listdir("/proc/self/fd"))
        finally:
            os.kill(pid, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """Return the parent of a process."""
    told = Path(f"/proc/{pid}/stat").read_text()
    return int(told.rpartition(")")[2].split()[1])
