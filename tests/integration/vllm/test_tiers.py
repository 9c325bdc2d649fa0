# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half asks of the agent, and what the engine hears meanwhile."""

from types import SimpleNamespace

import pytest

from tests.integration.vllm.agent_kit import FakeClient
from tests.testing.host_kit import HYBRID, ONE_FULL
from ucm.agent.protocol import LONGEST_S
from ucm.blocks import ShardId
from ucm.config import UCMConfig
from ucm.errors import ConfigError
from ucm.integration.vllm.tiers import Tiers
from ucm.metrics import Counters
from ucm.reasons import MissReason, Reason
from ucm.scheduler.matching import MatchReason, PrefixMatch, PrefixMatcher
from ucm.scheduler.messages import StepReport
from ucm.scheduler.prompts import PromptSpeed
from ucm.scheduler.requests import NO_WISHES, Wishes

MISS = PrefixMatch(0, MatchReason.MISS)
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
SIZE = ONE_FULL.groups[0].block_tokens


def request(name="a", **more):
    """Return a request of four blocks."""
    return SimpleNamespace(request_id=name, num_tokens=4 * SIZE, **more)


class World:
    """Tiers over a fake client."""

    def __init__(self, elsewhere=(), layout=ONE_FULL, **settings):
        self.client, self.counters = FakeClient(), Counters()
        matcher = PrefixMatcher(layout, None, bytes(16), [ShardId(0)], full_hits=True)
        config = UCMConfig.from_mapping(settings)
        self.now = 0.0
        self.prompts = PromptSpeed()
        self.tiers = Tiers(
            *(matcher, self.client, config, self.prompts, self.counters),
            clock=lambda: self.now,
        )
        agreement = SimpleNamespace(
            part_bytes=lambda: {ShardId(0): [96] * len(layout.groups)},
            ranks_elsewhere=lambda: elsewhere,
        )
        self.tiers.agree(agreement)

    def ask(self, asked=None, match=MISS, computed=0, wishes=NO_WISHES, **more):
        """Ask for what a match lacks."""
        asked = asked or request()
        return self.tiers.ask(asked, HASHES, computed, match, wishes, **more)


@pytest.fixture
def world():
    """Return tiers whose agent is there."""
    return World()


class TestAgree:
    def test_engine_without_a_rank_here_is_refused(self) -> None:
        """R-60: where all ranks use other slabs, its scheduler sees none of their blocks."""
        tiers = World(tiers=[{"type": "redis"}]).tiers
        nobody = SimpleNamespace(part_bytes=dict, ranks_elsewhere=lambda: (0, 1))
        with pytest.raises(ConfigError, match=r"no rank uses.*same /dev/shm"):
            tiers.agree(nobody)


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
        """R-54: the longest wait that there may be leaves no time to keep blocks behind it,
        as an agent ends the connection over more than a minute of both."""
        world = World(timeout={"fetch": LONGEST_S, "load": 10.0})
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

    @pytest.mark.parametrize("tiers", [(), ({"type": "redis"},)])
    def test_look_up_without_an_agent_says_so(self, tiers) -> None:
        """R-71: what the slab lacks may lie in a tier that nobody could ask; where there is
        none, as with events alone, the slab's own reason is told."""
        world = World(tiers=tiers)
        world.client.is_up = False
        assert not world.ask()
        assert not world.ask(request("b"), match=PrefixMatch(4 * SIZE, MatchReason.HIT))
        told = [world.tiers.shortfall(name) for name in ("a", "b")]
        expected = (MissReason.UNAVAILABLE, "a tier could not be asked")
        assert [expected if tiers else None, None] == told

    def test_want_without_an_answer_says_why(self, world) -> None:
        """R-63: a deadline and an agent that died are told apart."""
        for is_up, name in ((True, "a"), (False, "b")):
            world.client.is_up = True
            world.ask(request(name))
            world.client.pending.clear()
            world.client.is_up = is_up
            assert not world.tiers.is_pending(name)
        told = [world.tiers.shortfall(name)[0] for name in ("a", "b")]
        assert ["late", "unavailable"] == told
        total = world.counters.total
        assert 1 == total("ucm_fetch_wants_total", reason="deadline")
        assert 1 == total("ucm_fetch_wants_total", reason="unavailable")


class TestRefresh:
    def test_agent_is_asked_how_it_is(self, world) -> None:
        """R-52: its metrics are brought up to date with the engine's own, whoever asks."""
        world.tiers.refresh()
        assert 1 == world.client.looks
        assert {"ucm_agent_up": 1} == world.counters.snapshot().gauges


class TestEarly:
    def test_request_asks_when_it_arrives(self, world) -> None:
        """R-54: what is on its way while a request waits for its turn is asked for once."""
        assert world.tiers.may_ask_early(request())
        assert world.ask(is_early=True)
        assert world.ask()
        assert world.tiers.is_pending("a")
        world.client.say("a", 4)
        assert not world.tiers.is_pending("a")
        assert not world.ask()
        assert 1 == len(world.client.wanted)

    @pytest.mark.parametrize("reason", ["deadline", "queue_tickets", "unavailable"])
    def test_early_question_that_came_to_nothing_is_asked_once_more(
        self, world, reason
    ) -> None:
        """R-54: who waited long for its turn goes on where its fetch was cut, once."""
        world.ask(is_early=True)
        world.client.say("a", 1, Reason(reason))
        assert not world.tiers.is_pending("a")
        assert world.ask()
        world.client.say("a", 1, Reason(reason))
        assert not world.tiers.is_pending("a")
        assert not world.ask()

    def test_what_is_no_longer_kept_is_asked_for_again(self, world) -> None:
        """R-53: a request that waited longer than its blocks are kept asks anew."""
        world.ask(is_early=True)
        world.client.say("a", 4)
        assert not world.tiers.is_pending("a")
        world.now = 11.1
        assert world.ask()

    def test_what_the_engine_has_itself_is_not_waited_for(self, world) -> None:
        """R-54: the engine's own cache is not looked at when a request arrives. One that
        finds there, or with it in the slab, all that it may load waits for nobody."""
        for name in ("a", "b"):
            world.ask(request(name), is_early=True)
            assert not world.tiers.is_pending(name, 2 * SIZE)
        assert world.ask(computed=2 * SIZE)
        assert world.tiers.is_pending("a", 2 * SIZE)
        whole = PrefixMatch(2 * SIZE, MatchReason.HIT)
        assert not world.ask(request("b"), computed=2 * SIZE, match=whole)
        assert (["b"], 2) == (world.client.dropped, len(world.client.wanted))

    def test_what_is_behind_an_early_question_is_asked_for(self, world) -> None:
        """R-58: a request with a limit, of which the engine has what it asked for itself,
        does not wait for that, but asks for what it may load beyond."""
        limit = Wishes(most_loaded=2 * SIZE)
        world.ask(wishes=limit, is_early=True)
        assert world.ask(wishes=limit, computed=2 * SIZE)
        assert (["a"], 2) == (world.client.dropped, len(world.client.wanted))

    def test_early_questions_are_few(self, world) -> None:
        """R-54: a burst of requests leaves the agent room for those whose turn it is."""
        for number in range(64):
            assert world.tiers.may_ask_early(request(str(number)))
            world.ask(request(str(number)), is_early=True)
        assert not world.tiers.may_ask_early(request("b"))
        assert world.ask(request("b"))

    def test_without_an_agent_nobody_looks(self, world) -> None:
        """R-63: a request that arrives costs no look-up where nobody could be asked."""
        world.client.is_up = False
        assert not world.tiers.may_ask_early(request())
        assert not World().tiers.may_ask_early(request(skip_reading_prefix_cache=True))


class TestHits:
    def test_blocks_of_all_hits_are_asked_for_where_groups_have_windows(self) -> None:
        """R-54: which hit a tier has is not known, so that each block comes with the hits that need
        it; what came is told by the blocks of the hit that was brought."""
        world = World(layout=HYBRID)
        asked = SimpleNamespace(request_id="a", num_tokens=len(HASHES) * SIZE)
        assert world.ask(asked)
        ((_, num_keys, _),), (terms,) = world.client.wanted, world.client.terms
        shortest, longest = terms["hits"]
        assert num_keys == len(shortest) == len(longest)
        assert {1, 2} == set(shortest)
        of_first = sum(first == 1 for first in shortest)
        world.client.say("a", of_first, "absent", b"\1" * of_first, reach=1)
        assert not world.tiers.is_pending("a")
        assert {"disk": 8} == world.tiers.hit("a", range(8))

    def test_machines_ask_for_the_longest_hit_alone(self) -> None:
        """R-60: what another machine has is told by its end only."""
        world = World(elsewhere=(1,), layout=HYBRID, tiers=[{"type": "redis"}])
        asked = SimpleNamespace(request_id="a", num_tokens=len(HASHES) * SIZE)
        world.ask(asked, PrefixMatch(8, MatchReason.HIT))
        assert [None] == [terms["hits"] for terms in world.client.terms]


class TestWishes:
    def test_request_that_loads_less_asks_for_less(self, world) -> None:
        """R-58: nothing is fetched beyond ``max_load_tokens``, and nothing for none."""
        world.ask(wishes=Wishes(most_loaded=2 * SIZE))
        assert [("a", 2, (96,) * 2)] == world.client.wanted
        assert not world.ask(request("b"), wishes=Wishes(most_loaded=SIZE - 1))

    def test_request_without_a_tier_asks_nobody(self, world) -> None:
        """R-58: an empty ``kv_load_tiers`` is no tier."""
        assert not world.ask(wishes=Wishes(tiers=()))

    def test_tiers_priority_and_tenant_go_along(self, world) -> None:
        """R-58, R-55: the agent hears from where a request may load, how soon, and for whom."""
        only = (("disk", ""),)
        world.ask(wishes=Wishes(tiers=only, priority=7, tenant=9))
        terms = {"compute_s": 0.0, "only": only, "priority": 7, "tenant": 9}
        terms["hits"] = None
        assert [terms] == world.client.terms


class TestPrediction:
    @pytest.mark.parametrize(("predicts", "seconds"), [(True, True), (False, False)])
    def test_agent_hears_how_long_computing_takes(self, predicts, seconds) -> None:
        """R-59: as the engine's own steps show, once they do, unless it is not asked for."""
        world = World(predict_loads=predicts)
        for step in range(12):
            tokens = 4096 if step % 3 == 0 else 1
            world.prompts.planned(tokens, step * 0.5)
        world.ask()
        assert (4 * SIZE / 4096 if seconds else 0.0) == pytest.approx(
            world.client.terms[0]["compute_s"]
        )

    def test_reason_is_told(self, world) -> None:
        """R-59, R-56: the look-up that falls short says that its blocks were not fetched
        because computing is faster, or not spilled because they were seen once, or that a
        tier is away, brought damage, or had no room in the slab to fetch into."""
        told = {
            name: name for name in ("slower", "admission", "unavailable", "corrupt")
        }
        for name, why in (told | {"store_full": "evicted"}).items():
            world.ask(request(name))
            world.client.say(name, 0, Reason(name))
            world.tiers.is_pending(name)
            assert why == world.tiers.shortfall(name)[0]
            assert 1 == world.counters.total("ucm_fetch_wants_total", reason=name)


class TestNoRoom:
    def test_want_without_room_says_so_and_asks_again(self) -> None:
        """R-60, R-56: where plans take no more wants a request is told to be computed for
        want of room, and asks once there is some; no rank is said to lack its part."""
        world = World(elsewhere=(1,), tiers=[{"type": "redis"}])
        found = PrefixMatch(4 * SIZE, MatchReason.HIT)
        asked = (str(number) for number in range(2000))
        late = next(name for name in asked if not world.ask(request(name), found))
        assert not world.tiers.is_pending(late)
        assert "queue" == world.tiers.shortfall(late)[0]
        assert late not in [name for name, *_ in world.client.wanted]
        world.tiers.elsewhere.take()
        world.tiers.drop("0")
        assert world.ask(request(late), found)
        assert world.tiers.is_pending(late)


class TestDrop:
    def test_request_whose_loads_are_over_drops_its_want(self, world) -> None:
        """R-53: where the engine is not told of the end of loads, layer by layer, the slots
        of a want are given back with it all the same."""
        for name in ("a", "b", "c"):
            world.ask(request(name))
        for name in ("a", "b"):
            world.tiers.begun(name, SIZE)
        lives = {"b": SimpleNamespace(loads={7})}
        world.tiers.reported(StepReport(rank=0, loads_done=(1,)), lives.get)
        assert ["a"] == world.client.dropped

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


class TestForget:
    def test_agent_is_told_what_the_slab_has_no_more(self) -> None:
        """R-58: what nobody could be told of is counted by the names of the tiers."""
        world = World(tiers=[{"type": "disk"}])
        world.tiers.forget([b"k"])
        assert [b"k"] == world.client.forgotten
        world.client.is_up = False
        world.tiers.forget([b"k", b"l"])
        world.tiers.forget([])
        assert [b"k"] == world.client.forgotten
        name = "ucm_unforgotten_parts_total"
        assert [2, 2] == [
            world.counters.total(name, tier=tier) for tier in ("disk", "redis")
        ]


def test_without_tiers_nothing_is_asked() -> None:
    """R-63: an engine without tiers asks nobody."""
    tiers = Tiers(None, None, UCMConfig(), PromptSpeed(), Counters(), lambda: 0.0)
    assert not tiers.is_pending("a")
    assert not tiers.ask(request(), HASHES, 0, MISS)
    tiers.drop("a")
    tiers.forget([b"k"])
    tiers.close()
