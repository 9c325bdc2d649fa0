# SPDX-License-Identifier: Apache-2.0
"""What a rank on another machine asks its agent for, on the scheduler's word."""

from types import SimpleNamespace

import attrs

from tests.integration.vllm.agent_kit import FakeClient
from tests.testing.host_kit import HYBRID, ONE_FULL
from ucm.blocks import KeyPacker, ShardId
from ucm.integration.vllm.elsewhere import RankWants
from ucm.ranks import Topology
from ucm.scheduler.elsewhere import Elsewhere
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import Forgotten, StepPlan, decode_plan, encode
from ucm.scheduler.requests import NO_WISHES
from ucm.threads import SYSTEM

DIGEST = bytes(range(16))
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
SIZE = ONE_FULL.groups[0].block_tokens
WHOLE = range(4 * SIZE)
TIMES = (5.0, 10.0, 0.25)


class Keys(FakeClient):
    """A client that shows which keys it was asked for."""

    keys: list

    def want(self, request_id, keys, sizes, **terms):
        """Take a want."""
        self.keys = keys
        return self.is_up and super().want(request_id, keys, sizes, **terms)


class Forgetful:
    """A store that shows what it was to forget."""

    def __init__(self):
        self.forgotten = []

    def forget(self, keys):
        """Take note."""
        self.forgotten += keys


def rank_of(layout=ONE_FULL, rank=1, store=None):
    """Return the wants of a rank whose client is a fake."""
    setup = SimpleNamespace(
        is_spread=False, layout=layout, topology=Topology(tensor=2), threads=SYSTEM
    )
    wants = RankWants(setup, rank, store, None)
    wants._client = Keys()
    return wants


def plan_of(tokens, layout=ONE_FULL, hashes=HASHES, wishes=NO_WISHES):
    """Return a plan that wants tokens of one request, as it arrives."""
    elsewhere = Elsewhere()
    elsewhere.ranks = (1,)
    matcher = PrefixMatcher(layout, None, DIGEST, [ShardId(0)], full_hits=True)
    assert elsewhere.ask("r", matcher, hashes, tokens, TIMES, wishes)
    plan = StepPlan(step=1, wants=elsewhere.take().wants)
    return decode_plan(encode(plan))


class TestAsk:
    def test_rank_asks_for_its_own_part(self) -> None:
        """R-60: of each block that is wanted, under the keys of the want, and of no other:
        while weights are in doubt a plan has none."""
        wants = rank_of()
        wants.begin(plan_of(range(SIZE, 4 * SIZE)))
        packer = KeyPacker(DIGEST, ONE_FULL.groups[0].group_id, ShardId(1))
        assert [packer.prefix + each for each in HASHES[1:]] == wants._client.keys
        assert [(0.9 * 5.0, 10.0)] == wants._client.times

    def test_ranks_of_the_scheduler_s_machine_are_not_asked(self) -> None:
        """R-60: what the scheduler sees itself nobody has to tell."""
        wants = rank_of(rank=0)
        wants.begin(plan_of(WHOLE))
        assert ([], {}) == (wants._client.wanted, wants.take())

    def test_request_s_terms_go_along(self) -> None:
        """R-60, R-58: each machine's agent hears from where, how soon, and for whose share."""
        wants, only = rank_of(), (("disk", ""),)
        wishes = attrs.evolve(NO_WISHES, tiers=only, priority=7, tenant=9)
        wants.begin(plan_of(WHOLE, wishes=wishes))
        terms = {"compute_s": TIMES[2], "only": only, "priority": 7, "tenant": 9}
        assert [terms] == wants._client.terms


class TestForget:
    def test_rank_deletes_its_own_part(self) -> None:
        """R-60: what a request wants forgotten goes on each machine, of all groups, and in
        parts that begin where the one before ends; its agent is told, until the end."""
        store = Forgetful()
        wants = rank_of(HYBRID, store=store)
        size = HYBRID.hash_block_tokens
        hashes = [bytes([number]) * 32 for number in range(1, 9)]
        for start in (0, 4):
            some = tuple(hashes[start : start + 4])
            forgotten = Forgotten(DIGEST, (1,), start * size, some)
            wants.begin(StepPlan(step=1, forgotten=(forgotten,)))
        wants.close()
        matcher = PrefixMatcher(HYBRID, None, DIGEST, [ShardId(1)], full_hits=False)
        assert sorted(matcher.keys_of_prefix(hashes, 8 * size)) == sorted(
            store.forgotten
        )
        assert store.forgotten == wants._client.forgotten

    def test_ranks_of_the_scheduler_s_machine_delete_nothing(self) -> None:
        """R-60: their store is the scheduler's, which deletes by itself."""
        store = Forgetful()
        wants = rank_of(rank=0, store=store)
        forgotten = Forgotten(DIGEST, (1,), 0, tuple(HASHES))
        wants.begin(StepPlan(step=1, forgotten=(forgotten,)))
        wants.close()
        assert [] == store.forgotten


class TestAnswer:
    def test_part_of_a_prefix_reaches_so_far(self) -> None:
        """R-60: a hit may end before the first block that is missing, never behind."""
        wants = rank_of()
        wants.begin(plan_of(WHOLE))
        assert ({}, 1) == (wants.take(), len(wants))
        wants._client.say("1", 2, "absent")
        assert ({1: 3 * SIZE - 1}, {}, 0) == (wants.take(), wants.take(), len(wants))

    def test_whole_prefix_reaches_its_end(self) -> None:
        """R-60: nothing lacks."""
        wants = rank_of()
        wants.begin(plan_of(WHOLE))
        wants._client.say("1", 4)
        assert {1: 4 * SIZE} == wants.take()

    def test_part_of_a_prefix_with_windows_is_none(self) -> None:
        """R-60: a shorter hit needs other blocks of a window, which nobody asked for."""
        wants = rank_of(HYBRID)
        align = HYBRID.alignment_tokens
        hashes = [bytes([n]) * 32 for n in range(2 * align // HYBRID.hash_block_tokens)]
        wants.begin(plan_of(range(2 * align), HYBRID, hashes))
        wants._client.say("1", 1, "absent")
        assert {1: 0} == wants.take()

    def test_agent_that_is_not_there_or_late_is_nothing(self) -> None:
        """R-60, R-63: an answer comes at once where nobody can be asked."""
        wants = rank_of()
        wants._client.is_up = False
        wants.begin(plan_of(WHOLE))
        assert {1: 0} == wants.take()
        wants._client.is_up = True
        wants.begin(plan_of(WHOLE))
        wants._client.pending.clear()
        assert {1: SIZE - 1} == wants.take()

    def test_want_that_is_dropped_is_dropped_at_the_agent(self) -> None:
        """R-53, R-60: what is over pins nothing, and is not answered any more."""
        wants = rank_of()
        wants.begin(plan_of(WHOLE))
        wants.begin(StepPlan(step=2, dropped=(1,)))
        wants._client.say("1", 4)
        assert (["1"], {}, 0) == (wants._client.dropped, wants.take(), len(wants))
        wants.close()
        assert not wants._client.is_up
