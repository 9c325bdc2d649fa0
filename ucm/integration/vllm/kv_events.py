# SPDX-License-Identifier: Apache-2.0
"""
The engine's KV events of what is below it: slab and tiers, as the node's ledger has them.

The engine's publisher sends what ``take`` returns, in each step in which the engine runs. All
of it is made on the thread of the agent's client, batch after batch and no more than some
ahead; and what the blocks of a request hold is told to the agent there, too.

An engine with nothing to compute takes no step unless somebody asks for one: ``are_due`` does,
while there is something to tell and for a moment behind it. Then the engine sleeps until
something reaches it, and nobody can wake it from here.

Threading: ``begun``, ``ended``, ``rekey``, ``are_due`` and ``take`` are called on the engine's
scheduler thread, and cost it no more for a request of many blocks than for one of few; the rest
is the client's.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ucm.agent.client import AgentClient
from ucm.agent.mirror import Mirror, News
from ucm.agent.protocol import Describe, Follow, Told
from ucm.blocks import KeyPacker, PackedKey, ShardId, keyspace_prefix
from ucm.config import KVEvents
from ucm.integration.vllm.kv_words import EventWords, contents
from ucm.integration.vllm.setup import Setup
from ucm.layout import KVLayout
from ucm.metrics import Counters

__all__ = ["EventTeller", "NoTeller", "open_teller"]

_MOST_READY: Final = 8
"""Batches that wait for the engine's next step."""
_MOST_NEWS: Final = 1024
"""Of one batch; a listing may end with a million blocks that are gone."""
_MOST_SUBJECTS: Final = 1024
"""Requests that wait for an agent to be told of."""
_MOST_DESCRIBED: Final = 1 << 16
_MOST_SAID: Final = 14 << 10
_AT_ONCE: Final = 256
_BLOCKS: Final = "ucm_kv_event_blocks_total"
_TAIL_S: Final = 0.25
"""What a request has saved is told of, and on a disk, well within that."""
_START_S: Final = 5.0
"""An agent is there by then, and tells what was stored before."""
_LONGEST_S: Final = 30.0
"""Beside a neighbour that always stores something. What waits for an engine to have no work,
such as a pause, waits so long at most."""


class _Subject(NamedTuple):
    """A request whose blocks are to be described, and the hashes that it is saved under."""

    request: Any
    hashes: Sequence[bytes]
    digest: bytes


class _Ready(NamedTuple):
    """Events of one batch, and how many blocks they are about."""

    events: list[Any]
    counts: Counter[str]


class NoTeller:
    """Tells nothing."""

    is_told = False
    """Whether it has to hear of requests."""

    def rekey(self, digest: bytes) -> None:
        """Take note of the key space of this engine's blocks."""

    def begun(self, request: Any, hashes: Sequence[bytes]) -> None:  # noqa: ANN401 - vLLM's Request
        """Take note of a request that was given blocks."""

    def ended(self, request_id: str) -> None:
        """Take note that a request has all its tokens."""

    def are_due(self) -> bool:
        """Return whether an engine without requests is to take a step for events."""
        return False

    def take(self) -> Sequence[Any]:
        """Return the events that are there, each once."""
        return ()

    def __len__(self) -> int:
        """Return how many requests are kept."""
        return 0

    def close(self) -> None:
        """Hear no more. Idempotent."""


class EventTeller(NoTeller):
    """
    Tells of blocks below the engine.

    Args:
        client: Of the node's agent; closed with this.
        layout: The engine's groups.
        shards: The parts of which each block consists.
        words: Makes events.
        alone: Tell only if no other engine of this slab and key space does.
        counters: Count blocks.
        clock: In seconds.
    """

    is_told = True

    def __init__(
        self,
        client: AgentClient,
        layout: KVLayout,
        shards: Sequence[ShardId],
        words: EventWords,
        *,
        alone: bool,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._layout = layout
        self._first_shard = min(shards)
        self._words = words
        self._alone = alone
        self._counters = counters
        self._clock = clock
        self._idle_from: float | None = None
        self._idle_since: float | None = None
        self._patience_s = _START_S
        self._digest = b""
        self._running: dict[str, _Subject] = {}
        self._subjects: deque[_Subject] = deque(maxlen=_MOST_SUBJECTS)
        self._ready: deque[_Ready] = deque()
        # The client's thread alone:
        self._mirror = Mirror(shards)
        self._news: Iterator[News] | None = None
        """What was told and is not made events of; None: nothing."""
        self._goes_on = False
        """It does soon: no second time in one turn of the client's loop, however often it is asked."""
        self._tiers: tuple[str, ...] = ()
        self._number = 0
        self._is_asked = False
        self._described: OrderedDict[PackedKey, None] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()

    # On the engine's thread.

    def rekey(self, digest: bytes) -> None:
        """Tell of the blocks of a key space from now on, of all that are there first."""
        if not self._digest:
            self._client.follow(self)
        self._digest = digest
        self._client.call(self._again)

    def begun(self, request: Any, hashes: Sequence[bytes]) -> None:  # noqa: ANN401 - vLLM's Request
        """Take note of a request that was given blocks."""
        self._idle_from = self._idle_since = None
        subject = _Subject(request, hashes, self._digest)
        self._running[request.request_id] = subject
        self._enqueue(subject)

    def ended(self, request_id: str) -> None:
        """Take note that a request has all its tokens."""
        if (subject := self._running.pop(request_id, None)) is not None:
            self._enqueue(subject)

    def _enqueue(self, subject: _Subject) -> None:
        self._subjects.append(subject)
        if self._client.is_up:
            self._client.call(self._describe_all)

    def are_due(self) -> bool:
        """
        Return whether an engine without requests is to take a step for events.

        Asked only where nothing else keeps the engine awake.
        """
        now = self._clock()
        if self._idle_from is None:
            self._idle_from = now
        if now >= self._idle_from + _LONGEST_S:
            return False
        if self._ready:
            return True
        if self._idle_since is None:
            self._idle_since = now
        if now < self._idle_since + self._patience_s:
            return True
        self._patience_s = _TAIL_S  # whoever has told nothing by now may never do
        return False

    def take(self) -> list[Any]:
        """Return the events that are there, each once."""
        events: list[Any] = []
        for _ in range(len(self._ready)):
            batch = self._ready.popleft()
            events += batch.events
            for event, count in batch.counts.items():
                self._counters.add(_BLOCKS, count, event=event)
        if events:
            self._idle_since, self._patience_s = None, _TAIL_S
            self._client.call(self._go_on)
        return events

    def __len__(self) -> int:
        """Return how many requests are kept."""
        return len(self._running)

    def close(self) -> None:
        """Leave the agent. Idempotent."""
        self._client.close()

    # On the client's thread.

    def joined(self, media: Sequence[str]) -> None:
        """Take note that an agent is there: it has to be told all, and tells all."""
        if tuple(media) != self._tiers:  # an engine that has none takes any agent
            self._tell(list(self._mirror.leave_tiers()))
            self._tiers = tuple(media)
        self._words.joined(media)
        self._described.clear()
        self._describe_all()
        self._follow_anew()

    def told(self, told: Told) -> None:
        """Make events of what the agent tells."""
        if told.number != self._number:
            return  # of another key space
        self._news = self._mirror.apply(told)
        self._go_on()

    def _go_on(self) -> None:
        """Make events of some of what was told, as long as there is room; others come in between."""
        if self._goes_on:
            return
        if self._news is not None:
            if len(self._ready) >= _MOST_READY:
                return
            self._tell(news := list(itertools.islice(self._news, _MOST_NEWS)))
            if len(news) == _MOST_NEWS:
                self._goes_on = True
                self._client.call(self._go_on_now)
                return
            self._news, self._is_asked = None, False
        self._ask()

    def _go_on_now(self) -> None:
        self._goes_on = False
        self._go_on()

    def _tell(self, news: Sequence[News]) -> None:
        if news:
            self._ready.append(_Ready(self._words.events(news), _counted(news)))

    def _again(self) -> None:
        self._mirror.tell_again(keyspace_prefix(self._digest))
        self._follow_anew()

    def _follow_anew(self) -> None:
        self._number += 1
        self._news, self._is_asked = None, False
        self._ask()

    def _ask(self) -> None:
        if self._is_asked or not self._digest or len(self._ready) >= _MOST_READY:
            return
        self._is_asked = True
        prefix = keyspace_prefix(self._digest)
        self._client.send(Follow(self._number, prefix, self._alone))

    def _describe_all(self) -> None:
        while self._subjects:
            blocks = self._described_now(self._subjects.popleft())
            for at in range(0, len(blocks), _AT_ONCE):
                self._client.send(Describe(blocks[at : at + _AT_ONCE]))

    def _described_now(self, subject: _Subject) -> list[tuple[bytes, bytes]]:
        """Return the descriptions of blocks that the agent has not had from us."""
        request, hashes, digest = subject
        layout, blocks = self._layout, []
        for group in layout.groups if digest else ():
            known = min(len(hashes), len(request.block_hashes))
            count = known * layout.hash_block_tokens // group.block_tokens
            places = [layout.hash_index(group, at) for at in range(count)]
            packer = KeyPacker(digest, group.group_id, self._first_shard)
            keys = packer.pack(hashes[at] for at in places)
            if not keys or keys[-1] in self._described:
                continue
            engines = [request.block_hashes[at] for at in places]
            said = contents(request, group.block_tokens, engines)
            for key, each in zip(keys, said, strict=True):
                if key in self._described:
                    continue
                self._described[key] = None
                text = self._encoder.encode(each)
                if len(text) <= _MOST_SAID:
                    blocks.append((bytes(key), text))
        while len(self._described) > _MOST_DESCRIBED:
            self._described.popitem(last=False)
        return blocks


def _counted(news: Sequence[News]) -> Counter[str]:
    return Counter("stored" if one.is_stored else "removed" for one in news)


def open_teller(
    setup: Setup, client: AgentClient | None, counters: Counters
) -> NoTeller:
    """Return what tells of blocks, if that is wanted."""
    wanted = setup.config.kv_events
    if client is None or wanted is KVEvents.OFF:
        return NoTeller()
    words = EventWords(setup.group_words)
    alone = wanted is KVEvents.NODE
    shards = setup.topology.shards
    return EventTeller(
        *(client, setup.layout, shards, words),
        alone=alone,
        counters=counters,
        clock=setup.threads.monotonic,
    )
