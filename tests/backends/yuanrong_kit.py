# SPDX-License-Identifier: Apache-2.0
"""
A real worker of yuanrong's data system on loopback, and a client that knows nothing of blocks.

Run as a script it is that client: its native code has a process of its own.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.backends.servers import Server
from tests.ports import free_ports

__all__ = ["Looker", "why_not", "worker"]

_LIMIT_S = 120


def why_not() -> str:
    """Return why no worker can run here, if so."""
    tried = subprocess.run(
        [sys.executable, "-c", "import yr.datasystem.kv_client"],
        capture_output=True,
        timeout=_LIMIT_S,
        check=False,
    )
    lack = "no openyuanrong-datasystem wheel: "
    return lack + tried.stderr[-300:].decode() if tried.returncode else ""


@contextlib.contextmanager
def worker(shared_memory_mb=64):
    """Run a worker with its own metadata service; yields it and its address."""
    place = Path(
        importlib.util.find_spec("yr.datasystem").submodule_search_locations[0]
    )
    port, metadata = free_ports(2)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="ucm-yr-") as home:  # of a short name
        ready = Path(home, "ready")
        libraries = f"LD_LIBRARY_PATH={place / 'lib'}"
        flags = {
            "worker_address": address,
            "bind_address": address,
            "master_address": address,
            "metastore_address": f"127.0.0.1:{metadata}",
            "start_metastore_service": "true",
            "shared_memory_size_mb": shared_memory_mb,
            "log_dir": f"{home}/log",
            "unix_domain_socket_dir": f"{home}/u",
            "rocksdb_store_dir": f"{home}/db",
            "ready_check_path": ready,
            "log_monitor": "false",
        }
        given = [f"--{name}={value}" for name, value in flags.items()]
        command = ["env", libraries, str(place / "datasystem_worker"), *given]
        server = Server(command, Path(home, "worker.log"))
        try:
            server.await_ready(ready.exists)
            yield server, address
        finally:
            server.kill()


class Looker:
    """
    Looks at what is stored.

    Args:
        address: The worker's.
    """

    def __init__(self, address):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.yuanrong_kit", *address.split(":")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def get(self, name):
        """Return what is there; None: nothing."""
        self._say("get", name, "")
        told = json.loads(self._process.stdout.readline())
        return None if told is None else bytes.fromhex(told)

    def replace(self, name, raw):
        """Have something else there; nothing where it would be empty."""
        self._say("set", name, raw.hex())
        assert json.loads(self._process.stdout.readline())

    def _say(self, *said):
        print(json.dumps(said), file=self._process.stdin, flush=True)

    def close(self):
        """End it."""
        self._process.kill()
        self._process.communicate()


def _look(host, port):
    from yr.datasystem import KVClient

    client = KVClient(host, int(port), connect_timeout_ms=60_000)
    client.init()
    for line in sys.stdin:
        verb, name, text = json.loads(line)
        told = None
        if verb == "set":
            client.delete([name])
            if text:
                client.set(name, bytes.fromhex(text))
            told = True
        elif client.exist([name]) == [True]:
            told = client.get([name])[0].hex()
        sys.stdout.write(f"{json.dumps(told)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _look(*sys.argv[1:])
    os._exit(0)
