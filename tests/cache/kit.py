# SPDX-License-Identifier: Apache-2.0
"""A host with blocks in numpy arrays, and the library around them, for tests."""

import contextlib
import importlib.util
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import anyio
import attrs
import numpy as np
import pytest

import ucm
from tests.kit.lockstep import Tracer
from tests.rig import check_run
from ucm.agent.client import AgentClient
from ucm.blocks import ShardId
from ucm.cache.aio import Cache, Opening
from ucm.cache.core import Core
from ucm.config import UCMConfig
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.pipeline.save import OwnStages
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultDevice, FaultPlan, FaultStore
from ucm.threads import SYSTEM, Threads

NUM_BLOCKS = 64
TOKENS = 16
PAGE_SHAPE = (2, TOKENS, 8)
LAYERS = ("a", "b", "c")
LAYOUT = ucm.paged_layout(
    dict.fromkeys(LAYERS, int(np.prod(PAGE_SHAPE))), block_tokens=TOKENS
)
KEYSPACE = ucm.keyspace_of(
    LAYOUT, model="m", weights="w", kv_dtype="uint8", engine="test"
)
HASHER = ucm.PrefixHasher(KEYSPACE, TOKENS)
LIMIT_S = 120.0

trio = pytest.param(
    "trio",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("trio") is None, reason="trio is not installed"
    ),
)
both_loops = pytest.mark.parametrize("loop", ["asyncio", trio])


def keys_of(num_blocks: int, seed: int = 0) -> list[bytes]:
    """Return the keys of a prompt of its own."""
    return HASHER.keys([seed, *range(1, num_blocks * TOKENS)])


def span_of(**kwargs: object) -> dict[str, object]:
    """Return settings under which a ticket carries two blocks."""
    return {**kwargs, "queue": {"span_bytes": 2 * LAYOUT.max_block_bytes}}


@attrs.define
class Host:
    """
    A host's memory, and what its cache is made of.

    Args:
        plan: What fails or waits, and when.
        config: Settings.
        capacity: Of the store, in blocks.
        make_device: Over its memory.
        threads: Where the clock comes from.
        own: Stages of the host's own.
        make_client: Of an agent.
    """

    plan: FaultPlan = attrs.Factory(FaultPlan)
    config: dict[str, object] = attrs.Factory(dict)
    capacity: int = 256
    make_device: Callable[[], Device] = CPUDevice
    threads: Threads = SYSTEM
    own: OwnStages | None = None
    make_client: Callable[[], AgentClient | None] = lambda: None
    pool: dict[str, np.ndarray] = attrs.field(init=False)
    store: MemoryStore = attrs.field(init=False)
    tracer: Tracer = attrs.Factory(Tracer)
    core: Core | None = None

    def __attrs_post_init__(self) -> None:
        shape = (NUM_BLOCKS, *PAGE_SHAPE)
        rng = np.random.default_rng(1)
        self.pool = {
            name: rng.integers(0, 256, shape, dtype=np.uint8) for name in LAYERS
        }
        self.store = MemoryStore(self.capacity, LAYOUT.max_block_bytes)

    def open_core(self) -> tuple[Core, contextlib.ExitStack]:
        """Open a cache as ``ucm.open`` does, with faults and a log that is checked."""
        device = FaultDevice(self.make_device(), self.plan)
        device.register(LAYOUT, self.pool)
        self.core = Core(
            UCMConfig.from_mapping(self.config),
            LAYOUT,
            device,
            KEYSPACE,
            FaultStore(self.store, self.plan),
            shard=ShardId(0),
            log=self.tracer.log,
            threads=self.threads,
            before_commit=self.own,
            client=self.make_client(),
        )
        opened = contextlib.ExitStack()
        opened.callback(self.core.close)
        self.core.open()
        return self.core, opened

    @contextlib.asynccontextmanager
    async def cache(self) -> AsyncIterator[Cache]:
        """Yield an open cache; not for ever."""
        with anyio.fail_after(LIMIT_S):
            async with Opening(self.open_core) as cache:
                yield cache

    def content(self, blocks: range) -> bytes:
        """Return the bytes of blocks, layer by layer."""
        part = slice(blocks.start, blocks.stop)
        return b"".join(self.pool[name][part].tobytes() for name in LAYERS)

    def join(self) -> None:
        """Wait for threads that a close had no time for."""
        core = self.core
        assert core is not None
        core._serving.join(LIMIT_S)
        assert core._runtime._pipeline.join_threads(LIMIT_S)
        assert core._questions._thread.join(LIMIT_S)

    def check_left(self) -> None:
        """Check that a closed cache has left nothing, and that its log is sound."""
        core = self.core
        assert core is not None
        assert 0 == core._runtime.num_open
        assert 0 == len(core._users)
        assert 0 == core._room.num_waiting
        assert (0, 0) == (core._room._items, core._room._nbytes)
        assert {} == core._open
        assert {} == core._questions._asked
        if (client := core.fetches._client) is not None:
            client._thread.join(LIMIT_S)
            assert {0} == set(client.counts().values())
        assert set() == our_threads()
        config = UCMConfig.from_mapping(self.config)
        check_run(self.tracer, config, core._counters)


def our_threads() -> set[str]:
    """Return the names of threads of ours that run, but for those that no cache has."""
    names = {each.name for each in threading.enumerate() if each.name[:4] == "ucm-"}
    return names - {"ucm-health", "ucm-disk", "ucm-files"}


def run(loop: str, main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine on a loop; not for ever."""

    async def limited() -> None:
        with anyio.fail_after(LIMIT_S):
            await main()

    anyio.run(limited, backend=loop)


@contextlib.contextmanager
def leaving_nothing(host: Host) -> Iterator[None]:
    """Check behind the block what the host's cache has left."""
    yield
    host.check_left()
