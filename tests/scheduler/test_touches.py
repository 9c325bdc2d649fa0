# SPDX-License-Identifier: Apache-2.0
"""Prefixes that were used, on their way to the store."""

import pytest

from tests.scheduler.model import (
    DIGEST,
    HASHES,
    HYBRID,
    ONE_FULL,
    SetIndex,
    failure_of,
    hashes_of,
    load,
    loaded,
    make_adapter,
    scheduled,
)
from ucm.blocks import KeyPacker, PackedKey, ShardId
from ucm.layout import KVLayout
from ucm.scheduler import touches
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepReport
from ucm.scheduler.requests import ScheduledRequest, StepFacts, Wishes

TEN = 10_000_000_000


def moments_of(layout: KVLayout, tokens: int, shards: int) -> dict[PackedKey, int]:
    """Return what a prefix of so many tokens is marked with, which began at ten."""
    return {
        KeyPacker(DIGEST, group.group_id, ShardId(shard)).pack(
            [HASHES[layout.hash_index(group, i)]]
        )[0]: TEN - i * group.block_tokens
        for group in layout.groups
        for i in range(tokens // group.block_tokens)
        for shard in range(shards)
    }


def begun(name: str, computed: int, layout: KVLayout = ONE_FULL) -> ScheduledRequest:
    """Return the facts of a request whose beginning the engine has itself."""
    tables = [[*range(1, 17)] for _ in layout.groups]
    return scheduled(name, HASHES[:16], tables, computed, 1, is_new=True)


class TestTouches:
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["one", "several"])
    @pytest.mark.parametrize("shards", [1, 2])
    def test_prefix_of_the_engines_own_cache_counts_as_used(
        self, layout: KVLayout, shards: int
    ) -> None:
        """R-30: what the engine has itself, and asks the store nothing about, is marked
        on all shards and in all groups, in one call; the deeper the older, and all parts
        of one depth at the same moment."""
        index = SetIndex()
        adapter = make_adapter(layout, index, num_ranks=shards, shards=shards)
        adapter.tick(10.0)
        request = begun("r", 24, layout)
        adapter.blocks_allocated(
            "r", request.tables, HASHES, computed_tokens=24, external_tokens=0
        )
        assert {} == index.moments
        asked = index.calls
        adapter.plan_step(StepFacts(scheduled=(request,)))
        assert moments_of(layout, 24, shards) == index.moments
        saves_ask_once_per_group = len(layout.groups)
        assert asked + saves_ask_once_per_group + 1 == index.calls

    def test_hit_counts_as_used_with_what_is_before_it(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """R-30: a hit is marked from the request's first block on, before its load goes
        out."""
        adapter.tick(10.0)
        load(adapter, "r", [1, 2, 3], computed=4)
        assert moments_of(ONE_FULL, 12, 1) == index.moments

    def test_life_uses_its_prefix_once(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """Steps that go on, and the one behind a load, mark nothing again."""
        (order,) = load(adapter, "r", [1, 2])
        adapter.apply_report(loaded(order))
        adapter.loads_finished({"r"})
        adapter.plan_step(StepFacts(scheduled=(begun("r", 8),)))
        going_on = scheduled("r", HASHES, [[1, 2, 3, 4]], 9, 1)
        adapter.plan_step(StepFacts(scheduled=(going_on,)))
        assert 2 == len(index.touched)

    def test_resumed_request_uses_it_again(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A preempted request begins a life, and with it a later moment."""
        adapter.tick(9.0)
        adapter.plan_step(StepFacts(scheduled=(begun("r", 8),)))
        adapter.tick(10.0)
        facts = StepFacts(scheduled=(begun("r", 8),), preempted={"r": 8})
        adapter.plan_step(facts)
        assert moments_of(ONE_FULL, 8, 1) == index.moments

    def test_request_whose_load_failed_uses_what_is_left(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """What the engine then has itself is marked, at the moment of the same life."""
        adapter.tick(10.0)
        (order,) = load(adapter, "r", [1, 2])
        index.moments.clear()
        adapter.apply_report(
            StepReport(
                rank=0, loads_done=(order.transfer_id,), failures=(failure_of(order),)
            )
        )
        adapter.loads_finished({"r"})
        adapter.tick(11.0)
        adapter.plan_step(StepFacts(scheduled=(begun("r", 4),)))
        assert moments_of(ONE_FULL, 4, 1) == index.moments

    def test_retained_prefix_counts_as_used_later(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A request that asks for it has its moment in the future, hit or not."""
        adapter.tick(4.0)
        wishes = Wishes(retain_seconds=6.0)
        tables = [[1, 2]]
        adapter.blocks_allocated(
            "r",
            tables,
            HASHES,
            computed_tokens=0,
            external_tokens=8,
            wishes=wishes,
        )
        adapter.plan_step(StepFacts())
        assert moments_of(ONE_FULL, 8, 1) == index.moments

    def test_prefix_that_gives_way_has_a_stamp(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A request may count as used before the machine's clock began, and its stamps
        are still above 0, in the order of its prefix."""
        adapter.tick(4.0)
        adapter.blocks_allocated(
            "r",
            [[1, 2]],
            HASHES,
            computed_tokens=0,
            external_tokens=8,
            wishes=Wishes(retain_seconds=-100.0),
        )
        adapter.plan_step(StepFacts())
        moments = sorted(index.moments.values())
        assert 0 < moments[0] < moments[-1] < 4.0 * 1e9

    def test_long_prefix_is_marked_over_several_plans(self) -> None:
        """R-28: however much is used at once, a plan looks up so many keys and no more;
        what is left goes with the next ones."""
        index, most = SetIndex(), touches.MAX_TOUCHED_KEYS
        adapter = make_adapter(ONE_FULL, index, shards=8, num_ranks=8)
        hashes = hashes_of("long", most // 4)
        first, other = (
            scheduled(
                name, hashes, [[0] * len(hashes)], 4 * len(hashes), 1, is_new=True
            )
            for name in ("a", "b")
        )
        seen = []
        for step in [(first, other), *[()] * 5]:
            before = len(index.touched)
            adapter.plan_step(StepFacts(scheduled=step))
            seen.append(len(index.touched) - before)
        assert [most, most, most, most, 0, 0] == seen
        assert 8 * len(hashes) == len(index.moments)
        assert 0 == adapter.counts()["touches"]

    def test_oldest_prefix_is_dropped_when_too_many_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What waits has a bound; the stamps of the dropped one are only older."""
        monkeypatch.setattr(touches, "MAX_WAITING_PREFIXES", 2)
        index = SetIndex()
        adapter = make_adapter(ONE_FULL, index)
        families = [hashes_of(name, 1) for name in "abc"]
        requests = [
            scheduled(hashes[0].decode(), hashes, [[1]], 4, 1, is_new=True)
            for hashes in families
        ]
        adapter.plan_step(StepFacts(scheduled=tuple(requests)))
        assert [key[-12:] for key in index.touched] == [b[0] for b in families[1:]]

    def test_nothing_is_marked_in_a_doubt(self, index: SetIndex) -> None:
        """While it is not known which weights there are, no key is; what waited is
        dropped."""
        adapter = make_adapter(ONE_FULL, index)
        adapter.doubt(1)
        adapter.plan_step(StepFacts(scheduled=(begun("r", 8),)))
        assert ([], 0) == (index.touched, adapter.counts()["touches"])

    def test_store_that_is_down_is_not_marked(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A store that does not answer fails no step."""
        index.is_up = False
        adapter.plan_step(StepFacts(scheduled=(begun("r", 8),)))
        assert [] == index.touched


class TestCompany:
    def test_few_prefixes_are_told_together(self) -> None:
        """R-18: each of some prefixes that begin one after the other does not cost the
        engine's thread a call of the store."""
        index = SetIndex()
        adapter = make_adapter(ONE_FULL, index, company=1)
        before = index.calls
        for at in range(touches.FEW_PREFIXES - 1):
            adapter.plan_step(StepFacts(scheduled=(begun(f"r{at}", 4),)))
        assert [] == index.touched
        assert touches.FEW_PREFIXES - 1 == adapter.counts()["touches"]
        looks = index.calls - before
        adapter.plan_step(StepFacts(is_idle=False))
        assert {*moments_of(ONE_FULL, 4, 1)} == {*index.touched}
        assert (looks + 1, 0) == (index.calls - before, adapter.counts()["touches"])

    def test_many_prefixes_do_not_wait(self) -> None:
        """A burst of prompts is told of at the pace of plans."""
        index = SetIndex()
        adapter = make_adapter(ONE_FULL, index, company=1)
        many = [begun(f"r{at}", 4) for at in range(touches.FEW_PREFIXES)]
        adapter.plan_step(StepFacts(scheduled=tuple(many)))
        assert touches.FEW_PREFIXES == len(index.touched)

    def test_step_that_computes_nothing_tells_all(self) -> None:
        """No other step may follow."""
        index = SetIndex()
        adapter = make_adapter(ONE_FULL, index, company=1)
        adapter.plan_step(StepFacts(scheduled=(begun("r", 4),)))
        assert [] == index.touched
        adapter.plan_step(StepFacts(is_idle=True))
        assert 1 == len(index.touched)
