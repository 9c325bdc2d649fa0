# SPDX-License-Identifier: Apache-2.0
"""
Blocks as values of Valkey or Redis, by connections that redis-py opens.

A block is one value, its envelope before its bytes, which is written only if it is not there. Larger values hold up
everybody else on such a server, so a block of more than a megabyte is cut into parts. Its *head* is then a value with
the envelope alone, written last and only if it is not there, and read first: what has none is nobody's, and it says which
parts are the block's (``_redis_values``). Who gets no head there, too late or for want of room, takes its parts back. A
block of which the server has let parts go is not there: who meets it removes the others. Small blocks in parts, and
parts with other names, as earlier releases wrote them, are read as well. What is never deleted goes by its time to live.
Bytes go from and to where they belong (``_redis_link``). What is put anew, as a connection was lost, may be told as there.

Threading: all on one loop, the agent's.
"""

import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypeAlias

import anyio
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ucm.backends._many import Many
from ucm.backends._redis_advice import advice_of, read_config
from ucm.backends._redis_answers import ERRORS, refused_by
from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_servers import AWAY, ROUNDS, Servers
from ucm.backends._redis_settings import RedisSettings, refusal
from ucm.backends._redis_values import (
    ABSENT,
    UNSEALED,
    cuts,
    head_of,
    is_whole,
    judge,
    name_of,
    seal_of,
    silence_of,
    unlinks,
    written,
)
from ucm.backends._resp import Command
from ucm.backends.abc import (
    Advice,
    Backend,
    BackendCapabilities,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import HEADER_BYTES, Envelope, headers_for
from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.settings import read_section

__all__ = ["RedisBackend", "name_of"]

_CALL_BYTES = 8 << 20
"""Of one request at most, if it has more blocks than one."""
_LARGEST_BLOCK = 256 << 20
_LONGER_S = 60
"""Parts live so much longer than their head."""
_OPENING_S = 5.0
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_Value: TypeAlias = tuple[bytes | memoryview, ...]


class RedisBackend(Backend):
    """
    Blocks as values; made by ``open_configured``.

    Args:
        client: redis-py's.
        settings: As read.
    """

    def __init__(self, client: Any, settings: RedisSettings) -> None:  # noqa: ANN401 - or a cluster's
        seconds, dialer = settings.timeout, Dialer(settings.url, settings.timeout)
        self._servers = Servers(client, dialer, seconds, is_cluster=settings.cluster)
        self._many = Many(settings.connections)
        # Apart, as looks wait for no blocks.
        self._looks = anyio.Semaphore(settings.connections, fast_acquire=True)
        prefix, is_cluster = settings.prefix.encode(), settings.cluster
        self._name = functools.partial(name_of, prefix, is_cluster=is_cluster)
        self._unlink = functools.partial(unlinks, is_cluster=is_cluster)
        self._ttl = settings.ttl
        self._is_open = True

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Open a connection; a server that does not answer is unavailable until it does.

        Raises:
            ConfigError: The address or the credentials are wrong.
        """
        read = read_section(RedisSettings, settings, f"{key}.")
        make: Any = RedisCluster.from_url if read.cluster else Redis.from_url
        limit = read.timeout / ROUNDS if read.cluster else read.timeout
        try:
            client = make(
                read.url,
                socket_timeout=limit,
                socket_connect_timeout=limit,
                retry=Retry(NoBackoff(), 1),
                max_connections=2 * read.connections,
                protocol=2,  # nothing comes that was not asked for
            )
            if not read.cluster:  # which looks at its options by itself
                Dialer(read.url, limit).to_one()
        except ERRORS as exc:
            raise refusal(f"{key}.url", read.url, exc) from None
        backend = cls(client, read)
        try:
            with anyio.move_on_after(_OPENING_S):
                await client.ping()
        except ERRORS as exc:
            if kind := refused_by(exc):  # else it is down; it may come back
                await backend.aclose()
                problem = f"the server refuses the credentials ({kind})"
                remedy = "Give those of a user: redis://user:password@host:6379/0."
                raise ConfigError(f"{key}.url", "...", problem, remedy) from None
        return backend

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of a server."""
        return BackendCapabilities(
            medium="redis",
            shared=True,
            durable="node",
            max_block_bytes=_LARGEST_BLOCK,
            batch_blocks=128,
            in_flight=self._many.most,
            creates=True,
            gives_up_s=self._servers.gives_up_s,
        )

    @property
    def away(self) -> Sequence[str]:
        """Servers of a cluster that do not answer."""
        return self._servers.away

    @property
    def refusing(self) -> Sequence[str]:
        """Servers of a cluster that answer, and take nothing."""
        return self._servers.refusing

    @property
    def trouble(self) -> str:
        """What the last request failed with, in the words of who refused it."""
        return self._servers.trouble

    async def attend(self) -> None:
        """Look for those that are away."""
        await self._servers.attend()

    async def advice(self) -> Sequence[Advice]:
        """Look at the settings of each server."""
        told: dict[Advice, None] = {}
        for server in self._servers.nodes():
            config = await read_config(server)
            told |= dict.fromkeys(
                advice_of(config, ttl=self._ttl, is_cluster=self._servers.is_cluster)
            )
        return list(told)

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask for all heads at once."""
        if not keys or not self._is_open:
            return [Presence.UNKNOWN] * len(keys)
        async with self._looks:
            return await self._exists(keys)

    async def _exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        told = [Presence.UNKNOWN] * len(keys)
        heads = [Command((b"EXISTS", self._name(key, 0))) for key in keys]
        for at, answer in enumerate(await self._servers.ask(heads)):
            if isinstance(answer, int):
                told[at] = Presence.PRESENT if answer else Presence.ABSENT
            elif answer is AWAY:
                told[at] = Presence.AWAY
        return told

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Ask for heads and parts at once, some blocks at a time."""
        told = [_UNAVAILABLE] * len(keys)
        pairs = list(zip(keys, targets, strict=True))
        return await self._in_calls(pairs, list(map(len, targets)), self._get, told)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Write parts, then heads, some blocks at a time."""
        told = [Verdict.UNAVAILABLE] * len(blocks)
        sizes = [len(block.data) for block in blocks]
        return await self._in_calls(blocks, sizes, self._put, told)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove heads and what parts they name."""
        if not keys or not self._is_open:
            return [Verdict.UNAVAILABLE] * len(keys)
        async with self._looks:
            return await self._delete(keys)

    async def _delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        told = [Verdict.UNAVAILABLE] * len(keys)
        heads: list[Command] = []
        parts: list[Command] = []
        asked: list[int] = []
        there = await self._heads(keys)
        for at, (key, head) in enumerate(zip(keys, there, strict=True)):
            if (silence := silence_of(head)) is not None:  # who names its parts?
                told[at] = silence
                continue
            nbytes, seals = 0, [UNSEALED]
            if isinstance(head, Envelope):
                nbytes = min(head.nbytes, _LARGEST_BLOCK)
                seals.append(seal_of(head.checksum))
            heads += self._unlink([self._name(key, 0)])
            its = [name for seal in seals for name in self._parts(key, nbytes, seal)]
            parts += self._unlink(its)
            asked.append(at)
        ends = await self._servers.ask([*heads, *parts], are_writes=True)
        for at, end in zip(asked, ends, strict=False):
            if isinstance(end, int):
                told[at] = Verdict.DONE if end else Verdict.ABSENT
            elif end is AWAY:
                told[at] = Verdict.AWAY
        return told

    def _parts(self, key: PackedKey, nbytes: int, seal: bytes) -> list[bytes]:
        """Return the names of a block's parts; a head alone has one."""
        return [self._name(key, part, seal) for part, _ in enumerate(cuts(nbytes), 1)]

    async def _heads(self, keys: Sequence[PackedKey]) -> list[Envelope | Fetched]:
        """Return the heads of blocks that have several values, or what there is instead."""
        heads = [memoryview(bytearray(HEADER_BYTES)) for _ in keys]
        end = b"%d" % HEADER_BYTES  # one more than it has
        commands = [
            Command((b"GETRANGE", self._name(key, 0), b"0", end), (head,))
            for key, head in zip(keys, heads, strict=True)
        ]
        return list(map(head_of, await self._servers.ask(commands), heads))

    async def aclose(self) -> None:
        """Close connections."""
        if self._is_open:
            self._is_open = False
            with anyio.move_on_after(_OPENING_S, shield=True):
                await self._servers.aclose()

    async def _in_calls(
        self,
        items: Sequence[Any],
        sizes: Sequence[int],
        ask: Callable[[Sequence[Any]], Awaitable[list[Any]]],
        told: list[Any],
    ) -> list[Any]:
        """Ask for as many items at a time as one request may carry."""
        if not self._is_open:
            return told
        starts: list[int] = []
        nbytes = _CALL_BYTES + 1  # also where the first has none
        for at, size in enumerate(sizes):
            nbytes += size
            if nbytes > _CALL_BYTES:
                starts.append(at)
                nbytes = size

        async def one(call: slice) -> None:
            told[call] = await ask(items[call])

        calls = list(map(slice, starts, [*starts[1:], len(items)]))
        await self._many.run(calls, one)
        return told

    async def _get(
        self, pairs: Sequence[tuple[PackedKey, memoryview]]
    ) -> list[Fetched]:
        told: list[Fetched | Envelope | None] = [None] * len(pairs)
        large = [at for at, (_, into) in enumerate(pairs) if not is_whole(len(into))]
        heads = await self._heads([pairs[at][0] for at in large])
        for at, head in zip(large, heads, strict=True):
            # Of one without a byte only its value tells whether it is there.
            told[at] = None if head == ABSENT else head
        every = range(len(pairs))
        anew = await self._read(pairs, told, every)
        gone = await self._read(pairs, told, [at for at in anew if at in large])
        # Of an earlier release.
        gone += await self._read(pairs, told, every, are_sealed=False)
        for at in gone:
            told[at] = ABSENT  # what was looked for; what is there now is no damage
        left = [at for at, one in enumerate(told) if isinstance(one, Envelope)]
        await self._delete([pairs[at][0] for at in left])  # their parts went for room
        return [one if isinstance(one, Fetched) else ABSENT for one in told]

    async def _read(
        self,
        pairs: Sequence[tuple[PackedKey, memoryview]],
        told: list[Fetched | Envelope | None],
        which: Iterable[int],
        *,
        are_sealed: bool = True,
    ) -> list[int]:
        """Read blocks of which no end is told, whole or by their head; return which have another one now, as is told."""
        left = [at for at in which if not isinstance(told[at], Fetched)]
        commands: list[Command] = []
        reads = []
        for at in left:
            (key, target), known = pairs[at], told[at]
            head = memoryview(bytearray(HEADER_BYTES))
            names, parts = [self._name(key, 0)], []
            if isinstance(known, Envelope):
                seal = seal_of(known.checksum) if are_sealed else UNSEALED
                names += self._parts(key, len(target), seal)
                parts = [(target[start:stop],) for start, stop in cuts(len(target))]
            wanted = [(head,) if parts else (head, target), *parts]
            gets = list(map(Command, [(b"GET", name) for name in names], wanted))
            commands += gets
            reads.append((head, [get.room for get in gets]))
        answers = iter(await self._servers.ask(commands))
        anew = []
        for at, (head, sizes) in zip(left, reads, strict=True):
            its, known = list(itertools.islice(answers, len(sizes))), told[at]
            told[at] = judge(its, sizes, head, pairs[at][0], known)
            if isinstance(told[at], Envelope) and told[at] != known:
                anew.append(at)
        return anew

    async def _put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        fit = (len(block.data) <= _LARGEST_BLOCK for block in blocks)
        told = [Verdict.DONE if each else Verdict.FULL for each in fit]
        begun = await self._put_parts(blocks, told)
        heads = [at for at, end in enumerate(told) if end is Verdict.DONE]
        mine = [blocks[at] for at in heads]
        commands = []
        for block, header in zip(mine, headers_for(mine), strict=True):
            rest = (block.data,) if is_whole(len(block.data)) else ()
            name = self._name(block.key, 0)
            commands.append(self._set(name, (header, *rest), 0, b"NX"))
        answers = await self._servers.ask(commands, are_writes=True)
        for at, answer in zip(heads, answers, strict=True):
            told[at] = Verdict.PRESENT if answer is None else written(answer)
        left = [at for at in begun if told[at] is not Verdict.DONE]
        await self._take_back([blocks[at] for at in left])
        return told

    async def _take_back(self, blocks: Sequence[Sealed]) -> None:
        """Remove parts of blocks that were not put, unless they are another's as well, or none can say."""
        heads = await self._heads([block.key for block in blocks])
        unlink: list[Command] = []
        for block, head in zip(blocks, heads, strict=True):
            is_its = isinstance(head, Envelope) and head.checksum == block.checksum
            if silence_of(head) is None and not is_its:
                its = block.key, len(block.data), seal_of(block.checksum)
                unlink += self._unlink(self._parts(*its))
        await self._servers.ask(unlink, are_writes=True)

    async def _put_parts(
        self, blocks: Sequence[Sealed], told: list[Verdict]
    ) -> set[int]:
        """Write the parts of those that have some, and return which have one now; *told* has their ends."""
        large = [
            at
            for at, (block, end) in enumerate(zip(blocks, told, strict=True))
            if end is Verdict.DONE and not is_whole(len(block.data))
        ]
        there = await self._exists([blocks[at].key for at in large])
        commands: list[Command] = []
        whose: list[int] = []
        for at, presence in zip(large, there, strict=True):
            if presence is Presence.PRESENT:
                told[at] = Verdict.PRESENT
                continue
            key, data = blocks[at].key, blocks[at].data
            names = self._parts(key, len(data), seal_of(blocks[at].checksum))
            parts = [
                self._set(name, (data[start:stop],), _LONGER_S)
                for name, (start, stop) in zip(names, cuts(len(data)), strict=True)
            ]
            commands += parts
            whose += [at] * len(parts)
        answers = await self._servers.ask(commands, are_writes=True)
        begun = set()
        for at, end in zip(whose, map(written, answers), strict=True):
            if end is Verdict.DONE:
                begun.add(at)
            elif told[at] is Verdict.DONE:
                told[at] = end
        return begun

    def _set(self, name: bytes, value: _Value, longer_s: int, *how: bytes) -> Command:
        lives = (b"EX", b"%d" % (self._ttl + longer_s)) if self._ttl else ()
        return Command((b"SET", name, value, *lives, *how))
