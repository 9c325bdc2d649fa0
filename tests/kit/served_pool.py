# SPDX-License-Identifier: Apache-2.0
"""Requests of a served engine, and blocks that are shared by hash; all know what tokens really hold."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from tests.scheduler.model import ONE_FULL
from ucm.scheduler.requests import NO_LIMIT, ScheduledRequest

__all__ = ["SIZE", "Part", "Pool", "Request", "Token"]

SIZE: Final = ONE_FULL.groups[0].block_tokens
"""Tokens of a block."""

Token = tuple[bytes, int] | None
"""What a token's place holds: of which block, and where in it; None: garbage."""


@attrs.define(eq=False)
class Request:
    """
    What the engine knows of a request.

    Args:
        name: Its own.
        prompt: Tokens of its prompt.
        total: Those, and what it decodes.
        hashes: Of its whole blocks.
        table: Its blocks.
        computed: Tokens that are there once the steps that were planned have run.
        in_flight: How many of those have no output yet.
        stale: How many of those were planned for a former life.
        is_running: It has blocks.
        was_served: By the other connector, which does so once.
    """

    name: str
    prompt: int
    total: int
    hashes: Sequence[bytes]
    table: list[int] = attrs.Factory(list)
    computed: int = 0
    in_flight: int = 0
    stale: int = 0
    is_running: bool = False
    was_served: bool = False

    def token(self, position: int) -> Token:
        """Return what the place of a token has to hold."""
        at, rest = divmod(position, SIZE)
        is_hashed = at < len(self.hashes)
        return self.hashes[at] if is_hashed else f"{self.name}:{at}".encode(), rest


@attrs.frozen(eq=False)
class Part:
    """
    What a step computes of one request.

    Args:
        request: Which.
        computed: Tokens that are there before.
        end: Tokens that are there after it.
        table: Its blocks.
        shared: How many of these it took from the engine's own cache just now.
        served: How many behind them the other connector loads.
        is_new: It runs for the first time, or again after a preemption.
    """

    request: Request
    computed: int
    end: int
    table: Sequence[int]
    shared: int = 0
    served: int = 0
    is_new: bool = False

    def as_look(self) -> ScheduledRequest:
        """Return the facts of it."""
        return ScheduledRequest(
            request_id=self.request.name,
            computed_tokens=self.computed,
            end_tokens=self.end,
            prompt_tokens=self.request.prompt,
            hashes=self.request.hashes,
            tables=[self.table],
            new_block_ids=[self.table] if self.is_new else (),
            is_new=self.is_new,
            own_tokens=self.shared * SIZE if self.is_new else NO_LIMIT,
        )


class Pool:
    """Blocks that are shared by hash, and what each of their tokens really holds."""

    def __init__(self, num_blocks: int) -> None:
        ids = range(1, num_blocks + 1)
        self.tokens: dict[int, list[Token]] = {each: [None] * SIZE for each in ids}
        self.spoiled: set[int] = set()
        """Those that have had garbage since they were taken."""
        self._owners = dict.fromkeys(ids, 0)
        self._free = deque(ids)
        self._cached: dict[bytes, list[int]] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def is_free(self) -> bool:
        """Whether nobody has a block."""
        return len(self._free) == len(self.tokens)

    def take(self, count: int) -> list[int] | None:
        """Take so many free blocks, or none."""
        if len(self._free) < count:
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self.forget(taken)
        self.spoiled.difference_update(taken)
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, hashes: Iterable[bytes]) -> list[int]:
        """Take the longest prefix that is cached."""
        shared = []
        for each in hashes:
            if each not in self._cached:
                break
            shared.append(block_id := self._cached[each][0])
            if not self._owners[block_id]:
                self._free.remove(block_id)
            self._owners[block_id] += 1
        return shared

    def give_back(self, table: Sequence[int]) -> None:
        """Free a request's blocks, the last one first."""
        for block_id in reversed(table):
            self._owners[block_id] -= 1
            if not self._owners[block_id]:
                self._free.append(block_id)

    def cache(self, table: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Have others find blocks by their hashes."""
        for block_id, each in zip(table, hashes, strict=False):
            if block_id not in self._hashes:
                self._hashes[block_id] = each
                self._cached.setdefault(each, []).append(block_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Have nobody find these any more."""
        for block_id in block_ids:
            if block_hash := self._hashes.pop(block_id, None):
                self._cached[block_hash].remove(block_id)
                if not self._cached[block_hash]:
                    del self._cached[block_hash]

    def write(self, block_id: int, at: int, token: Token) -> None:
        """Write one token."""
        self.tokens[block_id][at] = token
        if token is None:
            self.spoiled.add(block_id)
