# SPDX-License-Identifier: Apache-2.0
"""R-17: whatever a step orders, its plan is a message that may be sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
    prefill,
    saved,
    scheduled,
)
from ucm.blocks import GroupId, Owner
from ucm.reasons import Reason
from ucm.scheduler import budget, saves
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.budget import (
    MAX_HOLDS,
    MAX_ID_CHARS,
    block_nbytes,
    cut_lost,
    failure_nbytes,
    order_nbytes,
    share_nbytes,
)
from ucm.scheduler.matches import MatchReason
from ucm.scheduler.messages import (
    MAX_MESSAGE_BYTES,
    Failure,
    SpanOrder,
    StepPlan,
    StepReport,
    TransferKind,
    encode,
)
from ucm.scheduler.requests import Disposition, StepFacts
from ucm.scheduler.shares import Run, Stay
from ucm.scheduler.transfers import OpenTransfers

MILLION = 1_000_000
LONG_ID = "\N{GRINNING FACE}" * 1000
"""Four bytes a character."""


def an_order(request_id: str, blocks: int) -> SpanOrder:
    """Return an order whose numbers are as long as any."""
    return SpanOrder(
        transfer_id=1 << 40,
        kind=TransferKind.SAVE,
        owners=(Owner(request_id, generation=1 << 40, num_blocks=blocks),),
        group_id=1 << 20,
        block_ids=tuple(range((1 << 40), (1 << 40) + blocks)),
        hashes=bytes(64 * blocks),
    )


class TestSizes:
    @pytest.mark.parametrize("request_id", ["", "r", LONG_ID])
    @pytest.mark.parametrize("blocks", [1, 100])
    def test_sizes_are_upper_bounds(self, request_id: str, blocks: int) -> None:
        """R-17: nothing is encoded in order to know that it fits."""
        order = an_order(request_id, blocks)
        empty = len(encode(StepPlan(step=1)))
        size = len(encode(StepPlan(step=1, saves=(order,)))) - empty
        assert size <= order_nbytes(order) <= blocks * block_nbytes(request_id)
        assert size <= share_nbytes(len(request_id), blocks, blocks)
        failure = Failure(
            transfer_id=1 << 40,
            request_id=request_id,
            generation=1 << 40,
            group_id=1 << 20,
            bad_hash=bytes(64),
            reason=Reason.RUNTIME_FAILED,
        )
        empty = len(encode(StepReport(rank=0)))
        report = StepReport(rank=0, failures=(failure,))
        assert len(encode(report)) - empty <= failure_nbytes(failure)

    @settings(deadline=None)
    @given(
        shares=st.lists(
            st.tuples(st.text(max_size=9), st.integers(1, 9)), min_size=1, max_size=9
        ),
        limit=st.integers(1, 9),
    )
    def test_sizes_of_shared_orders_are_upper_bounds(
        self, shares: list[tuple[str, int]], limit: int
    ) -> None:
        """R-17: what each owner is counted for covers the orders that several share."""
        book = OpenTransfers(1, {GroupId(0): limit})
        refs = [
            (
                Stay(name, at, 1 << 62, 1 << 31),
                Run(0, [1 << 40] * count, [bytes(64)] * count),
            )
            for at, (name, count) in enumerate(shares, start=1 << 40)
        ]
        orders = tuple(book.open_saves(ONE_FULL.groups[0], refs))
        size = len(encode(StepPlan(step=1, saves=orders)))
        assert size <= sum(map(order_nbytes, orders)) + len(encode(StepPlan(step=1)))
        counted = sum(share_nbytes(len(name), count, limit) for name, count in shares)
        assert sum(map(order_nbytes, orders)) <= counted
        blocks = sum(count * block_nbytes(name) for name, count in shares)
        assert counted <= blocks

    def test_fences_of_all_holds_fit_beside_everything_else(self) -> None:
        """R-17: fences cannot be put off; the number of holds bounds them, and which of
        their blocks are lost is told as far as there is room."""
        fences = tuple(range(1 << 40, (1 << 40) + MAX_HOLDS))
        lost = cut_lost(dict.fromkeys(fences, range(16383, 16377, -1)))
        assert 0 < len(lost) < MAX_HOLDS
        plan = StepPlan(step=1, fences=fences, lost=lost)
        assert len(encode(plan)) < MAX_MESSAGE_BYTES // 8 + 64


class TestLoads:
    @pytest.mark.slow
    def test_request_of_a_million_blocks_comes_in_several_plans(
        self, index: SetIndex
    ) -> None:
        """R-17: each plan fits into a message and says that more is to come; all blocks
        are ordered once, in order, and others come behind."""
        adapter = make_adapter(ONE_FULL, index, span_blocks=4096)
        hashes = [at.to_bytes(32, "big") for at in range(MILLION)]
        for name, blocks in (("huge", MILLION), ("other", 1)):
            adapter.blocks_allocated(
                name,
                [range(1, blocks + 1)],
                hashes,
                computed_tokens=0,
                external_tokens=4 * blocks,
            )
        ordered, more = [], []
        while not more or more[-1]:
            plan = adapter.plan_step(StepFacts())
            assert len(encode(plan)) <= MAX_MESSAGE_BYTES
            assert plan.loads
            more.append(plan.unfinished)
            ordered += [b for each in plan.loads for b in each.block_ids]
        assert {"huge"} == set(more[:-1])
        assert len(more) - 1 == adapter.totals.cut_plans > 5
        ordered += [
            b for each in adapter.plan_step(StepFacts()).loads for b in each.block_ids
        ]
        assert [*range(1, MILLION + 1), 1] == ordered
        adapter.loads_finished({"huge", "other"})

    def test_loads_are_cut_between_requests_if_that_fits(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A plan takes whole requests until it has its share; none is unfinished."""
        small = make_adapter(ONE_FULL, SetIndex(), span_blocks=2, max_step_blocks=2)
        for name, blocks in (("r", [1, 2, 3, 4, 5]), ("s", [6])):
            small.blocks_allocated(
                name,
                [blocks],
                HASHES,
                computed_tokens=0,
                external_tokens=4 * len(blocks),
            )
        plans = [small.plan_step(StepFacts()) for _ in range(2)]
        names = [{order.request_id for order in plan.loads} for plan in plans]
        assert [{"r"}, {"s"}] == names
        assert ["", ""] == [plan.unfinished for plan in plans]
        assert 0 == small.totals.cut_plans

    def test_request_that_does_not_wait_is_promised_what_one_plan_holds(
        self, index: SetIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-17: where the load must come with the step, more is not matched."""
        index.put(0, HASHES)
        monkeypatch.setattr(budget, "_LOAD_NBYTES", 4 * block_nbytes("r"))
        adapter = make_adapter(ONE_FULL, index, full_hits=False, parks=False)
        assert 16 == adapter.match_prefix("r", 100, HASHES, 0).tokens
        for name, blocks in (
            ("r", [1, 2]),
            ("s", [3, 4, 5]),
            ("t", [6, 7]),
            ("u", [8]),
        ):
            assert 4 * len(blocks) <= adapter.match_prefix(name, 99, HASHES, 0).tokens
            adapter.blocks_allocated(
                name,
                [blocks],
                HASHES,
                computed_tokens=0,
                external_tokens=4 * len(blocks),
            )
        full = adapter.match_prefix("v", 99, HASHES, 0)
        assert (0, MatchReason.NO_ROOM) == (full.tokens, full.reason)
        plan = adapter.plan_step(StepFacts())
        assert (8, "") == (
            sum(len(one.block_ids) for one in plan.loads),
            plan.unfinished,
        )

    def test_request_that_does_not_wait_hits_as_far_as_the_step_has_room(
        self, index: SetIndex
    ) -> None:
        """A step's loads are bounded in blocks as well, at the match: a hit is as long as
        there is room, a miss when there is none, and whole again in the next step."""
        index.put(0, HASHES[:8])
        adapter = make_adapter(
            ONE_FULL, index, max_step_blocks=5, full_hits=False, parks=False
        )
        found = []
        for name in ("a", "b", "c"):
            tokens = adapter.match_prefix(name, 14, HASHES[:3], 0).tokens
            found.append(tokens)
            adapter.blocks_allocated(
                name,
                [[1, 2, 3]],
                HASHES[:3],
                computed_tokens=0,
                external_tokens=tokens,
            )
        assert [12, 8, 0] == found
        loads = adapter.plan_step(StepFacts()).loads
        assert 5 == sum(len(one.block_ids) for one in loads)
        assert 12 == adapter.match_prefix("c", 14, HASHES[:3], 0).tokens

    def test_request_whose_id_fits_into_no_message_is_left_alone(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """R-17: it is neither matched nor saved; others are."""
        index.put(0, HASHES[:2])
        name = "r" * (MAX_ID_CHARS + 1)
        found = adapter.match_prefix(name, 9, HASHES, 0)
        assert (0, MatchReason.LONG_ID) == (found.tokens, found.reason)
        assert 8 == adapter.match_prefix(name[1:], 9, HASHES, 0).tokens
        other = scheduled("s", HASHES[8:10], [[3, 4]], 0, 8, is_new=True)
        plan = adapter.plan_step(facts(prefill(name, [1, 2]), other))
        assert ["s"] == [order.request_id for order in plan.saves]
        adapter.apply_report(saved(*plan.saves))


class TestSaves:
    def test_saves_that_do_not_fit_wait_for_the_next_step(
        self, index: SetIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-17: what is complete and has no room in the message is put off."""
        monkeypatch.setattr(budget, "SAVE_NBYTES", 2 * block_nbytes("r") + 1)
        adapter = make_adapter(ONE_FULL, index, span_blocks=1)
        first = adapter.plan_step(facts(prefill("r", [1, 2, 3])))
        again = scheduled("r", HASHES[:3], [[1, 2, 3]], 12, 0)
        second = adapter.plan_step(facts(again))
        ids = [[one.block_ids for one in plan.saves] for plan in (first, second)]
        assert [[(1,), (2,)], [(3,)]] == ids

    def test_holds_are_bounded(
        self, index: SetIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-17: with as many holds as fences may name, saves wait until some ended."""
        monkeypatch.setattr(saves, "MAX_HOLDS", 2)
        adapter = make_adapter(ONE_FULL, index, span_blocks=1)
        first = adapter.plan_step(facts(prefill("r", [1, 2, 3])))
        assert 2 == len(first.saves)
        again = scheduled("r", HASHES[:3], [[1, 2, 3]], 12, 0)
        assert () == adapter.plan_step(facts(again)).saves
        adapter.apply_report(saved(first.saves[0]))
        assert 1 == len(adapter.plan_step(facts(again)).saves)


class TestDeferrals:
    def test_deferrals_beyond_the_share_come_with_the_next_plan(
        self, adapter: SchedulerAdapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-17: one goes at least, none is lost, and the cut is counted; the engine keeps
        the blocks meanwhile."""
        monkeypatch.setattr(budget, "_DEFERRAL_NBYTES", 1)
        other = scheduled("s", HASHES[8:9], [[2]], 0, 4, is_new=True)
        plan = adapter.plan_step(facts(prefill("r", [1]), other))
        for name in ("r", "s"):
            assert Disposition.DEFER is adapter.request_finished(name)
        for cut, name in ((1, "r"), (1, "s")):
            deferred = adapter.plan_step(StepFacts()).deferred
            assert [name] == [each.request_id for each in deferred]
            assert cut == adapter.totals.cut_plans
        adapter.apply_report(saved(*plan.saves))
        adapter.deferral_ended({"r", "s"})
        assert adapter.is_idle
