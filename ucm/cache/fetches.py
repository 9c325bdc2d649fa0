# SPDX-License-Identifier: Apache-2.0
"""
What a host has fetched from tiers, through the node's agent, before it loads it.

One question to the slab, on the thread of questions, and where that falls short one to the
agent, which answers in time or is not waited for. What was fetched is kept in the slab until a
load of its last block is over, until the host gives it up, or until its time has passed; the
agent looks at that by itself, so that nothing is kept for a host that has died.

Threading: all of it on any thread; nothing blocks but ``close``.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

import attrs

from ucm.agent.client import AgentClient, Answer
from ucm.agent.health import AgentHealth
from ucm.agent.protocol import LONGEST_S
from ucm.blocks import PackedKey
from ucm.cache.forgetting import Forgets, Forgotten
from ucm.cache.orders import Asked, Orders
from ucm.cache.pending import Pending, at_end
from ucm.cache.questions import Questions
from ucm.cache.transfers import Transfer
from ucm.config import UCMConfig
from ucm.errors import PipelineClosedError, StoreUnavailableError
from ucm.metrics import Counters
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.stores.abc import Store
from ucm.threads import Threads

__all__ = ["Fetch", "Fetched", "Fetches", "Fetching"]

_NO_TIERS: Final = Answer(0, Reason.ABSENT)
_NO_AGENT: Final = Answer(0, Reason.UNAVAILABLE)
_NO_ANSWER: Final = Answer(0, Reason.DEADLINE)


@attrs.frozen(eq=False)
class Fetched:
    """
    What a prefetch came to; a bad end is a value too.

    Args:
        found: So many of the keys, from the first on, are stored. That is no promise: a load
            may find less.
        reason: Why not all; empty if they are. ``ABSENT``: no tier has it, or there are no
            tiers. ``UNAVAILABLE``: agent, tier or store could not be asked. ``DEADLINE``: it
            was not there in time. Others are a tier's.
        give_up: For who does not load it: want it no more, so that others find room. Any
            thread, does not block, and is nothing the second time.
    """

    found: int
    reason: Reason
    give_up: Callable[[], None]


class Fetch:
    """
    Keys that are looked for. What happens to who waits within its context gives it up.

    Args:
        fetches: All of them.
        name: Its own.
        keys: In order.
        group: Of the layout.
        tenant: Whose share of the slab they take.
        until: When nobody waits any more.
        over: Ends with what the agent says, or why nobody asked it.
    """

    def __init__(
        self,
        fetches: "Fetches",
        name: str,
        keys: tuple[bytes, ...],
        group: int,
        tenant: int,
        until: float,
        over: Pending[Answer],
    ) -> None:
        self._fetches = fetches
        self.name = name
        self.keys = keys
        self.group = group
        self.tenant = tenant
        self.until = until
        self.over = over
        self.in_slab = 0
        """Keys that were there before anybody was asked."""
        self.last = b""
        """With whose load it is over."""
        self.is_given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        if exc_type is not None:
            self.give_up()

    @property
    def left(self) -> float:
        """Seconds for which it is still waited for."""
        return max(self.until - self._fetches.now(), 0.0)

    def give_up(self) -> None:
        """Want it no more; nobody waits for it. Idempotent."""
        self.is_given_up = True
        self._fetches.drop(self)
        self.over.end(_NO_ANSWER)

    def result(self) -> Fetched:
        """Return what there is, now that nobody waits any more; raises what asking did."""
        self.over.end(_NO_ANSWER)
        answer = self.over.result()
        if not answer.found:
            self.give_up()
        found = max(self.in_slab, answer.found)
        is_whole = found == len(self.keys)
        return Fetched(found, Reason.NONE if is_whole else answer.reason, self.give_up)


class Fetching:
    """
    Tiers that are asked for what the store lacks.

    Args:
        fetch: What is looked for.
    """

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    @property
    def is_over(self) -> bool:
        """Whether it is known what there is, or there is no time left for more."""
        return self._fetch.over.is_done or not self._fetch.left

    def result(self) -> Fetched:
        """
        Return what there is; once it is over.

        Raises:
            PipelineClosedError: The cache was closed meanwhile.
        """
        return self._fetch.result()

    def give_up(self) -> None:
        """Want it no more, whether it is over or not. Idempotent."""
        self._fetch.give_up()


class Fetches:
    """
    Those of one cache.

    Args:
        client: Of the node's agent; closed with this. None: there are no tiers.
        store: The slab.
        questions: Where it is asked.
        orders: Know keys and sizes.
        config: How long is waited, and what was found is kept.
        counters: Of how it ended.
        threads: Where clock and lock come from.
    """

    def __init__(
        self,
        client: AgentClient | None,
        store: Store,
        questions: Questions,
        orders: Orders,
        config: UCMConfig,
        counters: Counters,
        threads: Threads,
    ) -> None:
        self._client = client
        self._health = None
        if client is not None:
            self._health = AgentHealth(client, counters, config.tiers)
        self._store = store
        self._forgets = Forgets(
            *(client, self._health, store, questions),
            *(config.timeout.load, threads),
        )
        self._questions = questions
        self._orders = orders
        self._timeout = config.timeout
        self._counters = counters
        self.now = threads.monotonic
        self._ends = threads.lock()
        self._names = map(str, itertools.count())
        self._kept: dict[str, tuple[Fetch, float]] = {}
        """What the agent may keep something for, and until when."""
        self.is_open = True

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_served(self) -> bool:
        """Whether there is an agent that would be asked."""
        return self._client is not None and self._client.is_up

    def begin(
        self, keys: Sequence[bytes], group: int, timeout: float | None, place: Place
    ) -> Fetch:
        """
        Have keys looked for; see ``Cache.prefetch``.

        Raises:
            KeyFormatError: They are none.
            LayoutError: There is no such group.
            PipelineClosedError: The cache is closed.
            ValueError: *timeout* is below 0 or no number.
        """
        self._check_open()
        packer, own = self._orders.packer(keys, group), tuple(keys)
        seconds = self._timeout.fetch if timeout is None else timeout
        if not seconds >= 0:  # nor is NaN, which would upset a loop's timers
            raise ValueError(f"timeout={timeout} is not 0 or more seconds")
        until = self.now() + min(seconds, LONGEST_S)
        over: Pending[Answer] = Pending(self._ends)
        tenant = int(place.tenant)
        fetch = Fetch(self, next(self._names), own, group, tenant, until, over)
        asked = self._questions.ask(lambda: self._look(fetch, packer.pack(own)))

        def look() -> None:
            if isinstance(asked.error, StoreUnavailableError):
                over.end(_NO_AGENT)
            elif asked.error is not None:
                over.end(None, asked.error)

        at_end(asked, look)
        return fetch

    def _check_open(self) -> None:
        if not self.is_open:
            raise PipelineClosedError(self._questions.why_closed)

    def _look(self, fetch: Fetch, packed: list[PackedKey]) -> None:
        """Ask the slab and, where that falls short, the agent. On the thread of questions."""
        if fetch.is_given_up:
            return
        fetch.in_slab, client = self._store.match(packed), self._client
        if fetch.in_slab == len(packed):
            fetch.over.end(Answer(len(packed), Reason.NONE))
        elif client is None:
            fetch.over.end(_NO_TIERS)
        elif not fetch.is_given_up:
            self._ask(client, fetch, packed)

    def _ask(self, client: AgentClient, fetch: Fetch, packed: list[PackedKey]) -> None:
        now, seconds = self.now(), fetch.left
        for old, until in list(self._kept.values()):
            if until < now:  # the agent has let go of it by itself
                self.drop(old)
        hold_s = min(self._timeout.load, LONGEST_S - seconds)

        def tell() -> None:
            answer = client.answer(fetch.name) or _NO_AGENT
            fetch.last = fetch.keys[answer.found - 1] if answer.found else b""
            self._counters.add("ucm_fetch_wants_total", 1, reason=answer.reason)
            for medium, count in Counter(answer.media.replace(b"\0", b"")).items():
                tier = client.media[medium - 1]
                self._counters.add("ucm_fetched_parts_total", count, tier=tier)
            fetch.over.end(answer)

        # Before the question: who is answered may have loaded all before we get on here.
        self._kept[fetch.name] = fetch, now + seconds + hold_s
        is_asked = client.want(
            fetch.name,
            packed,
            [self._orders.block_bytes(fetch.group)] * len(packed),
            seconds=seconds,
            hold_s=hold_s,
            tenant=fetch.tenant,
            tell=tell,
        )
        if not is_asked:
            self._kept.pop(fetch.name, None)
            fetch.over.end(_NO_AGENT)
        elif fetch.is_given_up:  # amid it, so that there may have been nothing to drop
            self._kept.pop(fetch.name, None)
            client.drop(fetch.name)

    def drop(self, fetch: Fetch) -> None:
        """Have nothing kept for a fetch any more. Idempotent."""
        if self._kept.pop(fetch.name, None) is not None:
            assert self._client is not None
            self._client.drop(fetch.name)

    def forget(self, keys: Sequence[bytes], group: int) -> Pending[Forgotten]:
        """
        Have the slab and its tiers part with blocks; see ``Cache.forget``.

        Raises:
            KeyFormatError: They are no keys.
            LayoutError: There is no such group.
            PipelineClosedError: The cache is closed.
        """
        self._check_open()
        packer, own = self._orders.packer(keys, group), tuple(keys)
        return self._forgets.begin(lambda: packer.pack(own))

    def loading(self, transfer: Transfer, asked: Asked) -> None:
        """Take note that blocks are loaded: behind it nothing is kept that ends with them."""
        if not self._kept:
            return
        keys = frozenset(asked.keys())

        def loaded() -> None:
            for fetch, _ in list(self._kept.values()):
                if fetch.group == asked.group and fetch.last in keys:
                    self.drop(fetch)

        at_end(transfer.over, loaded)

    def refresh(self) -> None:
        """Bring up to date what metrics say of the agent."""
        if self._health is not None:
            self._health.refresh()

    def close(self) -> None:
        """Leave the agent. Idempotent."""
        self.is_open = False
        if self._client is not None:
            self._client.close()
