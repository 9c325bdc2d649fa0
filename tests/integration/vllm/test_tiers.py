# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half asks of the agent, and what the engine hears meanwhile."""

from types import SimpleNamespace

import pytest

from tests.integration.vllm.agent_kit import FakeClient
from tests.testing.host_kit import ONE_FULL
from ucm.blocks import ShardId
from ucm.config import UCMConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.tiers import Tiers, check_tiers, open_client
from ucm.metrics import Counters
from ucm.scheduler.matching import MatchReason, PrefixMatch, PrefixMatcher

MISS = PrefixMatch(0, MatchReason.MISS)
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
SIZE = ONE_FULL.groups[0].block_tokens


def request(name="a", **more):
    """Return a request of four blocks."""
    return SimpleNamespace(request_id=name, num_tokens=4 * SIZE, **more)


class World:
    """Tiers over a fake client."""

    def __init__(self, **settings):
        self.client, self.counters = FakeClient(), Counters()
        matcher = PrefixMatcher(ONE_FULL, None, bytes(16), [ShardId(0)], full_hits=True)
        config = UCMConfig.from_mapping(settings)
        self.tiers = Tiers(matcher, self.client, config, self.counters)
        self.tiers.agree({ShardId(0): [96]})

    def ask(self, asked=None, match=MISS, computed=0):
        """Ask for what a match lacks."""
        return self.tiers.ask(asked or request(), HASHES, computed, match)


@pytest.fixture
def world():
    """Return tiers whose agent is there."""
    return World()


class TestAsk:
    def test_life_asks_once(self, world) -> None:
        """R-54: a request asks when its match falls short, and not again in this life,
        however often the engine does."""
        assert world.ask()
        assert world.tiers.is_pending("a")
        world.client.say("a", 2, "absent")
        assert not world.tiers.is_pending("a")
        assert not world.ask()
        assert [("a", 4, (96,) * 4)] == world.client.wanted
        assert 1 == world.counters.total("ucm_fetch_wants_total", reason="absent")

    def test_no_request_asks_for_longer_than_an_agent_takes(self) -> None:
        """R-54: a wait that no agent would take, and end the connection for, is cut."""
        world = World(timeout={"fetch": 300.0})
        assert world.ask()
        assert [(60.0, 0.0)] == world.client.times

    def test_next_life_asks_anew(self, world) -> None:
        """R-54: a request that was preempted may have lost what was fetched for it."""
        world.ask()
        world.client.say("a", 4)
        assert not world.tiers.is_pending("a")
        world.tiers.begun("a", SIZE)
        assert [] == world.client.dropped
        assert world.ask()

    def test_only_what_is_missing_is_asked_for(self, world) -> None:
        """R-54: what the engine has computed itself is not fetched."""
        assert world.ask(computed=3 * SIZE)
        assert [("a", 1, (96,))] == world.client.wanted

    @pytest.mark.parametrize(
        "more",
        [
            {"skip_reading_prefix_cache": True},
            {"kv_transfer_params": {"do_remote_prefill": True}},
        ],
    )
    def test_request_that_would_not_load_asks_nobody(self, world, more) -> None:
        """R-54: nothing is fetched for a request that skips reading its prefix, and none
        that another connector serves is kept waiting."""
        assert not world.ask(request(**more))
        assert [] == world.client.wanted

    def test_full_hit_asks_nobody(self, world) -> None:
        """R-54: what the slab has needs no agent."""
        assert not world.ask(match=PrefixMatch(4 * SIZE, MatchReason.HIT))

    def test_agent_that_is_not_there_is_not_asked(self, world) -> None:
        """R-63: without an agent a miss is a miss at once; with it the next one asks."""
        world.client.is_up = False
        assert not world.ask()
        world.client.is_up = True
        assert world.ask()

    def test_want_without_an_answer_says_why(self, world) -> None:
        """R-63: a deadline and an agent that died are told apart."""
        for is_up, name in ((True, "a"), (False, "b")):
            world.client.is_up = True
            world.ask(request(name))
            world.client.pending.clear()
            world.client.is_up = is_up
            assert not world.tiers.is_pending(name)
        assert [True, False] == [world.tiers.is_late(name) for name in ("a", "b")]
        total = world.counters.total
        assert 1 == total("ucm_fetch_wants_total", reason="deadline")
        assert 1 == total("ucm_fetch_wants_total", reason="unavailable")


class TestDrop:
    def test_request_that_ends_drops_its_want(self, world) -> None:
        """R-53: an aborted or finished request leaves nothing pinned, here or there."""
        world.ask()
        world.tiers.drop("a")
        world.tiers.drop("a")
        assert (["a"], 0) == (world.client.dropped, len(world.tiers))

    def test_engine_that_takes_no_tokens_drops_the_want(self, world) -> None:
        """R-53: what the engine decides not to load need not stay."""
        world.ask()
        world.tiers.begun("a", 0)
        world.tiers.begun("b", 0)
        assert ["a"] == world.client.dropped


class TestConfiguration:
    def test_tiers_need_a_slab(self) -> None:
        """X-09: tiers below a store that has none are refused at start-up, by name."""
        config = UCMConfig.from_mapping(
            {"store": {"type": "null"}, "tiers": [{"type": "memory"}]}
        )
        with pytest.raises(ConfigError, match=r"only a slab has tiers"):
            check_tiers(config)

    def test_unknown_tier_is_refused_with_those_that_are_known(self) -> None:
        """X-09: a type that nobody has registered is refused at start-up."""
        config = UCMConfig.from_mapping({"tiers": [{"type": "tape"}]})
        with pytest.raises(ConfigError, match="Registered") as caught:
            check_tiers(config)
        assert "tiers.0.type" == caught.value.key

    def test_without_tiers_there_is_no_client(self) -> None:
        """R-63: an engine without tiers starts no thread and no process."""
        check_tiers(UCMConfig())
        assert open_client(UCMConfig(), 4096, None) is None
        tiers = Tiers(None, None, UCMConfig(), Counters())
        assert not tiers.is_pending("a")
        assert not tiers.ask(request(), HASHES, 0, MISS)
        tiers.drop("a")
        tiers.close()
