# SPDX-License-Identifier: Apache-2.0
"""A cluster of real Valkey servers, and a backend on it."""

import contextlib
from itertools import pairwise

import redis

from tests.backends.servers import LIMIT_S, redis_server
from ucm.backends.redis import RedisBackend

__all__ = ["cluster", "open_cluster"]


async def open_cluster(port, timeout=LIMIT_S):
    """Open a cluster by one of its servers."""
    given = {"url": f"redis://127.0.0.1:{port}/0", "cluster": True, "timeout": timeout}
    return await RedisBackend.open_configured(given, "tiers.0")


@contextlib.contextmanager
def cluster(folder, *, num_primaries=2, with_replica=False):
    """Run servers that share the slots, and maybe one that follows the first."""
    wants = ["--cluster-enabled", "yes", "--cluster-node-timeout", "60000"]
    wants += [
        "--cluster-require-full-coverage",
        "no",
        "--repl-diskless-sync-delay",
        "0",
        "--enable-debug-command",
        "local",
    ]
    with contextlib.ExitStack() as stack:
        servers, ports, clients = [], [], []
        for name in "abcd"[: num_primaries + with_replica]:
            (folder / name).mkdir()
            server, port = stack.enter_context(redis_server(folder / name, *wants))
            servers.append(server)
            ports.append(port)
            clients.append(stack.enter_context(redis.Redis(port=port)))
        primaries = clients[:num_primaries]
        bounds = [16384 * at // num_primaries for at in range(num_primaries + 1)]
        for client, (start, stop) in zip(primaries, pairwise(bounds), strict=True):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", start, stop - 1)
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        server.await_ready(
            lambda: all(_knows(client, num_primaries, len(ports)) for client in clients)
        )
        if with_replica:
            number = clients[0].execute_command("CLUSTER", "MYID")
            clients[-1].execute_command("CLUSTER", "REPLICATE", number)
            server.await_ready(lambda: "up" == clients[-1].info()["master_link_status"])
        yield servers, ports, clients


def _knows(client, size, count):
    told = client.execute_command("CLUSTER", "INFO")
    words = (b"cluster_state:ok\r", b"cluster_size:%d\r", b"cluster_known_nodes:%d\r")
    return all(word in told for word in (words[0], words[1] % size, words[2] % count))
