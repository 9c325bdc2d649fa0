# SPDX-License-Identifier: Apache-2.0
"""What is loaded, and what follows when a load fails."""

import pytest
from msgspec.structs import replace

from tests.kit.consistency import validate
from tests.scheduler.model import (
    DIGEST,
    HASHES,
    HYBRID,
    SetIndex,
    facts,
    failure_of,
    load,
    loaded,
    make_adapter,
    prefill,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.errors import LayoutError
from ucm.reasons import Reason
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.requests import Disposition, StepFacts


class TestLoads:
    def test_only_external_tokens_decide(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """H-07: Nothing is loaded without external tokens, whatever was matched."""
        index.put(0, HASHES[:2])
        assert 8 == adapter.match_prefix("r", 9, HASHES[:2], 0).tokens
        adapter.blocks_allocated(
            "r", [[1, 2]], HASHES[:2], computed_tokens=0, external_tokens=0
        )
        assert StepPlan(
            keyspace_digest=DIGEST, step=1, is_idle=True
        ) == adapter.plan_step(StepFacts())
        assert [] == index.touched

    def test_load_leaves_out_what_is_computed_but_uses_it_too(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """S3-08: Only blocks beyond the computed ones are loaded; all are kept from LRU."""
        (order,) = load(adapter, "r", [1, 2, 3], computed=4)
        assert (2, 3) == order.block_ids
        assert HASHES[1:3] == order.split_hashes()
        assert 3 == len(index.touched)

    def test_second_call_with_zero_keeps_theload(
        self, adapter: SchedulerAdapter
    ) -> None:
        """H-07: The call after a load, with 0, changes nothing."""
        for external in (4, 0):
            adapter.blocks_allocated(
                "r", [[1]], HASHES[:1], computed_tokens=0, external_tokens=external
            )
        assert 1 == len(adapter.plan_step(StepFacts()).loads)

    def test_window_group_loads_its_window_without_null_blocks(
        self, index: SetIndex
    ) -> None:
        """Blocks that no attention reaches, and null blocks, are not loaded."""
        adapter = make_adapter(HYBRID, index)
        adapter.blocks_allocated(
            "r",
            [[1, 2, 3, 4, 5, 6], [0, 0, 7]],
            HASHES[:6],
            computed_tokens=0,
            external_tokens=24,
        )
        plan = adapter.plan_step(StepFacts())
        blocks = {order.group_id: order.block_ids for order in plan.loads}
        assert {0: (1, 2, 3, 4, 5, 6), 1: (7,)} == blocks
        validate(adapter)

    def test_blocks_before_the_window_are_not_loaded_into(
        self, index: SetIndex
    ) -> None:
        """Where the engine has blocks for the whole prefix, only those that the window
        touches are loaded: the others need not be stored."""
        adapter = make_adapter(HYBRID, index)
        adapter.blocks_allocated(
            "r",
            [[1, 2, 3, 4, 5, 6], [7, 8, 9]],
            HASHES[:6],
            computed_tokens=0,
            external_tokens=24,
        )
        plan = adapter.plan_step(StepFacts())
        blocks = {order.group_id: order.block_ids for order in plan.loads}
        assert {0: (1, 2, 3, 4, 5, 6), 1: (8, 9)} == blocks

    def test_load_into_no_block_is_refused(self, adapter: SchedulerAdapter) -> None:
        """A load that no ticket would ever end raises instead of hanging."""
        with pytest.raises(LayoutError, match="no block to load 8 tokens into"):
            load(adapter, "r", [0, 0])

    def test_loaded_blocks_are_not_saved_again(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """What came from the store is there, and only the rest is saved."""
        orders = load(adapter, "r", [1, 2])
        adapter.apply_report(loaded(*orders))
        adapter.loads_finished({"r"})
        asked = index.asked
        request = scheduled("r", HASHES[:3], [[1, 2, 3]], 8, 4, is_new=True)
        assert {0: [3]} == saved_blocks(adapter.plan_step(facts(request)))
        assert asked == index.asked

    def test_whole_prompt_hit_saves_nothing(self, adapter: SchedulerAdapter) -> None:
        """H-08: The block of the one token that is computed again is stored already."""
        adapter.apply_report(loaded(*load(adapter, "r", [1, 2])))
        request = scheduled("r", HASHES[:2], [[1, 2]], 7, 1, is_new=True)
        assert adapter.plan_step(facts(request)).is_empty

    def test_blocks_on_top_of_an_open_load_wait(self, on_two: SchedulerAdapter) -> None:
        """Nothing is saved that was computed on a prefix which may yet fail."""
        (order,) = load(on_two, "r", [1])
        first = scheduled("r", HASHES[:2], [[1, 2]], 4, 4, is_new=True)
        assert () == on_two.plan_step(facts(first)).saves
        on_two.apply_report(loaded(order, rank=0))
        sharer = scheduled("s", HASHES[:2], [[1, 3]], 4, 4, is_new=True)
        assert () == on_two.plan_step(facts(sharer)).saves
        on_two.apply_report(loaded(order, rank=1))
        later = [
            scheduled("r", HASHES[:2], [[1, 2]], 8, 1),
            scheduled("s", HASHES[:2], [[1, 3]], 8, 1),
        ]
        # The sharer looks its prefix up, and the block that both have is saved once.
        assert {0: [2, 1]} == saved_blocks(on_two.plan_step(facts(*later)))

    def test_load_that_the_engine_was_told_of_holds_back_no_save(
        self, on_two: SchedulerAdapter
    ) -> None:
        """What is computed on a load is saved once the engine goes on, though the
        reports of its ranks may come later."""
        load(on_two, "r", [1])
        on_two.loads_finished({"r"})
        request = scheduled("r", HASHES[:2], [[1, 2]], 4, 4, is_new=True)
        assert {0: [2]} == saved_blocks(on_two.plan_step(facts(request)))

    def test_aborted_load_ends_without_a_deferral(
        self, adapter: SchedulerAdapter
    ) -> None:
        """H-02: A request that ends while it loads is reported for the load only."""
        adapter.blocks_allocated(
            "r", [[1]], HASHES[:1], computed_tokens=0, external_tokens=4
        )
        assert Disposition.FREE_NOW is adapter.request_finished("r")
        plan = adapter.plan_step(StepFacts())
        assert (1, ()) == (len(plan.loads), plan.deferred)
        assert not adapter.is_idle
        adapter.loads_finished({"r"})
        assert adapter.is_idle


class TestFailures:
    def test_failed_block_is_a_miss_until_it_is_saved(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A block whose load failed is not matched again before it was saved anew."""
        index.put(0, HASHES[:2])
        (order,) = load(adapter, "r", [1, 2])
        adapter.apply_report(
            StepReport(
                rank=0,
                loads_done=(order.transfer_id,),
                failures=(failure_of(order, 1),),
            )
        )
        assert 4 == adapter.match_prefix("r", 12, HASHES[:3], 0).tokens
        request = scheduled("r", HASHES[:3], [[1, 2, 3]], 0, 12, is_new=True)
        plan = adapter.plan_step(facts(request))
        assert {0: [1, 2, 3]} == saved_blocks(plan)
        adapter.apply_report(saved(*plan.saves))
        assert 8 == adapter.match_prefix("s", 12, HASHES[:3], 0).tokens

    def test_denied_block_of_a_local_hit_is_saved(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A denied block does not count as stored when saves are planned."""
        index.put(0, HASHES[:2])
        (order,) = load(adapter, "r", [1, 2])
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(order, 0),)))
        request = scheduled("s", HASHES[:2], [[3, 4]], 8, 1, is_new=True)
        assert {0: [3]} == saved_blocks(adapter.plan_step(facts(request)))

    def test_failure_that_names_no_block_ends_all_loads_of_the_life(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A load that failed for no block's fault is not tried for ever."""
        index.put(0, HASHES[:2])
        (order,) = load(adapter, "r", [1, 2])
        adapter.apply_report(
            StepReport(
                rank=0,
                loads_done=(order.transfer_id,),
                failures=(failure_of(order, None, Reason.DEADLINE),),
            )
        )
        expected = PrefixMatch(0, MatchReason.LOAD_FAILED)
        assert expected == adapter.match_prefix("r", 12, HASHES[:3], 0)
        assert 8 == adapter.match_prefix("s", 12, HASHES[:3], 0).tokens
        adapter.plan_step(facts(prefill("r", [1, 2, 3])))
        adapter.plan_step(facts(preempted=["r"]))
        assert 8 == adapter.match_prefix("r", 12, HASHES[:3], 0).tokens

    def test_prefix_that_survived_a_failed_load_is_left_alone(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """After a failed load only what is computed anew is saved."""
        (order,) = load(adapter, "r", [1, 2])
        asked = index.asked
        adapter.apply_report(
            StepReport(
                rank=0,
                loads_done=(order.transfer_id,),
                failures=(failure_of(order, 1),),
            )
        )
        request = scheduled("r", HASHES[:2], [[1, 2]], 4, 4, is_new=True)
        assert {0: [2]} == saved_blocks(adapter.plan_step(facts(request)))
        assert asked == index.asked

    def test_failed_load_is_a_failure_for_all_that_share_its_blocks(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A request that shares blocks of a failed load saves none of its prefix."""
        (order,) = load(adapter, "r", [1])
        sharer = scheduled("s", HASHES[:2], [[1, 3]], 4, 4, is_new=True)
        adapter.plan_step(facts(sharer))
        failed = failure_of(order, 0)
        adapter.apply_report(StepReport(rank=0, failures=(failed,)))
        adapter.apply_report(loaded(order))
        again = scheduled("s", HASHES[:2], [[1, 3]], 4, 4)
        assert {0: [3]} == saved_blocks(adapter.plan_step(facts(again)))

    def test_failure_after_the_end_of_its_load_still_counts(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A failure that comes later than the end of the load is not lost."""
        (order,) = load(adapter, "r", [1])
        adapter.apply_report(loaded(order))
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(order, None),)))
        reason = adapter.match_prefix("r", 9, HASHES[:2], 0).reason
        assert MatchReason.LOAD_FAILED is reason

    def test_late_hashes_after_a_failed_load_lose_no_block(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Blocks that were computed before their hash was known are saved then."""
        (order,) = load(adapter, "r", [1])
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(order, 0),)))
        adapter.apply_report(loaded(order))
        first = scheduled("r", [], [[1, 2]], 0, 4, is_new=True)
        assert {} == saved_blocks(adapter.plan_step(facts(first)))
        later = scheduled("r", HASHES[:2], [[1, 2]], 4, 4)
        assert {0: [1, 2]} == saved_blocks(adapter.plan_step(facts(later)))

    def test_failure_of_a_former_life_leaves_the_present_one_alone(
        self, adapter: SchedulerAdapter
    ) -> None:
        """S1-16: A failure that is reported late counts for its own life only."""
        (late,) = load(adapter, "r", [1])
        (order,) = load(adapter, "r", [2])
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(late, None),)))
        reason = adapter.match_prefix("r", 9, HASHES[:2], 0).reason
        assert MatchReason.MISS is reason
        adapter.apply_report(loaded(late, order))

    def test_failed_block_is_found_again_though_nobody_saves_it(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """R-15: others may have stored a block anew; it is tried again after a second,
        and after twice as long when that fails."""
        index.put(0, HASHES[:2])
        for now, until in ((10.0, 11.0), (20.0, 22.0)):
            adapter.tick(now)
            (order,) = load(adapter, "r", [1, 2])
            report = replace(loaded(order), failures=(failure_of(order, 1),))
            adapter.apply_report(report)
            adapter.request_finished("r")
            adapter.tick(until - 0.01)
            assert 4 == adapter.match_prefix("s", 12, HASHES[:3], 0).tokens
            adapter.tick(until)
            assert 8 == adapter.match_prefix("s", 12, HASHES[:3], 0).tokens

    def test_proof_forgets_what_was_denied_and_doubt_keeps_holds(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """Behind a doubt every block is believed again; the device may still read."""
        adapter.plan_step(facts(prefill("r", [1])))
        (order,) = load(adapter, "s", [2])
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(order, 0),)))
        before = adapter.counts()
        adapter.doubt(1)
        adapter.rekey(bytes(16))
        assert {**before, "denied_keys": 0} == adapter.counts()
        assert (1, 1) == (before["denied_keys"], before["holds"])

    def test_doubt_finds_nothing_and_saves_nothing_of_what_was_before(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """R-07: while the weights are in doubt nothing is found or saved, and behind it
        a request that computed on what was before saves nothing more."""
        index.put(0, HASHES[:2])
        adapter.plan_step(facts(prefill("r", [1])))
        assert 8 == adapter.match_prefix("s", 9, HASHES[:2], 0).tokens
        adapter.doubt(1)
        assert 0 == adapter.match_prefix("s", 9, HASHES[:2], 0).tokens
        goes_on = scheduled("r", HASHES[:2], [[1, 2]], 4, 4, new=[[2]])
        other = scheduled("t", HASHES[8:10], [[3, 4]], 0, 8, is_new=True)
        plan = adapter.plan_step(facts(goes_on))
        assert (1, ()) == (plan.epoch, plan.saves)
        adapter.rekey(bytes(16))
        assert 0 == adapter.match_prefix("s", 9, HASHES[:2], 0).tokens
        plan = adapter.plan_step(facts(goes_on, other))
        assert bytes(16) == plan.keyspace_digest
        assert ["t"] == [order.request_id for order in plan.saves]

    def test_denied_block_stays_denied_until_a_save_of_it_is_stored(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """A save that failed is no new copy: the block is a miss until one is."""
        index.put(0, HASHES[:1])
        (load_order,) = load(adapter, "s", [2])
        adapter.apply_report(StepReport(rank=0, failures=(failure_of(load_order),)))
        adapter.apply_report(loaded(load_order))
        for ends, tokens in (("unstored_saves", 0), ("settled_saves", 4)):
            plan = adapter.plan_step(facts(prefill(ends, [7])))
            (save,) = plan.saves
            ended = {ends: (save.transfer_id,), "released": (save.transfer_id,)}
            adapter.apply_report(StepReport(rank=0, **ended))
            assert tokens == adapter.match_prefix("t", 9, HASHES[:2], 0).tokens


class TestTotals:
    def test_load_counts_when_every_rank_has_ended_it_well(
        self, on_two: SchedulerAdapter
    ) -> None:
        """R-20: what two ranks load are the blocks and tokens of one engine, and count
        when the request can go on with them."""
        (order,) = load(on_two, "r", [1, 2])
        for rank, tokens in ((0, 0), (1, 8)):
            on_two.apply_report(loaded(order, rank=rank))
            totals = on_two.totals
            assert (tokens, tokens // 4) == (totals.loaded_tokens, totals.loaded_blocks)
        on_two.loads_finished({"r"})
        assert 8 == on_two.totals.loaded_tokens

    def test_failed_load_counts_once_and_nothing_of_it_is_loaded(
        self, on_two: SchedulerAdapter
    ) -> None:
        """R-20: ranks that fail with one load are one load that failed, for the reason
        that was told first."""
        (order,) = load(on_two, "r", [1, 2])
        for rank, reason in ((0, Reason.CORRUPT), (1, Reason.EVICTED)):
            failed = (failure_of(order, 1, reason),)
            on_two.apply_report(replace(loaded(order, rank=rank), failures=failed))
        assert {"corrupt": 1} == on_two.totals.failed_loads
        assert (0, 0) == (on_two.totals.loaded_tokens, on_two.totals.loaded_blocks)

    def test_request_that_ends_while_it_loads_has_loaded_nothing(
        self, adapter: SchedulerAdapter
    ) -> None:
        """R-20: tokens that nobody went on with are matched, and not loaded."""
        (order,) = load(adapter, "r", [1, 2])
        adapter.request_finished("r")
        adapter.apply_report(loaded(order))
        assert 0 == adapter.totals.loaded_tokens
