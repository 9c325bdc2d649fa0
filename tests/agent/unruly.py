# SPDX-License-Identifier: Apache-2.0
"""A backend that fails, hangs, reorders and lies, and a core over a slab to meet it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import attrs

from tests.clocks import LeapingLoop
from ucm.agent.admission import Admission
from ucm.agent.calls import Blocking
from ucm.agent.core import AgentCore
from ucm.agent.wants import Want
from ucm.backends.abc import Fetched, Presence, Sealed, Verdict, block_checksum
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.blocks import PackedKey
from ucm.stores.slab import SlabStore
from ucm.testing.store_blocks import BLOCK_BYTES, payload

__all__ = [
    "TIMEOUT_S",
    "Behaviour",
    "Unruly",
    "guarded",
    "inline",
    "lay",
    "open_core",
    "run_virtual",
    "want_of",
]

TIMEOUT_S = 2.0
_T = TypeVar("_T")


@attrs.define
class Behaviour:
    """What each call does to whoever waits; a test changes it as it goes."""

    delay: float = 0.0
    hangs: bool = False
    is_stuck: bool = False
    """Hangs where it cannot be cancelled, until it is set free."""
    is_down: bool = False
    takes_nothing: bool = False
    fails_get: bool = False
    lies_present: bool = False
    flips: bool = False
    keeps: bool = True
    """Whether what is put is there afterwards."""


class Unruly(MemoryBackend):
    """The model of a backend, with a will of its own."""

    def __init__(
        self,
        shelf: Shelf | None = None,
        in_flight: int = 2,
        **can: object,
    ) -> None:
        super().__init__(shelf or Shelf(1 << 20))
        self._can = can
        self.does = Behaviour()
        self.asked: list[str] = []
        self.got: list[PackedKey] = []
        self._in_flight = in_flight
        self.free = anyio.Event()

    @property
    def capabilities(self):
        """As of memory, in small batches."""
        return attrs.evolve(
            super().capabilities,
            batch_blocks=4,
            in_flight=self._in_flight,
            **self._can,
        )

    async def _come(self, verb: str) -> bool:
        """Take the time that it takes; return whether to answer well."""
        self.asked.append(verb)
        if self.does.hangs:
            await anyio.sleep_forever()
        await anyio.sleep(self.does.delay)
        return not self.does.is_down

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look, or lie."""
        if not await self._come("exists"):
            return [Presence.UNKNOWN] * len(keys)
        if self.does.lies_present:
            return [Presence.PRESENT] * len(keys)
        return await super().exists(keys)

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Get, or spoil."""
        if not await self._come("get") or self.does.fails_get:
            return [Fetched(Verdict.UNAVAILABLE)] * len(keys)
        self.got += keys
        if self.does.is_stuck:
            with anyio.CancelScope(shield=True):
                await self.free.wait()
        answers = await super().get(keys, targets)
        if self.does.flips:
            for target in targets:
                target[0] ^= 1
        return answers

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Put, or pretend to."""
        if not await self._come("put") or self.does.takes_nothing:
            return [Verdict.UNAVAILABLE] * len(blocks)
        if not self.does.keeps:
            return [Verdict.DONE] * len(blocks)
        if not self.capabilities.verifies:
            return await super().put(blocks)
        return [
            (await MemoryBackend.put(self, [each]))[0]
            if each.checksum == block_checksum(each.key, each.data)
            else Verdict.GARBAGE
            for each in blocks
        ]


def guarded(backend: Unruly) -> BreakerBackend:
    """Return what the agent has of a tier."""
    return BreakerBackend(DeadlineBackend(backend, TIMEOUT_S), clock=anyio.current_time)


def run_virtual(function: Callable[[], Awaitable[_T]]) -> _T:
    """Run a coroutine function in virtual time; return what it returns."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(function())


async def inline(function: Callable[[], _T]) -> _T:
    """Carry a blocking call out here and now, but let others run before."""
    await anyio.lowlevel.checkpoint()
    return function()


async def lay(backend: MemoryBackend, keys: Sequence[PackedKey]) -> None:
    """Have blocks in a backend, past whatever it does."""
    blocks = [payload(key) for key in keys]
    sealed = [
        Sealed(key, memoryview(data), block_checksum(key, data))
        for key, data in zip(keys, blocks, strict=True)
    ]
    await MemoryBackend(backend.shelf).put(sealed)


def want_of(
    keys: Sequence[PackedKey],
    seconds: float = 10.0,
    hold_s: float = 10.0,
    **terms: object,
) -> Want:
    """Return a want of blocks, from now on."""
    sizes = [BLOCK_BYTES] * len(keys)
    return Want(keys, sizes, anyio.current_time() + seconds, hold_s, **terms)


class OpenCore:
    """A core at work; use ``open_core``."""

    def __init__(
        self,
        store: SlabStore,
        backends: Sequence[Unruly],
        most_waiting: int,
        rules: Sequence[Admission] = (),
        call: Blocking = inline,
    ) -> None:
        self.store = store
        self.tiers = [guarded(backend) for backend in backends]
        self.core = AgentCore(
            store, self.tiers, call, most_waiting=most_waiting, rules=rules
        )
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> AgentCore:
        await self._tasks.__aenter__()
        ready = anyio.Event()
        self._tasks.start_soon(self.core.run, ready.set)
        await ready.wait()
        return self.core

    async def __aexit__(self, *what: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(*what)


def open_core(
    store: SlabStore,
    *backends: Unruly,
    most_waiting: int = 1 << 10,
    rules: Sequence[Admission] = (),
    call: Blocking = inline,
) -> OpenCore:
    """Return a core over these tiers, as an asynchronous context manager."""
    return OpenCore(store, backends, most_waiting, rules, call)
