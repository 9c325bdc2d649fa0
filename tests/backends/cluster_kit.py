# SPDX-License-Identifier: Apache-2.0
"""A cluster of real Valkey servers, and a backend on it."""

import contextlib

import redis

from tests.backends.servers import LIMIT_S, redis_server
from ucm.backends.redis import RedisBackend

__all__ = ["cluster", "open_cluster"]


async def open_cluster(port, timeout=LIMIT_S):
    """Open a cluster by one of its servers."""
    given = {"url": f"redis://127.0.0.1:{port}/0", "cluster": True, "timeout": timeout}
    return await RedisBackend.open_configured(given, "tiers.0")


@contextlib.contextmanager
def cluster(folder, *, with_replica=False):
    """Run two servers that share the slots, and maybe one that follows the first."""
    wants = ["--cluster-enabled", "yes", "--cluster-node-timeout", "60000"]
    wants += [
        "--cluster-require-full-coverage",
        "no",
        "--repl-diskless-sync-delay",
        "0",
    ]
    with contextlib.ExitStack() as stack:
        servers, ports, clients = [], [], []
        for name in "abc" if with_replica else "ab":
            (folder / name).mkdir()
            server, port = stack.enter_context(redis_server(folder / name, *wants))
            servers.append(server)
            ports.append(port)
            clients.append(stack.enter_context(redis.Redis(port=port)))
        for client, slots in zip(clients, ((0, 8191), (8192, 16383)), strict=False):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        server.await_ready(
            lambda: all(_knows(client, len(ports)) for client in clients)
        )
        if with_replica:
            number = clients[0].execute_command("CLUSTER", "MYID")
            clients[2].execute_command("CLUSTER", "REPLICATE", number)
            server.await_ready(lambda: "up" == clients[2].info()["master_link_status"])
        yield servers, ports, clients


def _knows(client, count):
    told = client.execute_command("CLUSTER", "INFO")
    nodes = b"cluster_known_nodes:%d\r" % count
    return all(word in told for word in (b"cluster_state:ok", b"cluster_size:2", nodes))
