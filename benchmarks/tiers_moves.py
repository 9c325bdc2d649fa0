# SPDX-License-Identifier: Apache-2.0
"""What moves blocks in ``benchmarks.tiers``: an agent over a slab, beside a bare client."""

import asyncio
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import anyio
import attrs
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from xxhash import xxh3_64_intdigest

from benchmarks.harness import (
    Figure,
    Scale,
    Side,
    Told,
    compare,
    make_keys,
    ratio,
    speed,
)
from benchmarks.stores import MEMORY
from benchmarks.tiers_folders import Folders
from ucm.agent.__main__ import collect_rarely
from ucm.agent.calls import ThreadCalls
from ucm.agent.core import AgentCore
from ucm.agent.fetch import Want
from ucm.backends.abc import Backend, Presence
from ucm.backends.files import FilesBackend
from ucm.backends.opening import open_backend
from ucm.backends.watched import WatchedBackend
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.blocks import PackedKey
from ucm.stores.slab import SlabStore

__all__ = [
    "AGENT",
    "BARE",
    "Bare",
    "Blocks",
    "Medium",
    "in_pieces",
    "measure",
    "nothing",
]

AGENT = "agent"
PAGE = 4096
_LIMIT_S = 600.0
_BUDGET = 11
"""Slots for each block: a fetch may take an eighth of them, and two are lent."""
BARE = {
    "disk": "O_DIRECT",
    "files": "plain files",
    "object": "obstore",
    "redis": "redis-py",
    "mooncake": "mooncake client",
}


class Blocks:
    """
    Keys, and slots of a slab for each block: to be written, and to be read into.

    The slots are those of the agent's slab, lent for good: how fast a device moves bytes depends
    on the pages that they lie in, and those of other memory are other ones.

    Args:
        count: How many.
        nbytes: Of each.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.keys: list[PackedKey] = make_keys(0, count)
        self.data: list[memoryview] = []
        self.targets: list[memoryview] = []

    def lie_in(self, slab: SlabStore) -> None:
        """Have the bytes, and room for them, in slots of a slab that are never given back."""
        count, dice = len(self.keys), np.random.default_rng(7)
        for number, views in enumerate((self.data, self.targets), 1):
            keys = make_keys(number * count, count)
            slots = slab.reserve(keys, self.nbytes).slots
            views += [slots.block(at).data for at in range(count)]
            for view in views:
                view[:] = dice.bytes(self.nbytes)

    def __len__(self) -> int:
        return len(self.keys)

    def pieces(self, size: int) -> Iterator[range]:
        """Yield numbers of blocks, so many at a time."""
        for start in range(0, len(self), size):
            yield range(start, min(start + size, len(self)))


class Bare(Protocol):
    """The same bytes without us."""

    async def put(self) -> None:
        """Write all blocks."""

    async def get(self) -> None:
        """Read all blocks."""

    async def clear(self) -> None:
        """Remove what would be in the way of writing them anew."""


def nothing() -> None:
    """Forget nothing."""


@attrs.frozen
class Medium:
    """
    Where blocks go.

    Args:
        name: As the tier's type.
        settings: Of the tier.
        bare: Makes what it is held against; given a *check*, it does that to each block, too.
        others: Further sides by name, which are held against the agent.
        forget: Called before each fetch, of whichever side.
        target: Of the agent, as a share of the bare client.
        folders: In which each spill of a tier that is a folder has a new one; None: what was put is deleted.
    """

    name: str
    settings: dict[str, object]
    bare: Callable[..., Bare]
    others: dict[str, Callable[[Blocks], Bare]] = attrs.Factory(dict)
    forget: Callable[[], None] = nothing
    target: str = ">= 0.85"
    folders: Folders | None = None


async def in_pieces(
    pieces: Iterator[Any], depth: int, ask: Callable[[Any], Awaitable[None]]
) -> None:
    """Ask for all pieces, so many at a time."""

    async def work() -> None:
        for piece in pieces:
            await ask(piece)

    async with asyncio.TaskGroup() as group:
        for _ in range(depth):
            group.create_task(work())


class Agent:
    """
    An agent's core over a slab in memory and one tier; another core for each call.

    A fetch comes to one that serves already, as an agent lives for long; a spill begins with its start.

    Args:
        blocks: What moves.
        settings: Of the tier.
        home: Where the slab lies.
        folders: As a medium has.
    """

    def __init__(
        self,
        blocks: Blocks,
        settings: dict[str, object],
        home: Path,
        folders: Folders | None = None,
    ) -> None:
        self._blocks = blocks
        self._settings = dict(settings)
        self._folders = folders
        self._call = ThreadCalls(4)
        self._slab = SlabStore(
            path=str(home / "slab"),
            capacity_bytes=_BUDGET * len(blocks) * blocks.nbytes + (64 << 20),
            block_bytes=blocks.nbytes,
        )
        self._tier: BreakerBackend
        self._backend: Backend
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the tier, and have room in the slab."""
        await self._open_tier()
        capacity = self._slab.stats().capacity_bytes
        while self._slab.stats().populated_bytes < capacity:  # noqa: ASYNC110
            await anyio.sleep(0.01)  # until then there is room for some blocks only
        self._blocks.lie_in(self._slab)

    async def _open_tier(self) -> None:
        """Open the tier, as a node does."""
        if self._folders is not None:
            self._settings["path"] = str(self._folders.renew(AGENT))
        self._backend = await open_backend(self._settings, "tiers.0")
        guarded = DeadlineBackend(WatchedBackend(self._backend), _LIMIT_S)
        self._tier = BreakerBackend(guarded, clock=time.monotonic)
        await self._tier.register([memory.data for memory in self._slab.buffers])
        if isinstance(self._backend, FilesBackend):
            await self._be_in_use(self._backend)

    async def _be_in_use(self, backend: FilesBackend) -> None:
        """Have all folders of these blocks, and what was there counted."""
        while (await backend.stats()).blocks is None:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        paths = backend._share._paths(self._blocks.keys)  # noqa: SLF001
        for folder in set(map(os.path.dirname, paths)):
            os.makedirs(folder, exist_ok=True)

    async def close(self) -> None:
        """Close tier and slab."""
        with self._call:
            await self._end()
            await self._tier.aclose()
            self._slab.close()

    async def prepare_put(self) -> None:
        """Have all blocks in the slab, and none in the tier."""
        await self.clear()
        blocks = self._blocks
        with self._slab.reserve(blocks.keys, blocks.nbytes) as lease:
            for at, data in enumerate(blocks.data):
                lease.slots.block(at).data[:] = data
            lease.seal(0, len(blocks))
            if lease.commit() != len(blocks):
                raise AssertionError("the slab has no room")

    async def clear(self) -> None:
        """Have no block anywhere."""
        await self._end()
        if self._folders is None:
            await self._backend.delete(self._blocks.keys)
        else:
            await self._tier.aclose()
            await self._open_tier()
        self._slab.clear(b"")

    async def prepare_get(self) -> None:
        """Have no block in the slab, and a core that serves."""
        await self._end()
        self._slab.clear(b"")
        await self._begin()

    async def put(self) -> None:
        """Spill."""
        await self._begin()
        with anyio.fail_after(_LIMIT_S):
            await self._core.drain()
        if self._core.spillers[0].counts.spilled != len(self._blocks):
            raise AssertionError(self._core.totals())
        await self._end()

    async def get(self) -> None:
        """Fetch, as one request's want."""
        keys = self._blocks.keys
        until = anyio.current_time() + _LIMIT_S
        want = Want(keys, [self._blocks.nbytes] * len(keys), until, 0.0)
        with anyio.fail_after(_LIMIT_S):
            await self._core.fetch(want)
        self._core.drop(want)
        if want.found != len(keys):
            raise AssertionError((want.found, want.reason))

    async def _begin(self) -> None:
        """Have a core serve."""
        self._core = AgentCore(self._slab, [self._tier], self._call)
        ready = anyio.Event()
        self._serving = asyncio.create_task(self._core.run(ready.set))
        with anyio.fail_after(_LIMIT_S):
            await ready.wait()

    async def _end(self) -> None:
        """Have the core that serves, if any, do so no more."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None

    async def are_there(self) -> None:
        """See that the tier has all blocks."""
        told = await self._backend.exists(self._blocks.keys)
        if set(told) != {Presence.PRESENT}:
            raise AssertionError(set(told))


def _side(
    portal: BlockingPortal,
    prepare: Callable[[], Awaitable[None]],
    move: Callable[[], Awaitable[None]],
    forget: Callable[[], None] = nothing,
) -> Side:
    def side(_: int) -> Callable[[], object]:
        portal.call(prepare)
        forget()
        return lambda: portal.call(move)

    return side


def measure(medium: Medium, blocks: Blocks, case: str, scale: Scale) -> Told:
    """Measure spill and fetch beside the bare client, in turn; and what they compute."""
    few = scale._replace(repeats=1, samples=min(scale.samples, 3))
    collect_rarely()  # as an agent's process does; so do all that are measured here
    with (
        tempfile.TemporaryDirectory(prefix="ucm-tiers-", dir=MEMORY) as home,
        start_blocking_portal() as portal,
    ):
        agent = Agent(blocks, medium.settings, Path(home), medium.folders)
        portal.call(agent.open)
        bare = BARE[medium.name]
        checked = f"{bare}, hashed"
        others = {
            bare: medium.bare(blocks=blocks),
            checked: medium.bare(blocks=blocks, check=xxh3_64_intdigest),
        }
        others |= {name: make(blocks) for name, make in medium.others.items()}
        puts = {AGENT: _side(portal, agent.prepare_put, agent.put)}
        forget = medium.forget
        gets = {AGENT: _side(portal, agent.prepare_get, agent.get, forget)}
        for name, one in others.items():
            puts[name] = _side(portal, one.clear, one.put)
            gets[name] = _side(portal, _nothing_to_prepare, one.get, forget)
        for verb, sides in (("spill", puts), ("fetch", gets)):
            if verb == "fetch":
                portal.call(agent.are_there)
            named = f"{case}, {verb}"
            times = compare(sides, few)
            yield ratio(times, AGENT, bare, named, medium.target)
            yield ratio(times, AGENT, checked, named)
            for name in medium.others:
                yield ratio(times, AGENT, name, named, ">= 1")
            nbytes = len(blocks) * blocks.nbytes
            for side in times:
                yield speed(times, side, named, nbytes)
            two = {side: sides[side] for side in (AGENT, bare)}
            spent = compare(two, few._replace(samples=1), time.process_time)
            for side, seconds in spent.items():
                values = [1e3 * each / (nbytes / 1e6) for each in seconds]
                yield Figure.over(named, f"{side}, CPU here", "ms/MB", values)
        for one in others.values():
            portal.call(one.clear)
        portal.call(agent.clear)
        portal.call(agent.close)
    del (
        agent,
        others,
        puts,
        gets,
        sides,
        two,
    )  # their views keep a slab of a gigabyte mapped
    gc.collect()  # which happens rarely here


async def _nothing_to_prepare() -> None:
    """Prepare nothing."""
