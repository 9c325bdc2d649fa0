# SPDX-License-Identifier: Apache-2.0
"""
Blocks as values of Valkey or Redis, by connections that redis-py opens.

A block is one value, its envelope before its bytes, which is written only if it is not there. Larger
values hold up everybody else on such a server, so a block of more than a megabyte is cut into
parts. Its *head* is then a value with the envelope alone, written last and only if it is not there,
and read first: what has no head is nobody's, and it says which parts are the block's (``_redis_values``).
Whose head was too late takes its parts back. Parts that the server has let go of make a block garbage,
which can be put again once it was deleted. What is never deleted goes by its time to live. Small blocks
in parts, and parts with other names, as earlier releases wrote them, are read as well.

Bytes go from where they lie and come to where they belong (``_redis_link``). A block that was put
anew, as a connection was lost, may be told to be there although it is ours.

Threading: all on one loop, the agent's.
"""

import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias

import anyio
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ucm.backends._many import Many
from ucm.backends._redis_advice import advice_of, read_config
from ucm.backends._redis_answers import ERRORS, is_full, refused_by
from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_servers import AWAY, ROUNDS, Servers
from ucm.backends._redis_settings import RedisSettings, refusal
from ucm.backends._redis_values import (
    UNSEALED,
    cuts,
    head_of,
    is_whole,
    judge,
    name_of,
    seal_of,
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
from ucm.backends.envelope import GARBAGE, HEADER_BYTES, Envelope, headers_for
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
                raise ConfigError(
                    f"{key}.url",
                    "...",
                    f"the server refuses the credentials ({kind})",
                    "Give those of a user, as in redis://user:password@host:6379/0.",
                ) from None
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
        names = []
        for key, envelope in zip(keys, await self._heads(keys), strict=True):
            nbytes, seals = 0, [UNSEALED]
            if isinstance(envelope, Envelope):
                nbytes = min(envelope.nbytes, _LARGEST_BLOCK)
                seals.append(seal_of(envelope.checksum))
            parts = range(1, 1 + len(cuts(nbytes)))  # one where it has none
            its = [self._name(key, part, seal) for seal in seals for part in parts]
            names.append([self._name(key, 0), *its])
        flat = [Command((b"UNLINK", name)) for some in names for name in some]
        ends = iter(await self._servers.ask(flat, are_writes=True))
        for at, some in enumerate(names):
            end, *_ = itertools.islice(ends, len(some))
            if isinstance(end, int):
                told[at] = Verdict.DONE if end else Verdict.ABSENT
            elif end is AWAY:
                told[at] = Verdict.AWAY
        return told

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
        told: list[Fetched | None] = [None] * len(pairs)
        seals: list[bytes | None] = [None] * len(pairs)
        large = [at for at, (_, into) in enumerate(pairs) if not is_whole(len(into))]
        heads = await self._heads([pairs[at][0] for at in large])
        for at, head in zip(large, heads, strict=True):
            if isinstance(head, Envelope):
                seals[at] = seal_of(head.checksum)
            else:
                told[at] = head
        await self._read(pairs, seals, told)
        await self._read(pairs, [UNSEALED] * len(pairs), told)  # of an earlier release
        return [one or GARBAGE for one in told]

    async def _read(
        self,
        pairs: Sequence[tuple[PackedKey, memoryview]],
        seals: Sequence[bytes | None],
        told: list[Fetched | None],
    ) -> None:
        """Read blocks of which nothing is told, whole or by parts of these names; None: there is a head alone."""
        left = [at for at, one in enumerate(told) if one is None]
        commands: list[Command] = []
        reads = []
        for at in left:
            (key, target), seal = pairs[at], seals[at]
            head = memoryview(bytearray(HEADER_BYTES))
            wanted: list[tuple[memoryview, ...]]
            wanted = [(head, target)] if seal is None else [(head,)]
            if seal is not None:
                wanted += [(target[start:stop],) for start, stop in cuts(len(target))]
            for part, into in enumerate(wanted):
                name = self._name(key, part, seal if part and seal else UNSEALED)
                commands.append(Command((b"GET", name), into))
            reads.append((head, [sum(map(len, into)) for into in wanted]))
        answers = iter(await self._servers.ask(commands))
        for at, (head, sizes) in zip(left, reads, strict=True):
            its = list(itertools.islice(answers, len(sizes)))
            told[at] = judge(its, sizes, head, pairs[at][0])

    async def _put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        told = [
            Verdict.DONE if len(block.data) <= _LARGEST_BLOCK else Verdict.FULL
            for block in blocks
        ]
        await self._put_parts(blocks, told)
        heads = [at for at, end in enumerate(told) if end is Verdict.DONE]
        mine = [blocks[at] for at in heads]
        commands = []
        for block, header in zip(mine, headers_for(mine), strict=True):
            rest = (block.data,) if is_whole(len(block.data)) else ()
            name = self._name(block.key, 0)
            commands.append(self._set(name, (header, *rest), 0, b"NX"))
        answers = await self._servers.ask(commands, are_writes=True)
        for at, answer in zip(heads, answers, strict=True):
            told[at] = Verdict.PRESENT if answer is None else _written(answer)
        late = [blocks[at] for at in heads if told[at] is Verdict.PRESENT]
        await self._take_back([one for one in late if not is_whole(len(one.data))])
        return told

    async def _take_back(self, blocks: Sequence[Sealed]) -> None:
        """Remove parts of blocks that others have put meanwhile, unless these are theirs as well."""
        heads = await self._heads([block.key for block in blocks])
        names = [
            self._name(block.key, part, seal_of(block.checksum))
            for block, head in zip(blocks, heads, strict=True)
            if isinstance(head, Envelope) and head.checksum != block.checksum
            for part, _ in enumerate(cuts(len(block.data)), 1)
        ]
        unlink = [Command((b"UNLINK", name)) for name in names]
        await self._servers.ask(unlink, are_writes=True)

    async def _put_parts(self, blocks: Sequence[Sealed], told: list[Verdict]) -> None:
        """Write the parts of those that have some; *told* has what became of the others."""
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
            seal = seal_of(blocks[at].checksum)
            parts = [
                self._set(self._name(key, part, seal), (data[start:stop],), _LONGER_S)
                for part, (start, stop) in enumerate(cuts(len(data)), 1)
            ]
            commands += parts
            whose += [at] * len(parts)
        answers = await self._servers.ask(commands, are_writes=True)
        for at, answer in zip(whose, answers, strict=True):
            if told[at] is Verdict.DONE:
                told[at] = _written(answer)

    def _set(self, name: bytes, value: _Value, longer_s: int, *how: bytes) -> Command:
        lives = (b"EX", b"%d" % (self._ttl + longer_s)) if self._ttl else ()
        return Command((b"SET", name, value, *lives, *how))


def _written(answer: object) -> Verdict:
    """Return what became of a value that was to be set."""
    if answer == b"OK" or answer is True:
        return Verdict.DONE
    if answer is AWAY:
        return Verdict.AWAY
    return Verdict.FULL if is_full(answer) else Verdict.UNAVAILABLE
