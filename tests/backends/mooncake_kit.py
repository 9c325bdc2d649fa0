# SPDX-License-Identifier: Apache-2.0
"""
A real Mooncake Store on a loopback of its own, and its client's library that Debian has.

Clients and nodes listen at every address, and what is native may end its process. So whoever
looks at them does it in a process with a network of its own, where there is nobody else.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.backends.servers import Server
from tests.ports import free_ports

__all__ = ["Cluster", "cluster", "run_inside", "why_not"]

_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_LIMIT_S = 540


class Cluster:
    """
    A master and nodes, each a process.

    Args:
        folder: Of logs.
        segments: Bytes that each node lends.
        lease_ms: How long what was read or found stays.
    """

    def __init__(self, folder: Path, segments=(64 << 20, 64 << 20), lease_ms=10_000):
        port, metrics = free_ports(2)
        self.master_address = f"127.0.0.1:{port}"
        self.master = Server(
            [
                str(Path(sys.executable).with_name("mooncake_master")),
                *("-rpc_address", "127.0.0.1", "-rpc_port", str(port)),
                *("-metrics_host", "127.0.0.1", "-metrics_port", str(metrics)),
                *("-default_kv_lease_ttl", f"{lease_ms}ms", "-client_ttl", "3"),
            ],
            folder / "master.log",
        )
        self.master.await_ready(lambda: self._is_served(port))
        self.nodes = []
        for at, nbytes in enumerate(segments):
            log = folder / f"node-{at}.log"
            command = [sys.executable, "-m", "examples.cluster.node"]
            command += ["--master", self.master_address, "--bytes", str(nbytes)]
            node = Server(command, log)
            node.await_ready(lambda log=log: "ready" in log.read_text())
            self.nodes.append(node)

    def _is_served(self, port):
        with contextlib.suppress(OSError), socket.socket() as asked:
            asked.settimeout(1)
            return asked.connect_ex(("127.0.0.1", port)) == 0
        return False

    def close(self):
        """End them."""
        for server in (*self.nodes, self.master):
            server.kill()


@contextlib.contextmanager
def cluster(folder: Path, **wanted):
    """Run a cluster for a while."""
    made = Cluster(folder, **wanted)
    try:
        yield made
    finally:
        made.close()


def _libraries(folder: Path) -> str:
    """Return where the client's library lies, empty if the system has it."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        return ""
    if shutil.which("apt-get") is None:
        raise FileNotFoundError("libibverbs1 is not here, nor apt-get to download it")
    commands = [["apt-get", "download", *_PACKAGES]]
    commands += [["sh", "-c", f"dpkg -x {name}_*.deb files"] for name in _PACKAGES]
    for command in commands:
        subprocess.run(
            command, check=True, cwd=folder, timeout=120, capture_output=True
        )
    found = {str(one.parent) for one in folder.glob("files/**/*.so.*")}
    return ":".join(sorted(found))


def why_not(folder: Path) -> tuple[str, dict[str, str]]:
    """Return why no store can run here, if so; and the environment that it needs."""
    try:
        libraries = _libraries(folder)
    except (OSError, subprocess.SubprocessError) as exc:
        return f"libibverbs1 cannot be had: {exc}", {}
    environment = os.environ | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
    for command, lack in (
        (["unshare", "-rn", "true"], "no network of one's own"),
        ([sys.executable, "-c", "import mooncake.store"], "no mooncake wheel"),
    ):
        tried = subprocess.run(
            command, env=environment, capture_output=True, timeout=120, check=False
        )
        if tried.returncode:
            return f"{lack}: {tried.stderr[-300:].decode()}", {}
    return "", environment


def run_inside(environment: dict[str, str], *arguments: str) -> str:
    """
    Run tests within a network and a directory of their own; return what pytest said.

    In a directory that they share, two runs that end at once stumble over what either of
    them clears away, and report it as an error.
    """
    command = ["unshare", "-rn", sys.executable, "-m", "tests.own_network", "pytest"]
    command += ["-p", "no:cacheprovider", "-n", "2", "-q"]
    with tempfile.TemporaryDirectory(prefix="ucm-") as folder:
        done = subprocess.run(
            [*command, "--basetemp", f"{folder}/t", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    return (
        f"{done.stdout[-20_000:]}\n{done.stderr[-2000:]}\nends with {done.returncode}"
    )
