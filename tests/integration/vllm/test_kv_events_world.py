# SPDX-License-Identifier: Apache-2.0
"""A subscriber of an engine has what the ledger has, in whatever order things happen."""

import random

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved

from tests.agent.ledger_kit import hash_at, key_of
from tests.integration.vllm.test_kv_events import DIGEST, Client, low
from tests.testing.host_kit import ONE_FULL
from ucm.agent.ledger import Ledger, Reader
from ucm.agent.mirror import Said
from ucm.agent.protocol import Follow, Told
from ucm.blocks import ShardId
from ucm.integration.vllm.kv_events import EventTeller
from ucm.integration.vllm.kv_words import EventWords, GroupWords
from ucm.metrics import Counters

SPACES = (DIGEST, bytes(16))
MEDIA = ("slab", "disk")
NUMBERS = 12


class World:
    """Two parts of each block in two media, a ledger of them, and an engine that tells."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.there: set[tuple[bytes, int, int, int]] = set()
        self.client = Client()
        words = EventWords([GroupWords(16)])
        self.teller = EventTeller(
            *(self.client, ONE_FULL, [ShardId(0), ShardId(1)], words),
            alone=True,
            counters=Counters(),
            clock=lambda: 0.0,
        )
        self.digest = DIGEST
        self.heard: dict[str, set[int]] = {name: set() for name in MEDIA}
        self.reader: Reader | None = None
        self.other: Reader | None = None
        self.asked: Follow | None = None
        self.number = 0
        self.teller.rekey(DIGEST)
        self.meet()

    def meet(self) -> None:
        """Begin another agent, which lists what is left."""
        for each in sorted(self.there):
            if self.random.random() < 0.2:
                self.there.remove(each)
        self.ledger = Ledger(2, most_changes=6)
        for digest, medium, number, shard in sorted(self.there):
            self.ledger.stored(medium, key_of(number, shard, digest))
        self.reader = self.other = self.asked = None
        self.client.sent.clear()
        self.teller.joined(MEDIA[1:])

    def change(self) -> None:
        """Have a part of a block come or go."""
        pick = self.random
        at = pick.choice(SPACES), pick.randrange(2), pick.randrange(NUMBERS)
        digest, medium, number = at
        is_stored = pick.random() < 0.6
        for shard in pick.sample(range(2), pick.randint(1, 2)):
            key = key_of(number, shard, digest)
            if is_stored:
                self.there.add((*at, shard))
                self.ledger.stored(medium, key)
            else:
                self.there.discard((*at, shard))
                self.ledger.removed(medium, key)

    def describe(self) -> None:
        """Say what a block holds."""
        number = self.random.randrange(NUMBERS)
        said = Said(hash_at(number), None, [number])
        key = key_of(number, 0, self.random.choice(SPACES))
        self.ledger.describe(key, msgspec.msgpack.encode(said))

    def compete(self) -> None:
        """Have another engine want to tell, or leave."""
        if self.other is not None:
            self.ledger.close(self.other)
            self.other = None
        elif self.reader is not None:
            self.other = self.ledger.read(self.reader.prefix, alone=True)

    def reset(self) -> None:
        """Empty the engine's cache; perhaps it has other weights."""
        self.step()
        for each in self.heard.values():
            each.clear()
        self.digest = self.random.choice((self.digest, *SPACES))
        self.teller.rekey(self.digest)

    def step(self) -> None:
        """Have the engine tell a subscriber."""
        for event in self.teller.take():
            heard = self.heard[event.ownership]
            if isinstance(event, BlockRemoved):
                heard.difference_update(event.block_hashes)
            else:
                heard.update(event.block_hashes)

    def hear(self) -> None:
        """Do one thing that waits for the client's thread."""
        if self.client.waiting:
            self.client.waiting.pop(0)()

    def answer(self) -> bool:
        """Have the agent answer, if it is asked and there is something new."""
        for message in self.client.sent:
            if isinstance(message, Follow):
                assert self.asked is None or self.asked.number != message.number
                if self.reader is None or self.number != message.number:
                    if self.reader is not None:
                        self.ledger.close(self.reader)
                    self.reader = self.ledger.read(message.prefix, alone=True)
                    self.number = message.number
                self.asked = message
        self.client.sent.clear()
        if self.asked is None or self.reader is None:
            return False
        if (batch := self.reader.look()) is None:
            return False
        number, self.asked = self.asked.number, None
        self.teller.told(Told(number, *batch))
        return True

    def settle(self) -> None:
        """Go on until there is nothing more."""
        if self.other is not None:
            self.compete()
        for _ in range(10_000):
            if not (self.answer() or self.client.waiting or self.teller._ready):
                return
            self.client.run()
            self.step()
        raise AssertionError("it goes on for ever")

    def wanted(self) -> dict[str, set[int]]:
        """Return what a subscriber should have."""
        return {
            name: {
                low(number)
                for number in range(NUMBERS)
                if all(
                    (self.digest, medium, number, shard) in self.there
                    for shard in range(2)
                )
            }
            for medium, name in enumerate(MEDIA)
        }


def test_subscriber_has_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-57: blocks come and go, agents are lost, caches are emptied, weights change and change
    back, and another engine tells for a while, amid whatever batch is under way."""
    monkeypatch.setattr("ucm.integration.vllm.kv_events._MOST_NEWS", 2)
    monkeypatch.setattr("ucm.integration.vllm.kv_events._MOST_READY", 2)
    monkeypatch.setattr("ucm.agent.ledger.AT_ONCE", 4)
    for seed in range(40):
        world = World(seed)
        acts = [world.change, world.hear, world.step, world.answer] * 6
        acts += [world.describe, world.compete, world.reset, world.meet]
        for _ in range(world.random.randrange(10, 250)):
            world.random.choice(acts)()
        world.settle()
        assert world.wanted() == world.heard, f"seed {seed}"
        assert sum(map(len, world.heard.values())) == len(world.teller._mirror)
        there = {digest for digest, *_ in world.there}
        assert there == {prefix[1:] for prefix in world.ledger._there}
        assert world.ledger.told()["blocks"] == len(
            {(digest, number, shard) for digest, _, number, shard in world.there}
        )
