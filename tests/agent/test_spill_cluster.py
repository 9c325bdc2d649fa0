# SPDX-License-Identifier: Apache-2.0
"""What an agent spills to a cluster of which a server takes nothing."""

import time

import anyio
import pytest

from tests.agent.unruly import inline
from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import LIMIT_S
from tests.stores.slab_kit import open_slab
from ucm.agent.core import AgentCore
from ucm.backends.redis import name_of
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys, save

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


async def test_server_that_takes_nothing_has_others_take_what_is_theirs(tmp_path):
    """X-14, R-55: whatever it refuses, in as many calls; each block has one end. It takes its own again once it
    takes anything."""
    keys = make_keys(48)
    with open_slab(tmp_path / "slab", 64) as slab, cluster(tmp_path) as (_, ports, two):
        slots = [
            two[0].execute_command(
                "CLUSTER", "KEYSLOT", name_of(b"ucm:", k, 0, is_cluster=True)
            )
            for k in keys
        ]
        two[1].config_set("min-replicas-to-write", 1)
        backend = await open_cluster(ports[0])
        ahead = [0.0]
        backend._servers._clock = lambda: time.monotonic() + ahead[0]
        tier = BreakerBackend(
            DeadlineBackend(backend, 2 * LIMIT_S), clock=time.monotonic
        )
        core = AgentCore(slab, [tier], inline)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(core.run)
            for at in range(0, 40, 4):
                save(slab, keys[at : at + 4])
                await core.drain()
            counts = core.spillers[0].counts
            num_first = sum(slot <= 8191 for slot in slots[:40])
            assert num_first == counts.spilled
            assert {Reason.UNAVAILABLE: 40 - num_first} == counts.dropped
            assert (False, [f"127.0.0.1:{ports[1]}"]) == (tier.refuses, tier.refusing)
            two[1].config_set("min-replicas-to-write", 0)
            ahead[0] = 100.0
            save(slab, keys[40:])
            await core.drain()
            assert (num_first + 8, []) == (counts.spilled, tier.refusing)
            tasks.cancel_scope.cancel()
        await backend.aclose()
