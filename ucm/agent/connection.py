# SPDX-License-Identifier: Apache-2.0
"""One engine at the agent's socket: its wants, and what becomes of them when it goes."""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from ucm.agent.core import AgentCore, Forgetting
from ucm.agent.hits import Hits
from ucm.agent.ledger import PREFIX_BYTES, Ledger, Reader
from ucm.agent.protocol import (
    FRAME_HEADER,
    LONGEST_S,
    MOST_KEYS,
    PROTOCOL_VERSION,
    Ask,
    Describe,
    Done,
    Drop,
    Follow,
    Forget,
    FromAgent,
    GetStatus,
    Hello,
    Refused,
    Status,
    ToAgent,
    Told,
    Welcome,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from ucm.agent.wants import Want
from ucm.blocks import PackedKey
from ucm.errors import ConfigError, MessageError, StoreError
from ucm.reasons import Reason

__all__ = ["Connection"]

_HELLO_S: Final = 5.0
_SEND_S: Final = 5.0
"""Who does not read what it is told is gone."""
_MOST_WANTS: Final = 1024
_SHORTEST, _LONGEST = 29, 85
"""Bytes of packed keys."""
_MOST_SAID: Final = 14 << 10
"""Bytes of a description; so many fit into a frame that a batch of them does."""
_LAST_TENANT: Final = (1 << 32) - 1
_GONE: Final = (
    *(TimeoutError, anyio.IncompleteRead),
    *(anyio.BrokenResourceError, anyio.ClosedResourceError),
)
_OTHER_TIERS: Final = (
    "this agent has other tiers than the engine is set to: stop the engines that it serves, "
    "or give all the same tiers"
)
_DECODER: "Final[msgspec.msgpack.Decoder[ToAgent]]" = msgspec.msgpack.Decoder(ToAgent)


class Connection:
    """
    Serves one peer.

    Args:
        stream: To it.
        core_of: Returns what serves slots of a size; raises ``ConfigError`` or
            ``StoreError`` where nothing does.
        tell_status: Returns how the agent is.
        media: Of the tiers, in order.
        ledger: Returns that of the node, which begins with the first engine that asks for it.
        tiers: Their digest; empty: an engine may be set to have any.
        nonce: The agent's.
    """

    def __init__(
        self,
        stream: ByteStream,
        core_of: Callable[[int], Awaitable[AgentCore]],
        tell_status: Callable[[], Awaitable[dict[str, object]]],
        media: list[str],
        ledger: Callable[[], Ledger],
        tiers: str = "",
        nonce: str = "",
    ) -> None:
        self._stream = stream
        self._incoming = BufferedByteReceiveStream(stream)
        self._core_of = core_of
        self._tell_status = tell_status
        self._media = media
        self._ledger = ledger
        self._reader: Reader | None = None
        self._following = 0, anyio.CancelScope()
        """The number of what it follows, and what ends the answer that is under way."""
        self._is_answered = True
        self._is_saying = False
        """Whether an answer to how the agent is is under way; one is enough."""
        self._tiers = tiers
        self._nonce = nonce
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._sending = anyio.Lock()
        self._tasks: TaskGroup | None = None
        self.is_engine = False
        """Whether it was welcomed, and is not somebody who only looks."""

    async def serve(self) -> str:
        """
        Serve until the peer goes; what it wants then is dropped. Return what it did wrong.

        Who goes is noticed by who reads, or by who tells it something, whoever is first.
        """
        problem = ""
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    await self._converse(self._tasks)
                except MessageError as exc:
                    problem = str(exc)
                except _GONE:
                    pass
                self._tasks.cancel_scope.cancel()
        finally:
            if self._reader is not None:
                self._ledger().close(self._reader)
        return problem

    async def _converse(self, tasks: TaskGroup) -> None:
        with anyio.fail_after(_HELLO_S):
            first = await self._receive()
        if isinstance(first, GetStatus):
            await self._send(Status(await self._tell_status()))
        elif (core := await self._greet(first)) is not None:
            self.is_engine = True
            while True:
                await self._obey(await self._receive(), core, tasks)

    async def _greet(self, first: ToAgent) -> AgentCore | None:
        if not isinstance(first, Hello):
            raise MessageError("the first message is no hello")
        if first.version != PROTOCOL_VERSION:
            problem = f"version {first.version} is not {PROTOCOL_VERSION}, the agent's"
            await self._send(Refused(problem))
            return None
        if first.tiers and self._tiers and first.tiers != self._tiers:
            await self._send(Refused(_OTHER_TIERS))
            return None
        try:
            core = await self._core_of(first.slot_bytes)
        except (ConfigError, StoreError) as exc:
            await self._send(Refused(str(exc)))
            return None
        except (OSError, RuntimeError) as exc:  # no descriptor or thread is to be had
            await self._send(Refused(f"the agent cannot open the slab now: {exc}"))
            return None
        await self._send(Welcome(PROTOCOL_VERSION, self._media, self._nonce))
        return core

    async def _obey(self, message: ToAgent, core: AgentCore, tasks: TaskGroup) -> None:
        if isinstance(message, Ask):
            await self._begin(message, core, tasks)
        elif isinstance(message, Drop):
            if (scope := self._scopes.get(message.number)) is not None:
                scope.cancel()
                # A word on each want, or its engine takes us for stopped.
                await self._send(Done(message.number, 0, Reason.WITHDRAWN))
        elif isinstance(message, GetStatus):
            if not self._is_saying:
                self._is_saying = True
                tasks.start_soon(self._say_status)
        elif isinstance(message, Forget):
            await self._forget(message, core, tasks)
        elif isinstance(message, Describe):
            self._describe(message)
        elif isinstance(message, Follow):
            self._follow(message, tasks)
        else:
            raise MessageError("hello comes once")

    async def _begin(self, ask: Ask, core: AgentCore, tasks: TaskGroup) -> None:
        want = _want_of(ask, core.max_block_bytes)
        if await self._opens(ask.number):
            tasks.start_soon(self._serve_want, ask.number, want, core)

    async def _opens(self, number: int) -> bool:
        """Keep a number in mind whose answer is to come; answer that there is no room for it."""
        if number in self._scopes:
            raise MessageError(f"want {number} is open already")
        if len(self._scopes) >= _MOST_WANTS:
            await self._send(Done(number, 0, Reason.QUEUE_TICKETS))
            return False
        self._scopes[number] = anyio.CancelScope()
        return True

    async def _say_status(self) -> None:
        """Say how the agent is, beside all else: a tier may take its time to tell."""
        await self._send(Status(await self._tell_status()))
        self._is_saying = False

    async def _forget(self, message: Forget, core: AgentCore, tasks: TaskGroup) -> None:
        """Begin what goes on without this engine, too; answer who waits."""
        keys = _keys_of(message.keys)
        if not 0 <= message.deadline_s <= LONGEST_S:
            raise MessageError(f"more than {LONGEST_S} seconds, or less than none")
        if not message.number:
            core.forget(keys)
        elif await self._opens(message.number):
            tasks.start_soon(self._say_forgotten, message, core.forget(keys))

    async def _say_forgotten(self, message: Forget, forgetting: Forgetting) -> None:
        with self._scopes[message.number]:
            try:
                with anyio.move_on_after(message.deadline_s):
                    await forgetting.over.wait()
                found, kept = len(forgetting.taken), sorted(forgetting.left)
                reason = Reason.KEPT if kept else Reason.NONE
                media = bytes(1 + number for number in kept)
                await self._send(Done(message.number, found, reason, media))
            finally:
                del self._scopes[message.number]

    def _describe(self, message: Describe) -> None:
        ledger = self._ledger()
        for key, said in message.blocks:
            _check_key(len(key))
            if len(said) > _MOST_SAID:
                raise MessageError(f"a description of {len(said)} bytes")
            ledger.describe(PackedKey(key), said)

    def _follow(self, message: Follow, tasks: TaskGroup) -> None:
        number, scope = self._following
        if message.number != number or self._reader is None:
            if len(message.prefix) != PREFIX_BYTES:
                raise MessageError("a key space that is none of ours")
            scope.cancel()
            if self._reader is not None:
                self._ledger().close(self._reader)
            self._reader = self._ledger().read(message.prefix, alone=message.alone)
        elif not self._is_answered:
            raise MessageError("it asks before it was answered")
        self._is_answered = False
        self._following = message.number, anyio.CancelScope()
        tasks.start_soon(self._tell, self._reader, *self._following)

    async def _tell(
        self, reader: Reader, number: int, scope: anyio.CancelScope
    ) -> None:
        with scope:
            batch = await reader.next()
            self._is_answered = True
            await self._send(Told(number, *batch))

    async def _serve_want(self, number: int, want: Want, core: AgentCore) -> None:
        with self._scopes[number]:
            try:
                await core.fetch(want)
                media = bytes(want.media[: want.found])
                done = Done(number, want.found, want.reason, media, want.reach)
                await self._send(done)
                await anyio.sleep(want.hold_s)
            finally:
                core.drop(want)
                del self._scopes[number]

    async def _send(self, message: FromAgent) -> None:
        """Send; a peer that does not take it is gone, and so is all that it wants."""
        async with self._sending:
            try:
                with anyio.fail_after(_SEND_S, shield=True):  # whole frames only
                    await self._stream.send(encode_frame(message))
            except _GONE:
                if self._tasks is not None:
                    self._tasks.cancel_scope.cancel()

    async def _receive(self) -> ToAgent:
        header = await self._incoming.receive_exactly(FRAME_HEADER.size)
        payload = await self._incoming.receive_exactly(frame_bytes(header))
        return decode_frame(payload, _DECODER)


def _check_key(nbytes: int) -> None:
    if not _SHORTEST <= nbytes <= _LONGEST:
        raise MessageError("a key that is none of ours")


def _keys_of(packed: list[bytes]) -> list[PackedKey]:
    """Return the keys of a message; raises ``MessageError`` where it has none that are ours."""
    if not 0 < len(packed) <= MOST_KEYS:
        raise MessageError(f"{len(packed)} keys")
    for nbytes in set(map(len, packed)):
        _check_key(nbytes)
    return [PackedKey(key) for key in packed]


def _want_of(ask: Ask, max_block_bytes: int) -> Want:
    """
    Return what is wanted.

    Raises:
        MessageError: It makes no sense.
    """
    keys = _keys_of(ask.keys)
    if len(keys) != len(ask.sizes):
        raise MessageError(f"{len(keys)} keys with {len(ask.sizes)} sizes")
    if not all(0 < size <= max_block_bytes for size in ask.sizes):
        raise MessageError(f"a block of no byte, or of more than {max_block_bytes}")
    if not (0 <= ask.deadline_s <= LONGEST_S and 0 <= ask.hold_s <= LONGEST_S):
        raise MessageError(f"more than {LONGEST_S} seconds, or less than none")
    if not 0 <= ask.tenant <= _LAST_TENANT:
        raise MessageError(f"a tenant of number {ask.tenant}")
    hits = None if ask.hits is None else Hits(*ask.hits, len(ask.keys))
    deadline = anyio.current_time() + ask.deadline_s
    return Want(
        keys,
        ask.sizes,
        deadline,
        ask.hold_s,
        compute_s=max(0.0, ask.compute_s),
        only=ask.only,
        priority=ask.priority,
        tenant=ask.tenant,
        hits=hits,
    )
