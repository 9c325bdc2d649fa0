# SPDX-License-Identifier: Apache-2.0
"""The agent's process: when it is there, what it leaves, and when it ends."""

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import CapturingLogger

from tests.kit.agents import agent_pid, end_agent, exit_code
from tests.kit.file_tier import registration
from tests.stores.slab_kit import open_slab
from ucm.agent.__main__ import _read
from ucm.agent.client import AgentClient
from ucm.agent.launch import Launcher
from ucm.agent.protocol import (
    FRAME_HEADER,
    SOCKET_NAME,
    FromAgent,
    GetStatus,
    Status,
    encode_frame,
)
from ucm.backends.disk import DiskBackend
from ucm.config import UCMConfig
from ucm.errors import ConfigFileError
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save
from ucm.tracing import close_log, open_log

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KEYS = make_keys(6)
LIMIT_S = 120.0


class Place:
    """A slab in memory and a tier on a disk."""

    def __init__(self, tmp_path: Path, shm: Path) -> None:
        self.slab, self.tier, self.log = (
            shm / "slab",
            tmp_path / "tier",
            tmp_path / "log",
        )
        self.path = registration(tmp_path / "registration")
        self.env = {"PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)])}

    @property
    def settings(self) -> dict[str, object]:
        """What an engine is given."""
        return {
            "store": {"path": str(self.slab)},
            "tiers": [{"type": "file-tier", "path": str(self.tier)}],
            "log": {"directory": str(self.log)},
            "timeout": {"fetch": 30.0},
        }

    @contextmanager
    def agent(self, *arguments: str, **settings: object):
        """Run an agent as a service does."""
        file = self.slab.parent / "settings.json"
        file.write_text(json.dumps(self.settings | settings))
        command = [sys.executable, "-m", "ucm.agent", "--config", str(file), *arguments]
        process = subprocess.Popen(
            command,
            env=os.environ | self.env,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextmanager
    def client(self, slot_bytes=4096, agent=None):
        """Be an engine; of an *agent* that may be gone before, if one is given."""
        log = open_log(UCMConfig().log, "scheduler")
        client = AgentClient(self.slab, slot_bytes, log)
        try:
            until(lambda: client.is_up or (agent and agent.poll() is not None))
            yield client
        finally:
            client.close()
            close_log(log)

    def status(self) -> dict:
        """Ask the agent how it is."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(LIMIT_S)
            peer.connect(str(self.slab / SOCKET_NAME))
            peer.sendall(encode_frame(GetStatus()))
            data = b""
            while piece := peer.recv(1 << 16):
                data += piece
        told = msgspec.msgpack.decode(data[FRAME_HEADER.size :], type=FromAgent)
        assert isinstance(told, Status)
        return told.told


def until(is_so) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert deadline > time.monotonic()
        time.sleep(0.005)


class TestAgent:
    def test_agent_spills_and_fetches_for_a_process_of_another_kind(
        self, place
    ) -> None:
        """R-53, R-63: an agent that runs as a service spills what is saved and brings it
        back; its socket is its user's alone."""
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1"),
            place.client() as client,
        ):
            mode = stat.S_IMODE((place.slab / SOCKET_NAME).stat().st_mode)
            assert 0o600 == mode
            save(slab, KEYS)
            until(lambda: place.status()["slots"]["4096"]["spilled"][0]["spilled"] == 6)
            slab.clear(b"")
            sizes = [BLOCK_BYTES] * 6
            assert client.want("a", KEYS, sizes, seconds=30.0, hold_s=5.0)
            until(lambda: not client.is_pending("a"))
            assert (6, "", b"\1" * 6, 0) == client.answer("a")
            assert [payload(key) for key in KEYS] == load(slab, KEYS)
            told = place.status()
            assert (["file"], 6) == (
                told["media"],
                told["slots"]["4096"]["fetched"]["fetched"],
            )

    def test_told_to_end_it_spills_what_waits(self, place) -> None:
        """R-55: SIGTERM ends an agent within its time, and what was on its way by then is
        in the tier; it leaves no socket."""
        tier = {"type": "file-tier", "path": str(place.tier), "delay": 1.0}
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1", tiers=[tier]) as agent,
            place.client(),
        ):
            save(slab, KEYS)
            until(lambda: place.status()["slots"]["4096"]["spilled"][0]["moving"])
            agent.send_signal(signal.SIGTERM)
            assert 0 == agent.wait(LIMIT_S)
            assert not (place.slab / SOCKET_NAME).exists()
        assert 6 == len(list(place.tier.iterdir()))
        (log,) = place.log.iterdir()
        assert "agent.ended" == json.loads(log.read_text().splitlines()[-1])["event"]

    def test_agent_that_nobody_needs_ends(self, place) -> None:
        """R-63: behind its last engine an agent lingers, and is gone then."""
        with open_slab(place.slab, 64):
            is_joined = False
            while not is_joined:  # a busy machine comes too late to one
                with place.agent("--linger", "1") as agent:
                    with place.client(agent=agent) as client:
                        if is_joined := client.is_up:
                            assert agent.poll() is None
                    assert 0 == agent.wait(LIMIT_S)

    def test_agent_that_is_only_looked_at_ends(self, place) -> None:
        """R-63: who looks how an agent is, or is refused, all the time does not keep it."""
        with open_slab(place.slab, 64), place.agent("--linger", "1") as agent:
            until(lambda: is_served(place, agent.pid))
            looked_for = time.monotonic()
            while agent.poll() is None:
                assert LIMIT_S > time.monotonic() - looked_for
                is_served(place, agent.pid)
                time.sleep(0.1)
            assert 0 == agent.returncode

    def test_agent_that_may_open_no_more_files_takes_who_comes_when_it_may(
        self, place
    ) -> None:
        """R-63: it serves whom it has, says once why it takes nobody, and goes on."""
        with (
            open_slab(place.slab, 64),
            place.agent("--linger", "-1") as agent,
            place.client() as client,
        ):
            (log,) = place.log.iterdir()
            used = {int(name) for name in os.listdir(f"/proc/{agent.pid}/fd")}
            least = min({*range(len(used) + 1)} - used)
            files = resource.RLIMIT_NOFILE
            _, most = resource.prlimit(agent.pid, files)
            resource.prlimit(agent.pid, files, (least, most))
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(place.slab / SOCKET_NAME))
                until(lambda: "agent.refused" in log.read_text())
                assert client.is_up
                resource.prlimit(agent.pid, files, (most, most))
                assert agent.pid == place.status()["pid"]
            assert 1 == log.read_text().count("Too many open files")

    def test_agent_of_a_slab_that_is_gone_ends(self, place) -> None:
        """R-63: where the slab's files are removed the agent ends, and does no harm."""
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1") as agent,
            place.client(),
        ):
            save(slab, KEYS)
            for path in place.slab.iterdir():
                path.unlink()
            assert 0 == agent.wait(LIMIT_S)

    def test_agent_without_a_slab_waits_for_it_only_so_long(self, place) -> None:
        """R-63: an agent that was started before every engine waits for the slab."""
        with place.agent("--linger", "0.1") as agent:
            assert 0 == agent.wait(LIMIT_S)
        assert not place.slab.exists()

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"tiers": []}, "no tier"),
            ({"tiers": [{"type": "tape"}]}, "tiers.0.type='tape'"),
            ({"store": {"path": 7}}, "store.path"),
        ],
    )
    def test_wrong_settings_are_refused_in_one_line(
        self, place, settings, problem
    ) -> None:
        """X-09: an agent that cannot be used as it is set says so, and ends with 2."""
        with open_slab(place.slab, 8), place.agent(**settings) as agent:
            _, said = agent.communicate(timeout=LIMIT_S)
        assert (2, 1) == (agent.returncode, said.count("\n"))
        assert problem in said

    @pytest.mark.parametrize("text", [b"{", b"[1]", b'"\xff"', b"[" * 5000, b""])
    def test_settings_that_are_no_json_are_named_by_their_file(
        self, tmp_path, text
    ) -> None:
        """X-09: whose file, and what to give."""
        file = tmp_path / "settings.json"
        file.write_bytes(text)
        with pytest.raises(ConfigFileError) as caught:
            _read(file)
        assert ("--config", str(file)) == (caught.value.key, caught.value.value)
        assert "no JSON object" in caught.value.problem
        assert caught.value.remedy

    def test_bug_of_a_backend_ends_the_agent_with_a_word(self, place) -> None:
        """R-62: what a backend raises in no call of its ends the agent, and is in its log; no
        engine is harmed."""
        tier = {"type": "file-tier", "path": str(place.tier), "bug": "refusing"}
        with (
            open_slab(place.slab, 64) as slab,
            place.agent("--linger", "-1", tiers=[tier]) as agent,
            place.client(agent=agent),
        ):
            save(slab, KEYS)
            assert 1 == agent.wait(LIMIT_S)
            assert [payload(key) for key in KEYS] == load(slab, KEYS)
        (log,) = place.log.iterdir()
        last = json.loads(log.read_text().splitlines()[-1])
        assert "runtime.failed" == last["event"]
        assert "a bug" in last["error"] + last.get("exception", "")

    def test_launcher_starts_one_and_another_behind_its_death(
        self, place, monkeypatch
    ) -> None:
        """R-63: an engine starts the agent that is not there, once, and again when it was
        killed; its settings travel whole. R-52: who had the one knows that it has another."""
        monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
        monkeypatch.chdir(ROOT)
        launch = Launcher(UCMConfig.from_mapping(place.settings))
        with open_slab(place.slab, 64):
            launch()
            first = agent_pid(launch)
            launch()
            assert first == agent_pid(launch)
            with place.client() as client:
                end_agent(launch)
                until(lambda: [launch()] and first != agent_pid(launch))
                until(lambda: is_served(place, agent_pid(launch)))
                until(lambda: 2 == client.agents.count)
            assert 0 == end_agent(launch, signal.SIGTERM)

    def test_settings_that_end_with_their_engine_are_one_line(self, place) -> None:
        """R-63: an engine that is killed while it starts its agent leaves no traceback."""
        reader, writer = os.pipe()
        os.close(reader)
        agent = subprocess.run(
            [sys.executable, "-m", "ucm.agent", "--engine-fd", str(writer)],
            input=b'{"store":',
            pass_fds=(writer,),
            cwd=ROOT,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        os.close(writer)
        assert (2, 1) == (agent.returncode, agent.stderr.count(b"\n"))

    def test_agent_is_not_bound_to_the_core_of_the_rank_that_starts_it(
        self, place, monkeypatch
    ) -> None:
        """R-63: a rank's own core is the engine's, which polls there; the agent may run
        wherever the engine may, and hears nothing of what binds the rank."""
        monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
        monkeypatch.setenv("OMP_PROC_BIND", "true")
        monkeypatch.chdir(ROOT)
        settings = UCMConfig.from_mapping(place.settings)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as rank:
            pid, cpus = rank.submit(_launch_bound, settings).result(LIMIT_S)
            try:
                assert 1 == len(cpus)
                until(lambda: os.sched_getaffinity(pid) == os.sched_getaffinity(0))
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                assert b"OMP_PROC_BIND" not in environment
                assert b"PYTHONPATH" in environment
            finally:
                os.kill(pid, signal.SIGKILL)


def _launch_bound(config: UCMConfig) -> tuple[int, set[int]]:
    """As a rank that is bound to a core, start an agent; return its id, and the core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
    launch = Launcher(config)
    launch()
    return agent_pid(launch), os.sched_getaffinity(0)


class TestRefused:
    def test_engine_hears_why_its_agent_cannot_be_used(
        self, place, monkeypatch, tmp_path
    ) -> None:
        """R-63, X-09: of two slabs with one disk the second one's agent cannot be used; the
        engine tells why, once and by name, and starts the next one after a minute."""
        monkeypatch.setenv("PYTHONPATH", place.env["PYTHONPATH"])
        monkeypatch.chdir(ROOT)
        tier = {"path": str(tmp_path / "drive"), "capacity": "64MiB"}
        now = [0.0]
        settings = place.settings | {"tiers": [{"type": "disk", **tier}]}
        launch = Launcher(UCMConfig.from_mapping(settings), lambda: now[0])
        log = CapturingLogger()
        with asyncio.Runner() as runner, open_slab(place.slab, 64):
            other = runner.run(DiskBackend.open_configured(tier, "tiers.0"))
            client = AgentClient(place.slab, 4096, log, launch)
            try:
                until(lambda: log.calls)
            finally:
                client.close()
                runner.run(other.aclose())
            (call,) = log.calls
            refused, problem = agent_pid(launch), call.kwargs["error"]
            assert ("agent.lost", 2) == (call.args[0], exit_code(launch))
            assert "tiers.0.path" in problem
            assert ([problem] * 3, refused) == (
                [launch() for _ in range(3)],
                agent_pid(launch),
            )
            now[0] = 61.0
            launch()
            assert refused != agent_pid(launch)
            end_agent(launch)


def is_served(place: Place, pid: int) -> bool:
    """Return whether this process is the agent by now."""
    try:
        return pid == place.status()["pid"]
    except (OSError, msgspec.DecodeError):  # it is on its way
        return False


def test_agent_looks_for_cycles_of_objects_rarely(tmp_path):
    """What a block that moves leaves is no cycle: its process looks for some less often than Python's own."""
    ask = (
        "import gc, sys; from ucm.agent.__main__ import main; main();"
        "print(gc.get_threshold()[0] > 10_000, gc.get_freeze_count() > 0)"
    )
    command = [sys.executable, "-c", ask, "--config", str(tmp_path / "none")]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    assert "True True" == told.stdout.strip()
