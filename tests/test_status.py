# SPDX-License-Identifier: Apache-2.0
"""A process tells how it is to its own user, whatever others put beside its socket."""

import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.clocks import no_threads
from ucm import status
from ucm.errors import NoStatusError, StoreUnavailableError
from ucm.status import StatusServer, peer_uid, read_statuses, serve_status
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.stores.wrap import WrapperStore
from ucm.threads import Threads


def told():
    """Return what a process tells."""
    return {
        "engine": "e1",
        "counters": {"ucm_saved_blocks_total": 7},
        "sizes": {"x": 1},
    }


@pytest.fixture
def served(tmp_path):
    """Return what serves in a directory, and close it at the end."""
    with contextlib.ExitStack() as servers:

        def serve(role="scheduler", tell=told):
            server = StatusServer(tmp_path, role, tell)
            servers.callback(server.close)
            return server

        yield serve


def listen(path, *, backlog=8):
    """Return a socket that listens there, and is nobody's status."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


@contextlib.contextmanager
def files_left(count):
    """Let this process open no more files than these."""
    free, files = os.dup(0), resource.RLIMIT_NOFILE
    os.close(free)
    before = resource.getrlimit(files)
    resource.setrlimit(files, (free + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(files, before)


class TestAnswer:
    def test_each_process_tells_who_it_is_and_how(self, tmp_path, served):
        """Role, process, engine and numbers of all processes of a slab."""
        served()
        served("worker-0", dict)
        answers = read_statuses(tmp_path).answers
        assert [("scheduler", "e1", 7), ("worker-0", "", None)] == [
            (each.role, each.engine, each.counters.get("ucm_saved_blocks_total"))
            for each in answers
        ]
        assert {os.getpid()} == {each.pid for each in answers}

    @pytest.mark.parametrize("number", [np.float64(2.5), np.float32(2.5)])
    def test_number_of_numpy_is_a_number(self, tmp_path, served, number):
        """What a store has counted by numpy does not end who answers."""
        served(tell=lambda: {"gauges": {"x": number}})
        for _ in range(2):
            (answer,) = read_statuses(tmp_path).answers
            assert {"x": 2.5} == answer.gauges

    def test_engine_may_have_the_lock_between_what_is_told_and_its_text(
        self, tmp_path, served
    ):
        """R-18: nobody waits for an answer as an engine does for a step."""
        ways = []

        class Counted(Threads):
            def give_way(self):
                ways.append(len(asked))

        asked = []
        with contextlib.closing(
            StatusServer(tmp_path, "x", lambda: asked.append(1) or told(), Counted())
        ):
            assert 1 == len(read_statuses(tmp_path).answers)
        assert [1] == ways

    def test_processes_with_one_name_are_told_apart(self, tmp_path, served):
        """In containers of their own two engines may have the same process id."""
        for number in range(3):
            served(tell=lambda number=number: {"engine": f"e{number}"})
        found = {each.engine: each.name for each in read_statuses(tmp_path).answers}
        name = f"scheduler-{os.getpid()}"
        assert {"e0": name, "e1": f"{name}.1", "e2": f"{name}.2"} == found

    def test_what_cannot_be_told_is_a_problem_and_no_silence(self, tmp_path, served):
        """A store that is gone is what an operator looks for."""

        def tell():
            raise StoreUnavailableError("its files are gone")

        served(tell=tell)
        (answer,) = read_statuses(tmp_path).answers
        assert "its files are gone" == answer.problem

    def test_a_long_path_is_no_hindrance(self, tmp_path):
        """A socket's own path may have 107 bytes; a slab's may have more."""
        deep = tmp_path / ("x" * 100) / ("y" * 100)
        deep.mkdir(parents=True)
        server = StatusServer(deep, "scheduler", told)
        assert 1 == len(read_statuses(deep).answers)
        server.close()

    def test_who_reads_nothing_holds_up_nobody(self, tmp_path, served, monkeypatch):
        """A client that stalls is left at its deadline, and the next is served."""
        monkeypatch.setattr(status, "_ANSWER_S", 0.05)
        counters = {f"c{number:030}": number for number in range(12_000)}
        served(tell=lambda: {"counters": counters})
        (name,) = os.listdir(tmp_path / "status")
        with socket.socket(socket.AF_UNIX) as stalled:
            stalled.connect(str(tmp_path / "status" / name))
            assert len(counters) == len(read_statuses(tmp_path).answers[0].counters)


class TestAccess:
    def test_files_are_for_this_user_alone(self, tmp_path, served):
        """The directory is 0700 and the socket 0600, from its first moment on."""
        served()
        folder = tmp_path / "status"
        (path,) = folder.iterdir()
        modes = [each.stat().st_mode & 0o777 for each in (folder, path)]
        assert [0o700, 0o600] == modes

    def test_another_user_is_told_nothing(self, tmp_path, served, monkeypatch):
        """Not even where somebody has opened directory and socket to all."""
        served()
        if own := os.geteuid():  # only root can be somebody else; so the server is
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        (path,) = (tmp_path / "status").iterdir()
        path.chmod(0o666)
        for folder in (path.parent, *list(path.parents)[1:-2]):
            folder.chmod(0o711)
        code = (
            "import os, socket, sys; os.getuid() or os.setuid(65534)\n"
            "with socket.socket(socket.AF_UNIX) as s:\n"
            "    s.connect(sys.argv[1]); print(len(s.recv(10)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "0" == done.stdout.strip()

    def test_user_of_any_number_is_known(self):
        """Those of a directory service are beyond 2^31: the kernel's numbers have no sign."""

        class Connection:
            """To a process of such a user."""

            def getsockopt(self, level, name, size):
                return struct.pack("=III", 1, 3_000_000_000, 3_000_000_000)[:size]

        assert 3_000_000_000 == peer_uid(Connection())

    def test_a_directory_that_is_open_to_others_is_not_used(self, tmp_path):
        """Others could put a socket of their own there."""
        (tmp_path / "status").mkdir(mode=0o755)
        assert serve_status(tmp_path, "scheduler", told) is None
        with pytest.raises(NoStatusError):
            read_statuses(tmp_path)

    def test_a_link_is_not_followed(self, tmp_path):
        """A name that leads elsewhere is somebody's trick or mistake."""
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "status").symlink_to(tmp_path / "elsewhere")
        assert serve_status(tmp_path, "scheduler", told) is None
        assert [] == os.listdir(tmp_path / "elsewhere")


class TestLooks:
    @pytest.mark.parametrize("is_told", [True, False])
    def test_it_looks_by_itself_where_nobody_asks(self, tmp_path, is_told):
        """X-11: now and then until its end, also where there is nowhere to listen; and
        makes no answer for it, which takes the interpreter lock for a millisecond."""
        looks, answers = threading.Semaphore(0), []

        def tell():
            answers.append(told())
            return answers[-1]

        directory = tmp_path if is_told else None
        server = serve_status(
            directory, "scheduler", tell, look=looks.release, look_s=0.001
        )
        for _ in range(3):
            assert looks.acquire(timeout=60.0)
        assert [] == answers
        assert is_told == (tmp_path / "status").exists()
        server.close()
        assert "ucm-status" not in {thread.name for thread in threading.enumerate()}

    def test_it_looks_where_it_may_not_listen(self, tmp_path):
        """X-11: a directory that is open to others takes nothing but the answers."""
        (tmp_path / "status").mkdir(mode=0o755)
        looked = threading.Event()
        server = serve_status(
            tmp_path, "scheduler", told, look=looked.set, look_s=0.001
        )
        assert looked.wait(60.0)
        server.close()


class TestEnd:
    def test_nothing_is_left_behind_a_close(self, tmp_path):
        """Socket, directory and thread go with their process; twice is once."""
        server = StatusServer(tmp_path, "scheduler", told)
        server.close()
        server.close()
        assert [] == os.listdir(tmp_path)
        assert "ucm-status" not in {thread.name for thread in threading.enumerate()}

    def test_others_stay_when_one_closes(self, tmp_path, served):
        """A worker that ends takes its own socket only."""
        served()
        served("worker-0").close()
        assert ["scheduler"] == [each.role for each in read_statuses(tmp_path).answers]

    def test_what_the_dead_have_left_goes(self, tmp_path, served, monkeypatch):
        """Nobody listens on it, and no server is so slow to start."""
        monkeypatch.setattr(status, "_STALE_S", -1.0)
        served()
        folder = tmp_path / "status"
        listen(folder / "worker-0-1.sock").close()
        (folder / "worker-1-1.sock").write_text("a file")
        with listen(folder / "worker-2-1.sock"):
            server = served("worker-3")
            left = {
                name.split("-")[1] for name in os.listdir(folder) if "worker" in name
            }
        assert {"1", "2", "3"} == left
        server.close()

    def test_a_socket_that_is_young_is_left_alone(self, tmp_path, served):
        """A server has its name a moment before it listens."""
        served()
        path = tmp_path / "status" / "worker-0-1.sock"
        listen(path).close()
        served("worker-3")
        assert path.exists()


class TestSilent:
    def test_who_is_gone_is_passed_over(self, tmp_path, served):
        """A process that was killed leaves its socket, and no trouble."""
        served()
        listen(tmp_path / "status" / "worker-0-1.sock").close()
        found = read_statuses(tmp_path)
        assert (1, []) == (len(found.answers), found.silent)

    def test_who_does_not_answer_is_named(self, tmp_path, served, monkeypatch):
        """A process that was stopped costs a moment and has its name told."""
        monkeypatch.setattr(status, "_ASK_S", 0.05)
        served()
        with listen(tmp_path / "status" / "worker-0-1.sock"):
            found = read_statuses(tmp_path)
        assert ["worker-0-1.sock"] == found.silent

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"\xff\x00",
            b"[" * 100_000,
            b"{}",
            json.dumps({"kind": "other", "v": 1, "role": "x", "pid": 1}).encode(),
            json.dumps({"kind": "ucm-status", "v": 2, "role": "x", "pid": 1}).encode(),
            b'{"role": "worker-0", "pid": 1}' + b" " * (2 << 20),
        ],
        ids=["nothing", "bytes", "nested", "empty", "kind", "version", "endless"],
    )
    def test_an_answer_that_is_none_of_ours_is_named(self, tmp_path, answer):
        """Whatever listens there, the answer is bounded and its shape is checked."""
        folder = tmp_path / "status"
        folder.mkdir(mode=0o700)
        with listen(folder / "worker-0-1.sock") as listener:

            def speak():
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(answer)

            speaker = threading.Thread(target=speak)
            speaker.start()
            found = read_statuses(tmp_path)
            speaker.join(60.0)
        assert ([], ["worker-0-1.sock"]) == (found.answers, found.silent)

    def test_a_slab_without_users_is_an_error(self, tmp_path):
        """There is nobody to ask."""
        with pytest.raises(NoStatusError, match="nothing runs"):
            read_statuses(tmp_path)

    def test_who_asks_with_one_file_to_open_is_told_so(self, tmp_path, served):
        """R-24: a server has no files for a while, as clients come in numbers; what it got then
        was no error of ours, and ended the thread that keeps its gauges fresh."""
        served()
        with (
            files_left(1),
            pytest.raises(NoStatusError, match="Too many open files"),
        ):
            read_statuses(tmp_path)
        assert 1 == len(read_statuses(tmp_path).answers)


class TestSlab:
    def test_a_slab_with_sockets_in_it_is_taken(self, tmp_path):
        """What is served beside its files makes no slab a foreign directory."""
        path = str(tmp_path / "slab")

        def opened():
            return SlabStore(path=path, capacity_bytes=1 << 20, block_bytes=4096)

        with opened() as first:
            server = serve_status(first.directory, "scheduler", told)
            with opened() as second:
                assert first.directory == second.directory
        assert server is not None
        with opened():
            assert 1 == len(read_statuses(tmp_path / "slab").answers)
        server.close()
        assert "status" not in os.listdir(path)

    def test_a_process_without_a_thread_for_it_serves_nobody(self, tmp_path):
        """It goes on, and leaves neither a socket nor a descriptor."""
        with no_threads("ucm-status"):
            before = os.listdir("/proc/self/fd")
            assert serve_status(tmp_path, "worker-0", told, look_s=60.0) is None
            assert before == os.listdir("/proc/self/fd")
        assert [] == os.listdir(tmp_path)

    def test_a_store_that_lies_nowhere_serves_nobody(self):
        """A store in one process has no directory, however it is wrapped."""
        with WrapperStore(MemoryStore(4, 4096)) as store:
            assert serve_status(store.directory, "scheduler", told) is None
