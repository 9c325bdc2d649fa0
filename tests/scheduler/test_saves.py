# SPDX-License-Identifier: Apache-2.0
"""What is saved, and what is fenced because of it."""

from collections.abc import Sequence

from msgspec.structs import replace

from tests.scheduler.model import (
    HASHES,
    HYBRID,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
    make_layout,
    prefill,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepReport
from ucm.scheduler.requests import Disposition, StepFacts


class TestSaves:
    def test_saved_blocks_are_held_when_the_plan_is_out(
        self, on_two: SchedulerAdapter
    ) -> None:
        """S1-22: A request whose blocks are saved is known to hold them at once."""
        plan = on_two.plan_step(facts(prefill("r", [1, 2])))
        assert {0: [1, 2]} == saved_blocks(plan)
        assert HASHES[:2] == plan.saves[0].split_hashes()
        assert (1, 2) == (on_two.counts()["holds"], on_two.counts()["held_blocks"])
        assert Disposition.DEFER is on_two.request_finished("r")

    def test_blocks_of_two_requests_travel_together_and_are_lost_apart(
        self, on_two: SchedulerAdapter
    ) -> None:
        """S1-18: what a step saves of two requests is one ticket, which both hold; a fence
        for one's block names its position, and nothing of the other is lost."""
        other = scheduled("s", HASHES[4:6], [[5, 6]], 0, 8, is_new=True)
        plan = on_two.plan_step(facts(prefill("r", [1, 2]), other))
        (order,) = plan.saves
        owned = [(owner.request_id, owner.num_blocks) for owner in order.owners]
        assert ([("r", 2), ("s", 2)], (1, 2, 5, 6)) == (owned, order.block_ids)
        number = order.transfer_id
        new = scheduled("t", HASHES[7:8], [[6]], 0, 4, is_new=True)
        fenced = on_two.plan_step(facts(new))
        assert ((number,), {number: (3,)}) == (fenced.fences, fenced.lost)
        for name in ("r", "s"):
            assert Disposition.DEFER is on_two.request_finished(name)

    def test_positions_are_told_only_of_blocks_that_others_can_keep(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Of a ticket of one request, or all of whose blocks are written, all is lost; one
        that the engine overwrites loses what a load overwrites beside that."""
        own = adapter.plan_step(facts(prefill("r", [1, 2]))).saves[0].transfer_id
        others = [
            scheduled(name, HASHES[at : at + 1], [[block]], 0, 4, is_new=True)
            for name, at, block in (("s", 4, 5), ("t", 5, 6), ("u", 6, 7))
        ]
        shared = adapter.plan_step(facts(*others)).saves[0].transfer_id
        adapter.blocks_allocated(
            "v", [[2, 5]], HASHES[:2], computed_tokens=0, external_tokens=8
        )
        plan = adapter.plan_step(StepFacts(overwritten=frozenset([7])))
        assert ((own,), (shared,)) == (plan.fences, plan.overwritten)
        assert {shared: (0, 2)} == plan.lost
        plan = adapter.plan_step(StepFacts(allocated=[5, 6, 7]))
        assert ((shared,), {}) == (plan.fences, plan.lost)

    def test_full_spans_of_a_request_are_tickets_of_its_own(
        self, index: SetIndex
    ) -> None:
        """A big request fills tickets of its own, in order; what is left of it goes with
        what is left of others, and no ticket has more than a span."""
        adapter = make_adapter(ONE_FULL, index, span_blocks=3)
        big = prefill("r", [1, 2, 3, 4, 5, 6, 7])
        others = [
            scheduled(name, HASHES[at : at + 2], [[at, at + 1]], 0, 8, is_new=True)
            for name, at in (("s", 10), ("t", 20))
        ]
        plan = adapter.plan_step(facts(*others[:1], big, *others[1:]))
        expected = [
            (["r"], (1, 2, 3)),
            (["r"], (4, 5, 6)),
            (["s", "r"], (10, 11, 7)),
            (["t"], (20, 21)),
        ]
        assert expected == [
            ([owner.request_id for owner in order.owners], order.block_ids)
            for order in plan.saves
        ]

    def test_only_complete_blocks_with_a_hash_are_saved_and_once(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A block is saved in the step that fills it, if its hash is known, once."""
        table = [[1, 2, 3]]
        steps = [
            (scheduled("r", HASHES[:1], table, 0, 6, is_new=True), {0: [1]}),
            (scheduled("r", HASHES[:1], table, 6, 2), {}),
            (scheduled("r", HASHES[:2], table, 8, 1), {0: [2]}),
            (scheduled("r", HASHES[:2], table, 9, 2), {}),
            (scheduled("r", HASHES[:3], table, 11, 1), {0: [3]}),
            (scheduled("r", HASHES[:3], table, 12, 1), {}),
        ]
        for request, expected in steps:
            assert expected == saved_blocks(adapter.plan_step(facts(request)))

    def test_prompt_computed_in_parts_is_saved_in_parts(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A block whose hash is known before its tokens are computed waits for them."""
        table = [[1, 2, 3]]
        steps = [
            (scheduled("r", HASHES[:3], table, 0, 6, is_new=True), {0: [1]}),
            (scheduled("r", HASHES[:3], table, 6, 5), {0: [2]}),
            (scheduled("r", HASHES[:3], table, 11, 1), {0: [3]}),
        ]
        for request, expected in steps:
            assert expected == saved_blocks(adapter.plan_step(facts(request)))

    def test_groups_of_other_block_sizes_use_their_own_hash(
        self, index: SetIndex
    ) -> None:
        """A block of a group is named by the hash that ends where the block ends."""
        adapter = make_adapter(HYBRID, index)
        request = scheduled(
            "r", HASHES[:5], [[1, 2, 3, 4, 5], [0, 7]], 0, 20, is_new=True
        )
        plan = adapter.plan_step(facts(request))
        assert {0: [1, 2, 3, 4, 5], 1: [7]} == saved_blocks(plan)
        assert [HASHES[3]] == plan.saves[1].split_hashes()

    def test_stored_prefix_is_not_saved_again(
        self, on_two: SchedulerAdapter, index: SetIndex
    ) -> None:
        """Of the engine's own hit, what the store lacks on any shard is saved."""
        index.put(0, HASHES[:4], shards=2)
        index.drop(0, HASHES[2:3], shard=1)
        request = scheduled("r", HASHES[:5], [[1, 2, 3, 4, 5]], 16, 4, is_new=True)
        assert {0: [3, 5]} == saved_blocks(on_two.plan_step(facts(request)))

    def test_block_that_another_ticket_writes_is_left_to_it(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Two requests with one prefix save it once, until the ticket has settled."""
        plan = adapter.plan_step(facts(prefill("r", [1, 2]), prefill("s", [3, 4])))
        assert {0: [1, 2]} == saved_blocks(plan)
        adapter.apply_report(saved(*plan.saves))
        assert {0: [5, 6]} == saved_blocks(
            adapter.plan_step(facts(prefill("t", [5, 6])))
        )

    def test_bounded_step_leaves_the_rest_to_the_next(self, index: SetIndex) -> None:
        """What has no room in a step is saved in the next, and counted when lost."""
        adapter = make_adapter(ONE_FULL, index, max_step_blocks=2, span_blocks=1)
        table = [[1, 2, 3, 4, 5, 6, 7]]
        request = scheduled("r", HASHES[:7], table, 0, 28, is_new=True)
        plan = adapter.plan_step(facts(request, prefill("s", [9])))
        assert {0: [1, 2]} == saved_blocks(plan)
        assert 2 == len(plan.saves)
        later = scheduled("r", HASHES[:7], [[0, 0, 3, 0, 5, 6, 7]], 28, 1)
        assert {0: [3, 5]} == saved_blocks(adapter.plan_step(facts(later)))
        assert 1 == adapter.totals.dropped_blocks
        adapter.request_finished("r")
        assert 3 == adapter.totals.dropped_blocks

    def test_decode_step_reads_no_table(self, adapter: SchedulerAdapter) -> None:
        """A step in which no block becomes complete does not resolve the tables."""

        class Unread(Sequence[Sequence[int]]):
            def __getitem__(self, at: object) -> Sequence[int]:  # type: ignore[override]
                raise AssertionError("the table was read")

            def __len__(self) -> int:
                return 1

        adapter.plan_step(facts(prefill("r", [1])))
        request = scheduled("r", HASHES[:1], Unread(), 4, 1, new=[[2]])
        assert adapter.plan_step(facts(request)).is_empty


class TestFences:
    def test_recycled_window_block_is_fenced(self, index: SetIndex) -> None:
        """C-1.3: A block that left a window inside its request is fenced when reused."""
        adapter = make_adapter(make_layout((4, 5)), index)
        plan = adapter.plan_step(facts(prefill("r", [1, 2])))
        running = scheduled("r", HASHES[:2], [[0, 2, 3]], 8, 1, new=[[3]])
        assert () == adapter.plan_step(facts(running)).fences
        reused = scheduled("r", HASHES[:3], [[0, 0, 3, 1]], 12, 1, new=[[1]])
        assert (plan.saves[0].transfer_id,) == adapter.plan_step(facts(reused)).fences

    def test_shared_prefix_is_only_read(self, adapter: SchedulerAdapter) -> None:
        """Blocks of a local hit are shared, not written, and need no fence."""
        plan = adapter.plan_step(facts(prefill("r", [1, 2])))
        sharer = scheduled("s", HASHES[:3], [[1, 2, 3]], 8, 4, is_new=True)
        assert () == adapter.plan_step(facts(sharer)).fences
        # The block in which the hit ends is written from there on.
        writer = scheduled("t", HASHES[:2], [[1, 2]], 7, 1, is_new=True)
        expected = (plan.saves[0].transfer_id,)
        assert expected == adapter.plan_step(facts(writer)).fences

    def test_destination_of_a_load_is_fenced(self, adapter: SchedulerAdapter) -> None:
        """A load may not overwrite a block that a save still reads."""
        plan = adapter.plan_step(facts(prefill("r", [1, 2])))
        adapter.blocks_allocated(
            "s", [[2]], HASHES[:1], computed_tokens=0, external_tokens=4
        )
        expected = (plan.saves[0].transfer_id,)
        assert expected == adapter.plan_step(StepFacts()).fences

    def test_what_another_connector_loads_in_the_step_is_fenced(
        self, adapter: SchedulerAdapter
    ) -> None:
        """What a request shows as computed, and neither its engine nor we gave it, somebody else
        writes in this step: a save that reads such a block is fenced, and one of the
        engine's own prefix is not."""
        plan = adapter.plan_step(facts(prefill("r", [1])))
        (other,) = adapter.plan_step(facts(prefill("t", [1, 2]))).saves
        served = scheduled("s", HASHES[:3], [[1, 2, 3]], 8, 4, is_new=True)
        served = replace(served, own_tokens=4)
        assert (other.transfer_id,) == adapter.plan_step(facts(served)).fences
        assert [1] == saved_blocks(plan)[0]

    def test_released_block_needs_no_fence(self, on_two: SchedulerAdapter) -> None:
        """A save is fenced until the last rank has released it, and then no more."""
        plan = on_two.plan_step(facts(prefill("r", [1])))
        number = plan.saves[0].transfer_id
        on_two.apply_report(StepReport(rank=1, released=(number,)))
        assert (number,) == on_two.plan_step(facts(prefill("s", [1]))).fences
        on_two.apply_report(StepReport(rank=0, released=(number,)))
        assert () == on_two.plan_step(facts(prefill("t", [1]))).fences

    def test_save_of_the_same_step_is_not_fenced(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A block that is filled and saved in one step does not fence itself."""
        plan = adapter.plan_step(facts(prefill("r", [1])))
        assert ((), 1) == (plan.fences, len(plan.saves))


class TestRecords:
    def test_dropped_blocks_are_told_of_their_request(self, index: SetIndex) -> None:
        """What a request lost is in its record, by whichever way it was lost, and nothing
        of it in anybody else's."""
        adapter = make_adapter(ONE_FULL, index, max_step_blocks=2, span_blocks=1)
        table = [[1, 2, 3, 4, 5, 6, 7]]
        request = scheduled("r", HASHES[:7], table, 0, 28, is_new=True)
        plans = [adapter.plan_step(facts(request, prefill("s", [9])))]
        later = scheduled("r", HASHES[:7], [[0, 0, 3, 0, 5, 6, 7]], 28, 1)
        plans.append(adapter.plan_step(facts(later)))
        for plan in plans:
            adapter.apply_report(saved(*plan.saves))
        for name in ("r", "s"):
            adapter.request_finished(name)
        told = {
            record.request_id: (record.saved_blocks, record.dropped_blocks)
            for record in adapter.records.take(at_end=True)
        }
        assert {"r": (4, 3), "s": (0, 1)} == told
        assert 4 == adapter.totals.dropped_blocks
