# SPDX-License-Identifier: Apache-2.0
"""
The kinds of engine that are measured beside each other, and the stores they need.

LMCache takes part where it is installed, see ``benchmarks.peers``, and its server can be imported.
"""

import contextlib
import functools
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import attrs

from benchmarks.harness import Note
from benchmarks.peers import has_lmcache
from benchmarks.stores import MEMORY
from tests.e2e.engine import connector_config, process_group

__all__ = [
    "EMPTY",
    "EXAMPLE",
    "LMCACHE",
    "PLAIN",
    "ServedSide",
    "Side",
    "absent",
    "empty",
    "example",
    "has_server",
    "ours",
    "plain",
]

PLAIN, EMPTY = "no connector", "empty connector"
EXAMPLE, LMCACHE = "ExampleConnector", "LMCache server"
_IMPORT_S = 120.0


@attrs.frozen
class Side:
    """
    One kind of engine.

    Args:
        parent: Where its store lies.
        config: Makes the connector's configuration for a store's directory.
    """

    parent: Path
    config: Callable[[Path], dict[str, object] | None]

    @contextlib.contextmanager
    def ready(self) -> Iterator[dict[str, object] | None]:
        """Yield the configuration for one process, over an empty store."""
        with tempfile.TemporaryDirectory(prefix="ucm-engine-", dir=self.parent) as home:
            yield self.config(Path(home))


@attrs.frozen
class ServedSide(Side):
    """
    One whose store is LMCache's server.

    Args:
        chunk_tokens: What the server finds at the least.
    """

    parent: Path = MEMORY
    config: Callable[[Path], dict[str, object] | None] = lambda _: None
    chunk_tokens: int = 128

    @contextlib.contextmanager
    def ready(self) -> Iterator[dict[str, object] | None]:
        """Run the server meanwhile."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = Path(sys.executable).with_name("lmcache")
        options = (
            f"--host 127.0.0.1 --port {port} --http-port {port + 1} "
            f"--chunk-size {self.chunk_tokens} "
            "--l1-size-gb 2 --eviction-policy LRU --disable-observability "
            "--supported-transfer-mode auto"
        )
        with process_group(
            [str(command), "server", *options.split()],
            env={
                "LMCACHE_TRACK_USAGE": "false",
                "LMCACHE_LOG_LEVEL": "WARNING",
                "LMCACHE_DISABLE_BANNER": "1",
            },
        ):
            _await_port(port)
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            }


def _await_port(port: int) -> None:
    limit = time.monotonic() + 60.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)
        else:
            return


def plain(_: Path) -> None:
    """Return that there is no connector."""


def empty(_: Path) -> dict[str, object]:
    """Return what configures a connector that does nothing."""
    return {
        "kv_connector": "EmptyConnector",
        "kv_connector_module_path": "benchmarks.empty_connector",
        "kv_role": "kv_both",
    }


def ours(
    capacity: str = "3GiB", *, kv_role: str = "kv_both", **settings: object
) -> Callable[[Path], dict[str, object]]:
    """Return what configures ours over a slab, with some further settings."""

    def config(home: Path) -> dict[str, object]:
        made = connector_config(type="slab", path=str(home / "slab"), capacity=capacity)
        extra = cast(dict[str, object], made["kv_connector_extra_config"])
        return made | {
            "kv_role": kv_role,
            "kv_connector_extra_config": extra | settings,
        }

    return config


def example(home: Path) -> dict[str, object]:
    """Return what configures ExampleConnector."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(home)},
    }


@functools.cache
def _no_server() -> str:
    """Return why LMCache's server does not run here; empty where it may."""
    if not has_lmcache():
        return "lmcache is not installed"
    command = [sys.executable, "-c", "import lmcache.v1.multiprocess.http_server"]
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return f"it is not imported within {_IMPORT_S:.0f} s"
    except subprocess.CalledProcessError as exc:
        problem = exc.stderr.strip().rpartition("\n")[2]
        return f"it cannot be imported ({problem[:200]})"
    return ""


def has_server() -> bool:
    """Return whether LMCache's server takes part."""
    return not _no_server()


def absent(case: str) -> Iterator[Note]:
    """Say which sides are missing."""
    if problem := _no_server():
        yield Note(case, f"{LMCACHE}: absent, {problem}; no figure.")
