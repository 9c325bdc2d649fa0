# SPDX-License-Identifier: Apache-2.0
"""The engine's events of what is below it: made off its thread, bounded, in its own words."""

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tests.agent.ledger_kit import hash_at, key_of
from tests.testing.host_kit import ONE_FULL
from ucm.agent.mirror import Said
from ucm.agent.protocol import Describe, Entry, Follow, Told
from ucm.blocks import ShardId, keyspace_prefix
from ucm.config import UCMConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.kv_events import EventTeller, NoTeller, open_teller
from ucm.integration.vllm.kv_words import (
    EventWords,
    GroupWords,
    check_events,
    contents,
)
from ucm.metrics import Counters

SIZE = ONE_FULL.groups[0].block_tokens
DIGEST = bytes(range(16))
FULL = GroupWords(SIZE, "full_attention", None)


class Client:
    """An agent's client whose thread is the test's."""

    def __init__(self) -> None:
        self.is_up = True
        self.sent: list = []
        self.waiting: list = []
        self.follower = None
        self.is_closed = False

    def call(self, function) -> None:
        """Have it called later, as on another thread."""
        self.waiting.append(function)

    def run(self) -> None:
        """Do what waits."""
        while self.waiting:
            self.waiting.pop(0)()

    def send(self, message) -> None:
        """Take a message."""
        self.sent.append(message)

    def follow(self, follower) -> None:
        """Take note."""
        self.follower = follower

    def close(self) -> None:
        """Be gone."""
        self.is_closed = True


class World:
    """A teller that follows, and what it says."""

    def __init__(self, **more) -> None:
        self.now = 100.0
        self.client, self.counters = Client(), Counters()
        words = EventWords([FULL])
        words.joined(["disk"])
        self.teller = EventTeller(
            *(self.client, ONE_FULL, [ShardId(0)], words),
            alone=True,
            counters=self.counters,
            clock=lambda: self.now,
        )
        self.teller.rekey(DIGEST)
        self.client.run()

    def tell(self, *entries: Entry, number=1, begins=False, listed=False) -> None:
        """Be the agent."""
        self.teller.told(Told(number, list(entries), begins, listed))

    def followed(self) -> int:
        """Return how often it has asked, and forget that."""
        asked = [each for each in self.client.sent if isinstance(each, Follow)]
        self.client.sent.clear()
        return len(asked)


@pytest.fixture
def world() -> World:
    """Return one that follows its key space."""
    return World()


def request(name="r", blocks=2, **more):
    """Return a request of whole blocks and a token."""
    hashes = [hash_at(number) for number in range(1, blocks + 1)]
    tokens = list(range(blocks * SIZE + 1))
    said = {"lora_request": None, "mm_features": [], "cache_salt": None}
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, all_token_ids=tokens, **said | more
    )


def stored(number: int, said: bytes = b"", medium: int = 0) -> Entry:
    """Return a line about a block that came."""
    return Entry(medium, True, key_of(number), said)


def low(number: int) -> int:
    """Return a hash as events have it."""
    return int.from_bytes(hash_at(number)[-8:], "big")


class TestTake:
    def test_events_are_the_engines_own(self, world) -> None:
        """R-57: a block is told with its hash, its parent, its tokens and where it is; a
        chain of them in one event, and what went by its hash."""
        first = Said(hash_at(1), None, list(range(SIZE)))
        second = Said(hash_at(2), hash_at(1), list(range(SIZE, 2 * SIZE)))
        encoded = [msgspec.msgpack.encode(said) for said in (first, second)]
        world.tell(
            stored(1, encoded[0]), stored(2, encoded[1]), begins=True, listed=True
        )
        world.tell(stored(2, encoded[1], medium=1), Entry(0, False, key_of(1)))
        events = world.teller.take()
        where = {"group_idx": 0, "locality": "LOCAL"}
        content = {
            "block_size": SIZE,
            "lora_id": None,
            "lora_name": None,
            "kv_cache_spec_kind": "full_attention",
        }
        assert [
            BlockStored(
                block_hashes=[low(1), low(2)],
                parent_block_hash=None,
                token_ids=list(range(2 * SIZE)),
                medium="CPU",
                ownership="slab",
                **where | content,
            ),
            BlockStored(
                block_hashes=[low(2)],
                parent_block_hash=low(1),
                token_ids=second.tokens,
                medium="STORAGE",
                ownership="disk",
                **where | content,
            ),
            BlockRemoved(
                block_hashes=[low(1)], medium="CPU", ownership="slab", **where
            ),
        ] == events
        assert [] == world.teller.take()
        assert (3, 1) == tuple(
            world.counters.total("ucm_kv_event_blocks_total", event=event)
            for event in ("stored", "removed")
        )

    def test_block_that_nobody_described_is_told_as_the_engine_does(
        self, world
    ) -> None:
        """R-57: a block of which only its hash is known has no tokens and no size."""
        world.tell(stored(1), stored(2), begins=True, listed=True)
        (event,) = world.teller.take()
        assert ([low(1), low(2)], [], 0) == (
            event.block_hashes,
            event.token_ids,
            event.block_size,
        )

    def test_no_more_than_some_batches_wait_for_the_engine(self, world) -> None:
        """R-57: an engine that idles holds a few batches; the agent keeps the rest."""
        world.tell(begins=True, listed=True)
        assert 2 == world.followed()
        for number in range(1, 9):
            world.tell(stored(number))
        assert 7 == world.followed()
        assert 8 == len(world.teller.take())
        world.client.run()
        assert 1 == world.followed()

    def test_engine_that_has_nothing_to_tell_pays_nothing(self, world) -> None:
        """R-18, R-57: without events a step leaves nothing to do on any thread."""
        world.client.run()
        assert [] == world.teller.take()
        assert [] == world.client.waiting

    def test_answers_of_a_former_key_space_are_passed_over(self, world) -> None:
        """R-57: with new weights all former blocks go, and none comes back by an old answer."""
        world.tell(stored(1), begins=True, listed=True)
        world.teller.take()
        other = bytes(16)
        world.teller.rekey(other)
        world.client.run()
        assert Follow(2, keyspace_prefix(other), alone=True) == world.client.sent[-1]
        world.tell(stored(2))
        assert [] == world.teller.take()
        world.tell(number=2, begins=True, listed=True)
        (event,) = world.teller.take()
        assert isinstance(event, BlockRemoved)

    def test_same_key_space_again_tells_all_again(self, world) -> None:
        """R-57: an engine that emptied its cache told its subscribers to forget all."""
        for number in (1, 2):
            world.tell(stored(1), number=number, begins=True, listed=True)
            assert 1 == len(world.teller.take())
            world.teller.rekey(DIGEST)
            world.client.run()

    def test_next_agent_is_followed_from_its_beginning(self, world) -> None:
        """R-57: it tells the difference to what the last one told."""
        world.tell(stored(1), stored(2), begins=True, listed=True)
        world.teller.take()
        world.teller.joined(["disk"])
        assert 2 == world.client.sent[-1].number
        world.tell(stored(2), stored(3), number=2, begins=True, listed=True)
        kinds = Counter(type(event).__name__ for event in world.teller.take())
        assert {"BlockStored": 1, "BlockRemoved": 1} == kinds


class TestDescribe:
    def test_blocks_are_described_once(self, world) -> None:
        """R-57: what the whole blocks of a request hold, when it begins and what was decoded
        when it ends; not again for another request."""
        one = request()
        world.teller.begun(one, one.block_hashes)
        assert [] == [each for each in world.client.sent if isinstance(each, Describe)]
        world.client.run()
        one.block_hashes.append(hash_at(3))
        one.all_token_ids += range(1000, 1000 + SIZE)
        world.teller.begun(request("s"), request().block_hashes)
        assert 2 == len(world.teller)
        for name in ("r", "s", "s"):
            world.teller.ended(name)
        world.client.run()
        sent = [each for each in world.client.sent if isinstance(each, Describe)]
        assert [[key_of(1), key_of(2)], [key_of(3)]] == [
            [key for key, _ in each.blocks] for each in sent
        ]
        said = [
            msgspec.msgpack.decode(text, type=Said)
            for each in sent
            for _, text in each.blocks
        ]
        assert [
            Said(hash_at(1), None, one.all_token_ids[:SIZE]),
            Said(hash_at(2), hash_at(1), one.all_token_ids[SIZE : 2 * SIZE]),
            Said(hash_at(3), hash_at(2), one.all_token_ids[2 * SIZE : 3 * SIZE]),
        ] == said
        assert 0 == len(world.teller)

    def test_engines_hash_is_told_where_ours_differs(self, world) -> None:
        """R-57: blocks of an adapter are stored under a hash of ours, told of under its own."""
        adapter = SimpleNamespace(
            adapter_id=3, name="poet", lora_name="poet", lora_path="/poet"
        )
        lora = request(lora_request=adapter, blocks=1, prompt_embeds=None)
        world.teller.begun(lora, [hash_at(9)])
        world.client.run()
        ((key, text),) = world.client.sent[-1].blocks
        said = msgspec.msgpack.decode(text, type=Said)
        assert key_of(9) == key
        assert (hash_at(1), 3, "poet") == (
            said.block_hash,
            said.lora_id,
            said.lora_name,
        )
        assert ["poet"] == said.extra

    def test_salt_is_said_of_the_first_block(self) -> None:
        """R-57: what else went into a hash, as the engine's own events say it."""
        one = request(cache_salt="s", prompt_embeds=None)
        assert [["s"], None] == [
            said.extra for said in contents(one, SIZE, one.block_hashes)
        ]

    def test_requests_wait_for_an_agent_within_bounds(self) -> None:
        """R-57: what ran before the agent was there is described then, the last of it."""
        world = World()
        world.client.is_up = False
        for number in range(1100):
            world.teller.begun(request(str(number), 1), [hash_at(number % 250)])
            world.teller.ended(str(number))
        assert [] == world.client.waiting
        world.teller.joined([])
        described = [
            key
            for each in world.client.sent
            if isinstance(each, Describe)
            for key, _ in each.blocks
        ]
        assert 250 == len(described) == len(set(described))

    def test_block_with_more_to_say_than_fits_stays_bare(self, world) -> None:
        """R-57: a description has a bound."""
        huge = request(blocks=1, cache_salt="x" * 20000, prompt_embeds=None)
        world.teller.begun(huge, huge.block_hashes)
        world.client.run()
        assert not any(isinstance(each, Describe) for each in world.client.sent)


class TestWords:
    def test_tiers_are_told_apart(self) -> None:
        """R-57: two tiers of one kind have two names, and what other machines see is remote."""
        words = EventWords([FULL])
        words.joined(["disk", "disk", "redis"])
        assert ["slab", "disk", "disk.1", "redis"] == list(words._owners)
        world = World()
        world.teller._words = words
        world.tell(
            *(stored(1, medium=medium) for medium in range(4)), begins=True, listed=True
        )
        assert [
            ("CPU", "slab", "LOCAL"),
            ("STORAGE", "disk", "LOCAL"),
            ("STORAGE", "disk.1", "LOCAL"),
            ("STORAGE", "redis", "REMOTE"),
        ] == [(e.medium, e.ownership, e.locality) for e in world.teller.take()]

    def test_only_blocks_of_a_chain_share_an_event(self, world) -> None:
        """R-57: an event names one parent, that of its first block."""
        said = [Said(hash_at(number), None, [number] * SIZE) for number in (1, 2)]
        lines = [
            stored(at, msgspec.msgpack.encode(one)) for at, one in enumerate(said, 1)
        ]
        world.tell(*lines, begins=True, listed=True)
        assert [None, None] == [each.parent_block_hash for each in world.teller.take()]

    def test_release_with_fewer_words_is_told_less(self) -> None:
        """R-57: fields that an engine's events do not have are left out."""

        class Removed(msgspec.Struct):
            block_hashes: list

        words = EventWords([FULL])
        words._removed = Removed
        world = World()
        world.teller._words = words
        world.tell(stored(1), begins=True, listed=True)
        world.tell(Entry(0, False, key_of(1)))
        assert [low(1)] == world.teller.take()[1].block_hashes


class TestCheck:
    def config(self, **settings) -> UCMConfig:
        """Return settings."""
        return UCMConfig.from_mapping(settings)

    def test_events_that_nobody_publishes_are_refused(self) -> None:
        """X-09, R-57: the remedy names the engine's own switch."""
        check_events(self.config(), SimpleNamespace())
        engine = SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True)
        )
        check_events(self.config(kv_events="node"), engine)
        off = SimpleNamespace(enable_kv_cache_events=False)
        for silent in (SimpleNamespace(), SimpleNamespace(kv_events_config=off)):
            with pytest.raises(ConfigError, match="kv-events-config"):
                check_events(self.config(kv_events="engine"), silent)

    def test_store_without_a_record_of_changes_is_refused(self) -> None:
        """X-09, R-57: only a slab has one."""
        engine = SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True)
        )
        with pytest.raises(ConfigError, match=r"store\.type"):
            check_events(self.config(kv_events="node", store={"type": "null"}), engine)

    def test_nothing_is_told_unless_asked(self) -> None:
        """R-18, R-57: off by default, and then there is nothing that could cost anything."""
        setup = SimpleNamespace(config=self.config())
        teller = open_teller(setup, Client(), Counters())
        assert type(teller) is NoTeller
        teller.rekey(DIGEST)
        teller.begun(request(), [])
        teller.ended("r")
        teller.close()
        assert ((), 0) == (teller.take(), len(teller))

    def test_teller_leaves_the_agent(self, world) -> None:
        """R-57: when the engine ends."""
        world.teller.close()
        assert world.client.is_closed
