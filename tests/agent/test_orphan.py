# SPDX-License-Identifier: Apache-2.0
"""The agent is nobody's child, and leaves nothing with who started it."""

import gc
import os
import signal
from pathlib import Path

from tests.agent.test_process import ROOT
from tests.kit.agents import agent_pid, end_agent
from ucm.agent.launch import Launcher
from ucm.config import UCMConfig


class TestOrphan:
    def test_agent_is_no_child_of_the_engine_that_starts_it(
        self, place, monkeypatch
    ) -> None:
        """R-55, R-63: vLLM kills all that descends from its processes when it ends; the
        agent goes on, with what is to be spilled."""
        monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
        monkeypatch.chdir(ROOT)
        launch = Launcher(UCMConfig.from_mapping(place.settings))
        launch()
        pid = agent_pid(launch)
        try:
            ancestors = [pid]
            while ancestors[-1] > 1:
                told = Path(f"/proc/{ancestors[-1]}/stat").read_text()
                ancestors.append(int(told.rpartition(")")[2].split()[1]))
            assert os.getpid() not in ancestors
        finally:
            assert -1 == end_agent(launch)

    def test_engine_that_lets_go_of_its_agent_keeps_no_pipe_to_it(
        self, place, monkeypatch
    ) -> None:
        """R-63: a host that opens and closes its cache all day does not run out of files."""
        monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
        monkeypatch.chdir(ROOT)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        launch = Launcher(UCMConfig.from_mapping(place.settings))
        launch()
        pid = agent_pid(launch)
        try:
            assert before + 1 == len(os.listdir("/proc/self/fd"))
            del launch
            gc.collect()
            assert before == len(os.listdir("/proc/self/fd"))
        finally:
            os.kill(pid, signal.SIGKILL)
