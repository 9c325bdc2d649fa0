# SPDX-License-Identifier: Apache-2.0
"""
Whom to ask: the one server of Valkey or Redis, or the server of a cluster whose affair it is.

What connections of ours cannot have is asked of redis-py, which follows a cluster's changes.

A server of a cluster that is silent costs a few deadlines, then nothing: what is its affair has no
answer at once. After a while redis-py is asked about it, with nobody waiting. Whoever answers that, it
or who stands in for it, is asked again: it by one call at first, as small questions may be all that it
answers. One that answers and takes nothing is spared what it is to take, for a while; then a call tries.
While all are silent, or none takes anything, nobody is spared: each call asks, and who calls counts that,
unless one has answered by its end.

One that says its cluster is down is silent, or takes nothing if it still answers reads: it may be cut off from most
others, which are well. It does not know who stands in for it then, so others are asked, and who does is asked in its place.

Threading: all on one loop.
"""

import functools
import operator
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup
from redis.exceptions import ResponseError

from ucm.backends._circuit import Circuit
from ucm.backends._many import together
from ucm.backends._redis_answers import (
    ERRORS,
    are_silent,
    failures,
    is_down,
    is_elsewhere,
    is_refusal,
    is_silence,
    is_unserved,
    refuses,
)
from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_link import Links, seconds_for
from ucm.backends._redis_slots import Slots
from ucm.backends._resp import Command

__all__ = ["AWAY", "ROUNDS", "Servers"]

_NOBODYS = ConnectionError("no server has it")
AWAY = ConnectionError("its server is silent, or takes nothing, and others are well")
_LONGEST_S = 5.0
"""Between looks for a server that is away; nobody waits for them."""
_MOST_TOLD = 300
"""Characters of an error."""
ROUNDS = 3
"""Of redis-py within one timeout: to a server that is silent, to who knows better, and to that one. What
others have said of their blocks waits for these."""


class _Server:
    """
    One server.

    Args:
        links: Connections to it.
        clock: In seconds.
    """

    def __init__(self, links: Links, clock: Callable[[], float]) -> None:
        self.links = links
        self.circuit = Circuit(clock, longest_pause_s=_LONGEST_S)
        """Of what it is asked; closed where it is the only one."""
        self.writes = Circuit(clock, longest_pause_s=_LONGEST_S)
        """Of what it is to take or to let go; closed likewise."""
        self.serves = True
        """Something of what it was asked last is a server's affair."""
        self.is_looked_for = False
        self.is_found = False
        """A call may try it."""

    @property
    def is_away(self) -> bool:
        """Whether it is silent."""
        return self.circuit.is_open

    @property
    def takes_nothing(self) -> bool:
        """Whether it is away, or answers and takes nothing."""
        return self.is_away or self.writes.is_open

    def is_well(self, *, for_writes: bool) -> bool:
        """Return whether it had an answer for the last who asked."""
        is_well = self.circuit.is_well and self.serves
        return is_well and (self.writes.is_well or not for_writes)


_is_away = operator.attrgetter("is_away")
_takes_nothing = operator.attrgetter("takes_nothing")


class Servers:
    """
    One server, or those of a cluster.

    Args:
        client: redis-py's; closed with it.
        dialer: Opens connections of ours.
        timeout: Seconds of a request.
        is_cluster: Which of both it is.
        clock: In seconds.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - or a cluster's
        dialer: Dialer,
        timeout: float,
        *,
        is_cluster: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._dialer = dialer
        self._timeout = timeout
        self._slots = Slots(client, timeout / ROUNDS)
        self.is_cluster = is_cluster
        self._clock = clock
        self._is_open = True
        self._servers: dict[str, _Server] = {}
        """By their names; the one has none."""
        self._asking: set[anyio.CancelScope] = set()
        """Of what redis-py is asked."""
        self._tasks: TaskGroup | None = None
        self.trouble = ""
        """The last error, of a connection or in a server's words; empty once there was none."""

    @property
    def away(self) -> list[str]:
        """Names of those of a cluster that are silent."""
        return [name for name, one in self._known() if one and one.is_away]

    @property
    def refusing(self) -> list[str]:
        """Names of those of a cluster that answer, and take nothing."""
        known = [(name, one) for name, one in self._known() if one]
        return [name for name, one in known if one.takes_nothing and not one.is_away]

    @property
    def gives_up_s(self) -> float:
        """Seconds after which a server is given up, and another one asked; 0: there is none."""
        return self._timeout if self.is_cluster else 0.0

    def nodes(self) -> list[Any]:
        """Return what asks each server by itself, of redis-py's."""
        return self._client.get_primaries() if self.is_cluster else [self._client]

    async def attend(self) -> None:
        """Look for servers that are away, with nobody waiting; until it is cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    async def ask(
        self, commands: Sequence[Command], *, are_writes: bool = False
    ) -> list[Any]:
        """
        Ask each server for what is its; return answers or errors, of each its own.

        What is asked anew, as a connection was lost, may have been done before. ``AWAY`` is the
        answer of a server that is silent while others are not, or takes nothing while others do.

        Args:
            commands: All for reading, or
            are_writes: all for servers to take something, or to let it go.
        """
        told: list[Any] = [_NOBODYS] * len(commands)
        if not self._is_open or not commands:
            return told
        if not self.is_cluster:
            server = self._server_of(commands[0])
            return await self._ask_one(server, commands, spares=False)
        shares: dict[_Server | None, list[int]] = {}
        for at, command in enumerate(commands):
            shares.setdefault(self._server_of(command), []).append(at)
        spares = not self._are_all(_is_away)
        spares_writes = are_writes and not self._are_all(_takes_nothing)

        async def ask_one(server: _Server | None, mine: list[int]) -> None:
            asked = [commands[at] for at in mine]
            ask = functools.partial(self._ask_one, server, asked, spares=spares)
            answers: list[Any] | None
            if server is not None and are_writes:
                answers = await _ask_to_take(server, ask, spares=spares_writes)
            else:
                answers = await ask()
            if server is not None:
                server.serves = not all(map(is_unserved, answers or [None]))
            for at, answer in zip(mine, answers or [_NOBODYS] * len(mine), strict=True):
                told[at] = answer

        await together([functools.partial(ask_one, *share) for share in shares.items()])
        nobodys = shares.get(None, ())
        lost = [
            at
            for at in failures(told)
            if is_silence(told[at]) or (are_writes and is_refusal(told[at]))
        ]
        lost = [at for at in lost if at not in nobodys]
        lost += [at for at in failures(told) if is_unserved(told[at])]
        if lost and not self._are_all(
            lambda one: not one.is_well(for_writes=are_writes)
        ):
            for at in lost:
                told[at] = AWAY
        return told

    async def aclose(self) -> None:
        """Close connections; calls that are under way have no answer."""
        self._is_open = False
        for scope in self._asking:
            scope.cancel()
        self._slots.close()
        for server in self._servers.values():
            server.links.close()
        await self._client.aclose()

    async def _ask_one(
        self, server: _Server | None, commands: Sequence[Command], *, spares: bool
    ) -> list[Any]:
        """Ask a server, if it is known which, and take note of what is wrong there."""
        if server is not None and spares:
            answers = await self._ask_if_there(server, commands)
        elif server is not None and not self.is_cluster:
            answers = await self._ask_directly(server, commands)
        else:
            answers = await self._ask_client(commands)
            if server is not None:
                server.circuit.judge(is_bad=are_silent(answers))
        wrong = [answers[at] for at in failures(answers)]
        if not wrong:
            self.trouble = ""
        elif wrong[0] is not _NOBODYS:  # else nobody was asked
            exc = wrong[0]
            self.trouble = f"{type(exc).__name__} {exc}".rstrip()[:_MOST_TOLD]
        return answers

    async def _ask_if_there(
        self, server: _Server, commands: Sequence[Command]
    ) -> list[Any]:
        """Ask a server of several, unless it is away."""
        circuit, silence = server.circuit, [_NOBODYS] * len(commands)
        if circuit.is_open and not server.is_found:
            if circuit.wait_s <= 0 and not server.is_looked_for:
                await self._look_for(server, commands[0])
            if not server.is_found:
                return silence
        server.is_found = False  # one call tries
        ask = functools.partial(self._ask_directly, server, commands)
        told = await circuit.ask(ask, are_silent)
        return silence if told is None else told

    async def _look_for(self, server: _Server, command: Command) -> None:
        """Have redis-py ask for a value of a server that is away, or of who stands in for it."""

        async def look() -> None:
            try:
                exists = Command((b"EXISTS", command.words[1]))
                answers = await self._ask_client([exists])
                if are_silent(answers):
                    server.circuit.judge(is_bad=True)
                    await self._follow(server, answers)
                else:  # or it is another's by now, who has answered
                    server.is_found = self._server_of(command) is server
            finally:
                server.is_looked_for = False

        server.is_looked_for = True
        if self._tasks is None:  # nobody attends to it
            await look()
        else:
            self._tasks.start_soon(look)

    async def _ask_directly(
        self, server: _Server, commands: Sequence[Command]
    ) -> list[Any]:
        """Ask a server, and redis-py for what it has not."""
        answers: list[Any] = []
        try:
            await server.links.ask(commands, answers)
        except ERRORS as exc:
            answers += [exc] * (len(commands) - len(answers))
        failed = failures(answers)
        await self._follow(server, [answers[at] for at in failed])
        lost = [
            at
            for at in failed
            if is_elsewhere(answers[at])
            # It says the same to redis-py, unless the block is another's by now.
            and not (is_down(answers[at]) and self._server_of(commands[at]) is server)
        ]
        told = await self._ask_client([commands[at] for at in lost])
        for at, answer in zip(lost, told, strict=True):
            # Who names another server has answered, whatever that one does.
            if not (is_silence(answer) and isinstance(answers[at], ResponseError)):
                answers[at] = answer
        return answers

    async def _follow(self, server: _Server, told: Sequence[object]) -> None:
        """Where it says that its cluster is down, have redis-py learn of those that are well whose slots are."""
        if self.is_cluster and any(map(is_down, told)):
            well = [
                name
                for name, one in self._servers.items()
                if one is not server and one.is_well(for_writes=True)
            ]
            await self._slots.learn(well)

    async def _ask_client(self, commands: Sequence[Command]) -> list[Any]:
        """Ask redis-py in one request."""
        answers: list[Any] = [_NOBODYS] * len(commands)
        if not commands or not self._is_open:
            return answers
        with anyio.move_on_after(seconds_for(commands, self._timeout)) as scope:
            self._asking.add(scope)
            try:
                pipeline = self._client.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command.plain())
                told = await pipeline.execute(raise_on_error=False)
                answers = list(map(_taken, commands, told))
            except ERRORS as exc:
                answers = [exc] * len(commands)
            finally:
                self._asking.discard(scope)
        return answers

    def _server_of(self, command: Command) -> _Server | None:
        """Return whose affair it is; None: nobody's that is known."""
        node, name = None, ""
        try:
            if self.is_cluster:
                node = self._client.get_node_from_key(command.words[1])
                name = node.name
            if name not in self._servers:
                links = self._links_to(node)
                self._servers[name] = _Server(links, lambda: self._clock())
        except ERRORS:
            return None
        return self._servers[name]

    def _known(self) -> list[tuple[str, _Server | None]]:
        """Return the servers of a cluster that have blocks, by their names; None: never asked."""
        if not self.is_cluster:
            return []
        names = [node.name for node in self._client.get_primaries()]
        return [(name, self._servers.get(name)) for name in names]

    def _are_all(self, is_so: Callable[[_Server], bool]) -> bool:
        """Return whether something holds of all servers; None is known to be well."""
        return all(one is not None and is_so(one) for _, one in self._known())

    def _links_to(self, node: Any) -> Links:  # noqa: ANN401 - redis-py's; None is the one server
        if node is None:
            return Links(self._dialer.to_one, self._timeout)
        there = {one.name for one in self._client.get_nodes()}
        for gone in self._servers.keys() - there:
            self._servers.pop(gone).links.close()
        connect = functools.partial(self._dialer.to_node, node.connection_kwargs)
        return Links(connect, self._timeout)


async def _ask_to_take(
    server: _Server, ask: Callable[[], Awaitable[list[Any]]], *, spares: bool
) -> list[Any] | None:
    """Ask a server of several to take something; None: it was not asked."""
    if spares:
        return await server.writes.ask(ask, refuses)
    answers = await ask()
    if (is_bad := refuses(answers)) is not None:
        server.writes.judge(is_bad=is_bad)
    return answers


def _taken(command: Command, answer: object) -> object:
    """Return an answer of redis-py's as ours are."""
    if isinstance(answer, bytes) and command.into:
        return command.take(answer)
    return answer
