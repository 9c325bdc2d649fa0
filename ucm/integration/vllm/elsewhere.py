# SPDX-License-Identifier: Apache-2.0
"""
What a rank on another machine than the scheduler asks its own machine's agent for.

The scheduler's plans say of which prefixes its part is wanted, and of which it is to be deleted;
its reports say up to which token its machine has it. A rank that shares the scheduler's store is
never asked.

Threading: the engine's worker thread, which waits for nothing; the client and what deletes have
one of their own.
"""

from typing import Final

import attrs

from ucm.agent.client import AgentClient
from ucm.agent.joining import open_client
from ucm.integration.vllm.setup import Setup
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import Forgotten, PrefixWant, StepPlan
from ucm.scheduler.wanting import wanted_blocks
from ucm.stores.abc import Store
from ucm.stores.forgetter import Forgetter
from ucm.tracing import Log

__all__ = ["RankWants"]

_IN_TIME: Final = 0.9
"""A share of the time: the answer has its way to go."""


@attrs.frozen
class _Asked:
    """A want, behind which tokens its blocks end, and whether a part of it is of use."""

    want: PrefixWant
    ends: list[int]
    is_all_full: bool


class RankWants:
    """
    Wants of one rank that are not answered.

    Args:
        setup: What both halves agree on.
        rank: Whose.
        store: Its store.
        log: Told when the agent is there and when it is gone.
    """

    def __init__(self, setup: Setup, rank: int, store: Store, log: Log) -> None:
        self._setup = setup
        self._rank = rank
        self._store = store
        self._forgetter: Forgetter | None = None
        self._asked: dict[int, _Asked] = {}
        self._reached: dict[int, int] = {}
        self._client: AgentClient | None = None
        if setup.is_spread:  # from the start on, since saves are to be spilled
            self._client = open_client(setup.config, setup.facts(rank).slot_bytes, log)

    def begin(self, plan: StepPlan) -> None:
        """Ask for what a plan wants, let go of what it drops, delete what is forgotten."""
        for want in plan.wants:
            if self._rank in want.ranks:
                self._ask(want)
        for number in plan.dropped:
            self._asked.pop(number, None)
            if self._client is not None:
                self._client.drop(str(number))
        for forgotten in plan.forgotten:
            if self._rank in forgotten.ranks:
                self._forget(forgotten)

    def _matcher(self, keyspace_digest: bytes) -> PrefixMatcher:
        """Return what names the keys of this rank's parts."""
        shard = self._setup.topology.shard_of(self._rank)
        layout, store = self._setup.layout, self._store
        return PrefixMatcher(layout, store, keyspace_digest, [shard], full_hits=False)

    def _forget(self, forgotten: Forgotten) -> None:
        if self._forgetter is None:
            threads, client = self._setup.threads, self._client
            tell = (client.forget,) if client is not None else ()
            self._forgetter = Forgetter(self._store, threads, *tell)
        layout, matcher = self._setup.layout, self._matcher(forgotten.keyspace_digest)
        num_before = forgotten.start // layout.hash_block_tokens
        hashes = [*[b""] * num_before, *forgotten.hashes]
        stop = len(hashes) * layout.hash_block_tokens
        for group in layout.groups:
            blocks = forgotten.start // group.block_tokens, stop // group.block_tokens
            mine = layout.hashes_of(group, hashes, *blocks)
            self._forgetter.put(matcher.keys_of(group, mine))

    def _ask(self, want: PrefixWant) -> None:
        layout = self._setup.layout
        shard = self._setup.topology.shard_of(self._rank)
        matcher = self._matcher(want.keyspace_digest)
        before = [b""] * (want.start // layout.hash_block_tokens)
        keys, sizes, ends, _ = wanted_blocks(
            matcher,
            [*before, *want.hashes],
            range(want.start, want.stop),
            {shard: [group.block_bytes for group in layout.groups]},
        )
        is_asked = self._client is not None and self._client.want(
            str(want.number),
            keys,
            sizes,
            seconds=_IN_TIME * want.seconds,
            hold_s=want.hold_s,
            compute_s=want.compute_s,
            only=want.only,
            priority=want.priority,
            tenant=want.tenant,
        )
        if is_asked:
            self._asked[want.number] = _Asked(want, ends, matcher.is_all_full)
        else:
            self._reached[want.number] = want.start

    def take(self) -> dict[int, int]:
        """Return what has been answered: by want, up to which token its part is here."""
        client = self._client
        if client is not None and self._asked:
            over = [
                number for number in self._asked if not client.is_pending(str(number))
            ]
            for number in over:
                answer = client.answer(str(number))
                found = 0 if answer is None else answer.found
                self._reached[number] = self._reach(self._asked.pop(number), found)
        reached, self._reached = self._reached, {}
        return reached

    def _reach(self, asked: _Asked, found: int) -> int:
        if found >= len(asked.ends):
            return asked.want.stop
        if not asked.is_all_full:
            return asked.want.start  # a shorter hit needs other blocks of windows
        return asked.ends[found] - 1

    def __len__(self) -> int:
        return len(self._asked)

    def close(self) -> None:
        """Delete what is to be deleted, and leave the agent. Idempotent."""
        if self._forgetter is not None:
            self._forgetter.close()
        if self._client is not None:
            self._client.close()
