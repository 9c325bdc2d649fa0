# SPDX-License-Identifier: Apache-2.0
"""
What a host wants forgotten leaves the slab, and then its tiers, through the node's agent.

In that order, and on the thread of questions: what the slab has no more nobody puts into a tier
behind the agent's back. The agent answers in time with what is known by then, and goes on.

Threading: ``begin`` on any thread; nothing blocks.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs

from ucm.agent.client import AgentClient
from ucm.agent.health import AgentHealth
from ucm.agent.protocol import FORGETS, LONGEST_S, MOST_KEYS
from ucm.blocks import PackedKey
from ucm.cache.pending import Pending, at_end
from ucm.cache.questions import Questions
from ucm.stores.abc import Store
from ucm.threads import Threads

__all__ = ["Forgets", "Forgotten"]


@attrs.frozen
class Forgotten:
    """
    What became of blocks that were to be forgotten.

    Args:
        in_store: So many were in the store, and are there no more.
        in_tiers: So many were in tiers, as far as these have said so in time.
        kept: Tiers that may still have some: they, or the agent, could not be asked, or did not
            answer in time. Nobody asks them again.
    """

    in_store: int
    in_tiers: int = 0
    kept: tuple[str, ...] = ()


class Forgets:
    """
    Those of one cache.

    Args:
        client: Of the node's agent; None: there are no tiers.
        health: Counts what no agent was there for; where there is a client.
        store: The slab.
        questions: Where it is asked.
        seconds: For which is waited.
        threads: Where clock and lock come from.
    """

    def __init__(
        self,
        client: AgentClient | None,
        health: AgentHealth | None,
        store: Store,
        questions: Questions,
        seconds: float,
        threads: Threads,
    ) -> None:
        self._client = client
        self._health = health
        self._store = store
        self._questions = questions
        self._seconds = seconds
        self._now = threads.monotonic
        self._ends = threads.lock()
        self._names = map("forget-{}".format, itertools.count())

    def begin(self, pack: Callable[[], list[PackedKey]]) -> Pending[Forgotten]:
        """Have the slab and its tiers part with blocks, whose keys *pack* returns."""
        until = self._now() + self._seconds
        over: Pending[Forgotten] = Pending(self._ends)
        asked = self._questions.ask(lambda: self._forget(over, pack, until))

        def look() -> None:
            if asked.error is not None:
                over.end(None, asked.error)

        at_end(asked, look)
        return over

    def _forget(
        self,
        over: Pending[Forgotten],
        pack: Callable[[], list[PackedKey]],
        until: float,
    ) -> None:
        """Have the slab forget, and then the agent."""
        if over.is_done:  # nobody waits any more
            return
        keys = pack()
        in_store, client, health = self._store.forget(keys), self._client, self._health
        if client is None or health is None or not keys:
            over.end(Forgotten(in_store))
            return
        parts = {
            next(self._names): keys[at : at + MOST_KEYS]
            for at in range(0, len(keys), MOST_KEYS)
        }
        answers: list[tuple[int, Iterable[int]]] = []

        def tell(name: str) -> None:
            said = client.answer(name)
            if said is not None and said.reason in FORGETS:
                answers.append((said.found, said.media))
            else:
                health.unasked(len(parts[name]))
                answers.append((0, range(1, 1 + len(health.names))))
            if len(answers) == len(parts):
                in_tiers = sum(count for count, _ in answers)
                media = {medium for _, kept in answers for medium in kept}
                names = [health.names[medium - 1] for medium in sorted(media)]
                over.end(Forgotten(in_store, in_tiers, tuple(names)))

        seconds = max(0.0, min(until - self._now(), LONGEST_S))
        for name, part in parts.items():
            told = partial(tell, name)
            if not client.forget(part, name, seconds=seconds, tell=told):
                told()
        at_end(over, partial(_drop, client, tuple(parts)))


def _drop(client: AgentClient, names: Sequence[str]) -> None:
    """Wait for no answer any more."""
    for name in names:
        client.drop(name)
