# SPDX-License-Identifier: Apache-2.0
"""
Blocks as objects of a Mooncake Store, by its own client.

An object is the envelope and then the block's bytes. Over TCP each part of an object is a
transfer of its own, which costs about as much for the 128 bytes of an envelope as for 64 KB. So a
block of up to a megabyte is copied to lie behind its envelope, and what is larger, or goes by
RDMA, goes from and to where it lies.

The client is native code that blocks, so a few threads call it, and what it was given is its own
until the call has ended: a cancelled verb waits for that. Its time-outs come from the
environment, which is read when it is first imported, once for a process. Nobody can end a call,
and in it what waits for a connection to a node that has stopped waits for those before it as
well: transfers at a time are bounded by the connections.

What its codes mean, as version 0.3.13 answers: ``batch_is_exist`` is 1 or 0, and below 0 for
"could not ask"; reads and writes have a code for each object. An object that is shorter than
what is asked for fails as a transfer does, so that its length is looked at then. What is well
in a batch is lost where the store's lease ends (-707) before the others are given up: it should
be five seconds at least. Of an object that another has begun to write a put says that it is done, reads
say -703; the one who had begun may have died. Behind ``close`` every call crashes the process.
"""

import enum
import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import attrs

from ucm.backends._address import read_server
from ucm.backends._crew import Crew, Job
from ucm.backends._many import put_missing
from ucm.backends._mooncake_client import Client
from ucm.backends._mooncake_room import Room
from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import GARBAGE, HEADER_BYTES, Envelope, headers_for
from ucm.blocks import PackedKey
from ucm.config import tell_native_code
from ucm.errors import ConfigError
from ucm.native import addresses_of
from ucm.registry import how_to_install
from ucm.settings import field, read_enum, read_section, read_size
from ucm.tracing import unix_now

__all__ = ["MooncakeBackend", "MooncakeSettings"]

_LANES = 16
"""Connections to each node, as many as the client has; four, unless it is told."""
_TRANSFERS = 2 * _LANES
"""At a time, of all threads: who has stopped is waited for twice."""
_CALL_NAMES = 64
"""Of a call that moves nothing."""
_STAGED_BYTES = 1 << 20
"""A larger block is two transfers over TCP, its envelope and its bytes."""
_LARGEST_BLOCK = 1 << 30
_BUFFER_BYTES = 16 << 20
"""Of the client's own, which calls that name their memory do not use."""
_OPENING_S = 5.0
_NOT_THERE, _TOO_LONG, _TRANSFER_FAILED = -704, -600, -800
_BEGUN = -703
"""An object that a writer has begun, and has not ended: ``batch_is_exist`` says 0."""
_PRESENCE = {1: Presence.PRESENT, 0: Presence.ABSENT}
_PUT = {0: Verdict.DONE, -200: Verdict.FULL}
_WRITTEN = {1: Verdict.DONE, 0: Verdict.AWAY}
"""Of what a put called done, whether it is there; another may have begun it, and have died."""
_DELETED = {0: Verdict.DONE, _NOT_THERE: Verdict.ABSENT}
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_Item = TypeVar("_Item")
_T = TypeVar("_T")
_read_address = partial(read_server, whose="master", example="10.0.0.1:50051")


class _Protocol(enum.Enum):
    """How bytes travel."""

    TCP = "tcp"
    RDMA = "rdma"
    ASCEND = "ascend"


def _read_protocol(key: str, value: object) -> object:
    return read_enum(key, value, _Protocol)


@attrs.frozen(kw_only=True)
class MooncakeSettings:
    """Settings of a tier in a Mooncake Store."""

    master: str = field(
        "127.0.0.1:50051", "The master, such as `10.0.0.1:50051`.", read=_read_address
    )
    metadata: str = field(
        "P2PHANDSHAKE", "The server for metadata, if there is one for that."
    )
    host: str = field("127.0.0.1", "This machine, as other nodes reach it.")
    segment: int = field(
        0, "Memory that this machine lends to the store.", read=read_size, least=0
    )
    protocol: _Protocol = field(
        _Protocol.TCP, "`tcp`, `rdma` or `ascend`.", read=_read_protocol
    )
    devices: str = field("", "Names of its network cards, separated by commas.")
    replicas: int = field(
        1, "Copies of each block, on a node each; fewer on fewer nodes.", least=1
    )
    prefix: str = field("ucm/", "What names of objects begin with.")
    threads: int = field(2, "Calls at a time.", least=1)
    timeout: float = field(
        1.0, "Seconds after which nodes and master are given up.", least=0.1
    )


class MooncakeBackend(Backend):
    """
    Blocks as objects; made by ``open_configured``.

    Args:
        native: The module ``mooncake.store``, or what behaves like it.
        settings: As read.
        clock: The wall clock.
    """

    def __init__(
        self,
        native: Any,  # noqa: ANN401 - it has no types
        settings: MooncakeSettings,
        clock: Callable[[], float] = unix_now,
    ) -> None:
        self._native = native
        self._clock = clock
        self._settings = settings
        self._copies = native.ReplicateConfig()
        self._copies.replica_num = settings.replicas
        self._crew = Crew(settings.threads, "ucm-mooncake")
        self._call_transfers = max(1, _TRANSFERS // settings.threads)
        is_tcp = settings.protocol is _Protocol.TCP
        self._staged_bytes = _STAGED_BYTES if is_tcp else 0
        self._rooms: SimpleQueue[Room] = SimpleQueue()
        self._memory: list[memoryview] = []
        """What network cards must know of; tcp needs none."""
        for _ in range(settings.threads):
            room = Room(self._call_transfers, self._staged_bytes)
            self._rooms.put(room)
            self._know(room.memory)
        self._joining: Job[Client | None] | None = None
        self._is_open = True

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Join the store; a master that does not answer is unavailable until it does.

        Raises:
            ConfigError: A setting is wrong, or the client is not installed.
        """
        read = read_section(MooncakeSettings, settings, f"{key}.")
        backend = cls(_import_client(read.timeout, f"{key}.type"), read)
        with anyio.move_on_after(_OPENING_S):
            await backend._connected()
        return backend

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of the nodes together."""
        return BackendCapabilities(
            medium="mooncake",
            shared=True,
            durable="node" if self._settings.replicas > 1 else "process",
            max_block_bytes=_LARGEST_BLOCK,
            batch_blocks=self._call_transfers * self._settings.threads,
            in_flight=self._settings.threads,
            creates=True,
        )

    async def register(self, memory: Sequence[memoryview]) -> None:
        """Have network cards know the memory, now or when the store is joined."""
        client = self._client
        for one in memory:
            self._know(one)
        if client is not None and self._memory:
            done = [None] * len(memory)
            call = client.call
            await self._crew.run(
                memory, lambda one: call(partial(_register, memory=one)), done
            )

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask the master."""

        def ask(client: Any, _: Room, some: Sequence[PackedKey]) -> list[Presence]:  # noqa: ANN401
            codes = client.batch_is_exist([self._name(key) for key in some])
            return [_PRESENCE.get(code, Presence.UNKNOWN) for code in codes]

        return await self._in_calls(keys, ask, Presence.UNKNOWN)

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Read headers and bytes from whichever nodes have them."""
        pairs = list(zip(keys, targets, strict=True))
        largest = max(map(len, targets), default=0)
        return await self._in_calls(pairs, self._get, _UNAVAILABLE, largest)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Write what is not there; of two writers at once the first one's bytes stay."""

        async def write(missing: Sequence[Sealed]) -> list[Verdict]:
            largest = max((len(block.data) for block in missing), default=0)
            none = Verdict.UNAVAILABLE
            return await self._in_calls(missing, self._put, none, largest)

        return await put_missing(self, blocks, _LARGEST_BLOCK, write)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove objects, also those that somebody has just read."""

        def ask(client: Any, _: Room, some: Sequence[PackedKey]) -> list[Verdict]:  # noqa: ANN401
            codes = client.batch_remove([self._name(key) for key in some], force=True)
            return [_DELETED.get(code, Verdict.UNAVAILABLE) for code in codes]

        return await self._in_calls(keys, ask, Verdict.UNAVAILABLE)

    async def aclose(self) -> None:
        """Leave the store, unless a call hangs: its end would crash with the client gone."""
        if not self._is_open:
            return
        self._is_open = False
        is_quiet = await self._crew.aclose()
        if is_quiet and self._client is not None:
            with anyio.move_on_after(_OPENING_S, shield=True):
                await anyio.to_thread.run_sync(
                    self._client.close, abandon_on_cancel=True
                )

    def _know(self, memory: memoryview) -> None:
        if self._settings.protocol is not _Protocol.TCP:
            self._memory.append(memory)

    @property
    def _client(self) -> Client | None:
        """The client that joined, also where nobody waited for it so long."""
        client = None if self._joining is None else self._joining.result
        return None if client is None or client.is_over else client

    async def _connected(self) -> Client | None:
        """Return the client; None while the master does not answer."""
        if self._client is None and self._is_open:
            if self._joining is None or self._joining.is_over:
                self._joining = self._crew.start(self._join)
            await self._joining.wait()
        return self._client

    def _join(self) -> Client | None:
        client, read = self._native.MooncakeDistributedStore(), self._settings
        code = client.setup(
            *(read.host, read.metadata, read.segment, _BUFFER_BYTES),
            *(read.protocol.value, read.devices, read.master),
        )
        if code:
            return None
        for memory in self._memory:
            _register(client, memory)
        return Client(client, self._clock)

    async def _in_calls(
        self,
        items: Sequence[_Item],
        ask: Callable[[Any, Room, Sequence[_Item]], list[_T]],
        unknown: _T,
        largest: int | None = None,
    ) -> list[_T]:
        """Ask for as many items at a time as one call may carry, on threads; of so many bytes."""
        told = [unknown] * len(items)
        client = await self._connected() if items else None
        if client is None:
            return told

        def one(call: slice) -> None:
            room = self._rooms.get()  # there is one for each thread

            def use(native: Any) -> None:  # noqa: ANN401
                told[call] = ask(native, room, items[call])

            try:
                client.call(use)
            finally:
                self._rooms.put(room)

        step = _CALL_NAMES
        if largest is not None:
            parts = 1 if largest <= self._staged_bytes else 2
            step = max(1, self._call_transfers // parts)
        firsts = range(0, len(items), step)
        calls = [slice(at, min(at + step, len(items))) for at in firsts]
        await self._crew.run(calls, one, [None] * len(calls))
        return told

    def _get(
        self,
        client: Any,  # noqa: ANN401
        room: Room,
        pairs: Sequence[tuple[PackedKey, memoryview]],
    ) -> list[Fetched]:
        names = [self._name(key) for key, _ in pairs]
        parts = room.parts([target for _, target in pairs])
        codes = client.batch_get_into_multi_buffers(names, *parts)
        told, is_silent = [], False
        for at, (key, target) in enumerate(pairs):
            code = codes[at]
            if code == HEADER_BYTES + len(target):
                room.unstage(at, target)
                told.append(Envelope.judge(room.header(at), key, len(target)))
                continue
            if code == _TRANSFER_FAILED and not is_silent:
                # Of a node that is away, or because it is shorter: the master knows,
                # unless it is away, too. Each question waits for it then.
                code = client.get_size(names[at])
                is_silent = code < 0 and code not in (_NOT_THERE, _BEGUN)
            told.append(_failed(code, len(target)))
        return told

    def _put(
        self,
        client: Any,  # noqa: ANN401
        room: Room,
        blocks: Sequence[Sealed],
    ) -> list[Verdict]:
        """Write blocks, and look whether they are there."""
        names = [self._name(one.key) for one in blocks]
        for at, header in enumerate(headers_for(blocks)):
            room.header(at)[:] = header
            room.stage(at, blocks[at].data)
        codes = client.batch_put_from_multi_buffers(
            names, *room.parts([one.data for one in blocks]), self._copies
        )
        told = [_PUT.get(code, Verdict.UNAVAILABLE) for code in codes]
        done = [at for at, verdict in enumerate(told) if verdict is Verdict.DONE]
        there = client.batch_is_exist([names[at] for at in done]) if done else []
        for at, code in zip(done, there, strict=True):
            told[at] = _WRITTEN.get(code, Verdict.UNAVAILABLE)
        return told

    def _name(self, key: PackedKey) -> str:
        return f"{self._settings.prefix}{key.hex()}"


def _import_client(timeout: float, key: str) -> Any:  # noqa: ANN401
    """Return the client's module, which reads its time-outs only now."""
    seconds, milliseconds = str(math.ceil(timeout)), str(round(timeout * 1000))
    tell_native_code(
        {
            "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,  # amid a block; 30 unless told
            "MC_TCP_LANES_PER_PEER": str(_LANES),
            "MC_RPC_TIMEOUT_MS": milliseconds,
            "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # of twenty, which take 90 seconds
        }
    )
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as exc:
        raise ConfigError(
            key,
            "mooncake",
            f"its client cannot be imported ({exc})",
            f"{how_to_install('mooncake')} It needs the system's libibverbs1.",
        ) from exc


def _register(client: Any, memory: memoryview) -> None:  # noqa: ANN401
    client.register_buffer(*addresses_of([memory]), len(memory))


def _failed(code: int, nbytes: int) -> Fetched:
    """Return what became of a block of which not all came, by a code or the object's length."""
    if code == HEADER_BYTES + nbytes:
        return _UNAVAILABLE
    if code in (_NOT_THERE, _BEGUN):
        return Fetched(Verdict.ABSENT)
    is_other = code >= 0 or code == _TOO_LONG
    return GARBAGE if is_other else _UNAVAILABLE
