# SPDX-License-Identifier: Apache-2.0
"""
The agent's process: one slab, its tiers, the socket, and when it ends.

One agent per slab, by a lock on a file beside it. It outlives the engine that started it,
because others share it and because the backlog is still to be spilled; it ends when no
engine has been there for a while and nothing waits, when the slab's files are gone, or its own
socket, at which nobody finds it any more, or when it is told to (SIGTERM): then it takes no further
wants and spills for a bounded time.
"""

import fcntl
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import BrokenResourceError
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup

from ucm.agent.address import Address
from ucm.agent.admission import admission_of
from ucm.agent.calls import ThreadCalls
from ucm.agent.connection import Connection
from ucm.agent.core import AgentCore
from ucm.agent.feeding import feed_slab, feed_tiers
from ucm.agent.ledger import Ledger
from ucm.agent.protocol import LOCK_NAME, digest_of
from ucm.agent.troubles import ServerTroubles, Troubles, servers_of
from ucm.backends.opening import open_backend
from ucm.backends.watched import WatchedBackend
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.config import UCMConfig
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.status import peer_uid
from ucm.stores.abc import Store
from ucm.stores.opening import open_store
from ucm.tracing import (
    AGENT_ENDED,
    AGENT_REFUSED,
    AGENT_STARTED,
    SUMMARY,
    TIER_ANSWERS,
    TIER_SILENT,
    Log,
)

__all__ = ["AgentLock", "Node"]

_THREADS: Final = 4
_SUMMARY_S: Final = 60.0
_LOOK_S: Final = 0.5
_MOST_PEERS: Final = 256
_MOST_HOLDER: Final = 32
_REFUSED_S: Final = 0.2
"""Until a peer is looked for again where the system gave no descriptor for one."""


class AgentLock:
    """
    The right to be a slab's agent; the kernel takes it back from who dies.

    Args:
        directory: The slab's, which there is.

    Raises:
        BlockingIOError: There is an agent; its text says which process that is.
        OSError: The file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(directory / LOCK_NAME, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, _MOST_HOLDER, 0).decode("ascii", "replace")
            os.close(self._fd)
            whose = f"process {holder}" if holder.isdecimal() else "another process"
            raise BlockingIOError(f"{whose} is the agent of {directory}") from exc
        except OSError:
            os.close(self._fd)
            raise
        with suppress(OSError):  # no room; the next one is told of "another process"
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d" % os.getpid(), 0)

    def close(self) -> None:
        """Give it back."""
        os.close(self._fd)


class Node:
    """
    Serves the engines of one slab.

    Args:
        config: The slab and its tiers, as the engine has them.
        log: The agent's.
        linger_s: How long it stays when no engine is there; None: until it is told.
        on_end: Called once when it begins to end.
    """

    def __init__(
        self,
        config: UCMConfig,
        log: Log,
        linger_s: float | None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._log = log
        self._linger_s = linger_s
        self._on_end = on_end
        self._nonce = secrets.token_hex(8)
        self._call = ThreadCalls(_THREADS)
        self._tiers: list[BreakerBackend] = []
        self._watched: list[WatchedBackend] = []
        self._cores: dict[int, AgentCore] = {}
        """By size of slots: each sees the changes of its own."""
        self._slots_of: dict[int, int] = {}
        """Their size, by that of blocks as engines say it: several have slots of one class."""
        self._ledger: Ledger | None = None
        self._opening = anyio.Lock()
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._num_engines = 0
        self._left_at = time.monotonic()
        self._troubles = Troubles(log, time.monotonic)
        self._servers = ServerTroubles(log)
        self._told: Counter[str] = Counter()
        self._told_at = time.monotonic()
        self._is_told_to_end = anyio.Event()

    async def run(self) -> None:
        """
        Serve until there is nothing more to do here, or a signal says so.

        Raises:
            ConfigError: A tier cannot be used.
        """
        async with self._stack:
            self._stack.enter_context(self._call)
            await self._open_tiers()
            try:
                address = Address(Path(self._config.store.path))
                self._stack.callback(address.close)  # before the lock goes
                listener = await address.listen()
            except FileNotFoundError as exc:  # removed since it was found
                self._on_end()
                why = f"its slab is gone: {exc}"
                self._log.info(AGENT_ENDED, pid=os.getpid(), error=why)
                return
            self._stack.push_async_callback(listener.aclose)
            self._log.info(AGENT_STARTED, media=self._media, pid=os.getpid())
            why = ""
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._obey_signals)
                self._tasks.start_soon(self._summarize)
                for tier in self._tiers:
                    self._tasks.start_soon(tier.attend)
                accepting = anyio.CancelScope()
                self._tasks.start_soon(self._accept, listener, accepting)
                try:
                    why = await self._stay(address)
                finally:
                    self._on_end()
                accepting.cancel()
                with anyio.move_on_after(self._config.timeout.shutdown):
                    for core in list(self._cores.values()):  # others may still come
                        await core.drain()
                self._tell_troubles()
                self._tell_totals()
                self._tasks.cancel_scope.cancel()
        self._log.info(AGENT_ENDED, pid=os.getpid(), **({"error": why} if why else {}))

    async def _open_tiers(self) -> None:
        limit = self._config.timeout.tier
        for number, settings in enumerate(self._config.tiers):
            backend = await open_backend(settings, f"tiers.{number}")
            self._stack.push_async_callback(backend.aclose)
            if limit <= (seconds := backend.capabilities.gives_up_s):
                raise ConfigError(
                    f"tiers.{number}.timeout",
                    seconds,
                    f"timeout.tier is {limit}, which ends each request before",
                    "Give less, or raise timeout.tier.",
                )
            self._watched.append(WatchedBackend(backend))
            bug = partial(self._troubles.tell_bug, number, backend.capabilities.medium)
            guarded = DeadlineBackend(self._watched[-1], limit, bug)
            self._tiers.append(
                BreakerBackend(
                    guarded,
                    clock=time.monotonic,
                    hung_s=2 * limit,
                    tell=partial(self._tell_tier, number, {}),
                    tell_writes=partial(self._tell_tier, number, {"direction": "save"}),
                )
            )

    # Peers.

    async def _accept(self, listener: SocketListener, scope: anyio.CancelScope) -> None:
        is_told = False
        with scope:
            async with anyio.create_task_group() as peers:
                while True:
                    try:
                        stream = await listener.accept()
                    except BrokenResourceError as exc:  # too many open files, mostly
                        if not is_told:
                            error = f"a peer cannot be taken now: {exc.__cause__}"
                            self._log.warning(AGENT_REFUSED, error=error)
                        is_told = True
                        await anyio.sleep(_REFUSED_S)
                        continue
                    is_told = False
                    peers.start_soon(self._serve_peer, stream)

    async def _serve_peer(self, stream: SocketStream) -> None:
        async with stream:
            uid = peer_uid(stream.extra(SocketAttribute.raw_socket))
            if uid != os.geteuid():
                self._log.warning(AGENT_REFUSED, error=f"a process of user {uid}")
                return
            self._num_engines += 1
            tiers = digest_of(self._config.tiers)
            peer = Connection(
                *(stream, self._core_of, self._status, self._media),
                *(self._keep_ledger, tiers, self._nonce),
            )
            try:
                if problem := await peer.serve():
                    self._log.warning(AGENT_REFUSED, error=problem)
            finally:
                self._num_engines -= 1
                if peer.is_engine:  # who only looks, or is refused, keeps nobody here
                    self._left_at = time.monotonic()

    async def _core_of(self, block_bytes: int) -> AgentCore:
        """Return what serves the class of slots for such blocks; opens the slab for it if need be."""
        if self._num_engines > _MOST_PEERS:
            # In words: who is left without one starts another agent, again and again.
            problem = f"the agent serves {_MOST_PEERS} engines, no more"
            raise StoreUnavailableError(problem)
        async with self._opening:
            if (slot_bytes := self._slots_of.get(block_bytes, 0)) not in self._cores:
                store = await self._call(
                    lambda: open_store(
                        self._config.store, block_bytes=block_bytes, index_only=False
                    )
                )
                slot_bytes = store.capabilities.max_block_bytes
                if slot_bytes in self._cores:
                    await self._call(store.close)
                else:
                    self._stack.callback(store.close)
                    await self._start(slot_bytes, store)
                self._slots_of[block_bytes] = slot_bytes
            return self._cores[slot_bytes]

    async def _start(self, slot_bytes: int, store: Store) -> None:
        for tier in self._tiers:
            await tier.register([memory.data for memory in store.buffers])
        rules = [
            admission_of(settings, f"tiers.{number}")
            for number, settings in enumerate(self._config.tiers)
        ]
        core = AgentCore(store, self._tiers, self._call, rules=rules)
        assert self._tasks is not None
        self._cores[slot_bytes] = core
        if self._ledger is not None:
            self._tasks.start_soon(feed_slab, self._ledger, store, self._call)
        ready = anyio.Event()
        self._tasks.start_soon(self._run_core, slot_bytes, core, ready)
        await ready.wait()

    async def _run_core(
        self, slot_bytes: int, core: AgentCore, ready: anyio.Event
    ) -> None:
        try:
            await core.run(ready.set)
        finally:
            del self._cores[slot_bytes]
        # Its slab is lost: engines that start anew get another one, and another agent.
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()

    def _keep_ledger(self) -> Ledger:
        """Return the node's ledger; it begins when somebody wants it."""
        if self._ledger is None:
            assert self._tasks is not None
            self._ledger = Ledger(1 + len(self._tiers))
            self._tasks.start_soon(feed_tiers, self._ledger, self._watched)
            for core in self._cores.values():
                self._tasks.start_soon(feed_slab, self._ledger, core.store, self._call)
        return self._ledger

    # When it ends.

    async def _stay(self, address: Address) -> str:
        """Return when nobody needs the agent any more, or finds it: then why."""
        self._left_at = time.monotonic()
        while not self._is_told_to_end.is_set():
            with anyio.move_on_after(_LOOK_S):
                await self._is_told_to_end.wait()
            self._tell_troubles()
            self._servers.look(self._tiers)
            if why := address.why_lost():
                return why
            is_idle = all(core.is_idle for core in self._cores.values())
            if self._num_engines or not is_idle or self._linger_s is None:
                continue
            if time.monotonic() - self._left_at > self._linger_s:
                break
        return ""

    async def _obey_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                self._is_told_to_end.set()

    # What it tells.

    @property
    def _media(self) -> list[str]:
        return [tier.capabilities.medium for tier in self._tiers]

    def _tell_tier(self, number: int, more: dict[str, str], seconds: float) -> None:
        tier = self._tiers[number]
        of_tier = {"tier": number, "medium": tier.capabilities.medium}
        if seconds:
            if tier.trouble:
                more = more | {"error": tier.trouble}
            self._log.warning(TIER_SILENT, **of_tier, **more, seconds=seconds)
        else:
            self._log.info(TIER_ANSWERS, **of_tier, **more)

    async def _status(self) -> dict[str, object]:
        tiers: list[dict[str, object]] = []
        for tier in self._tiers:
            # Past the breaker: who looks on is no proof that blocks come and go.
            told = {} if tier.is_open else msgspec.to_builtins(await tier.inner.stats())
            told |= {"medium": tier.capabilities.medium}
            told |= {"silent": tier.is_open, "refuses": tier.refuses}
            tiers.append(told | servers_of(tier))
        slots = {str(size): core.totals() for size, core in self._cores.items()}
        ledger = {} if self._ledger is None else {"ledger": self._ledger.told()}
        return ledger | {
            "pid": os.getpid(),
            "nonce": self._nonce,
            "media": self._media,
            "tiers": tiers,
            "slots": slots,
        }

    def _tell_troubles(self) -> None:
        totals: Counter[tuple[int, Reason]] = Counter()
        for core in self._cores.values():
            totals.update(core.troubles())
        self._troubles.look(self._media, totals)

    async def _summarize(self) -> None:
        while True:
            await anyio.sleep(_SUMMARY_S)
            self._tell_totals()

    def _tell_totals(self) -> None:
        """Tell what was counted since the last time, if anything was."""
        totals = Counter[str]()
        for core in self._cores.values():
            totals.update(_flat("", core.totals()))
        if more := totals - self._told:
            seconds = time.monotonic() - self._told_at
            self._told, self._told_at = totals, self._told_at + seconds
            self._log.info(SUMMARY, seconds=round(seconds, 3), totals=dict(more))


def _flat(name: str, told: object) -> dict[str, int]:
    """Return the numbers of nested values by their dotted names."""
    if isinstance(told, dict):
        items = list(told.items())
    elif isinstance(told, list):
        items = list(enumerate(told))
    else:
        return {name: told} if isinstance(told, int) else {}
    flat: dict[str, int] = {}
    for key, value in items:
        flat |= _flat(f"{name}.{key}" if name else str(key), value)
    return flat
