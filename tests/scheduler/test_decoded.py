# SPDX-License-Identifier: Apache-2.0
"""When decoded blocks are saved, and what the end of a request still saves."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from tests.scheduler.model import (
    DIGEST,
    HASHES,
    ONE_FULL,
    STATE,
    SetIndex,
    facts,
    make_adapter,
    make_layout,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.config import SaveDecoded
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.requests import (
    Disposition,
    RequestEnd,
    ScheduledRequest,
    StateOffer,
    StepFacts,
    Wishes,
)

TABLE = list(range(1, 17))
AT_END = SaveDecoded.AT_END
Make = Callable[..., SchedulerAdapter]


@pytest.fixture
def make(index: SetIndex) -> Make:
    """Return what makes adapters over one index."""

    def made(decoded: SaveDecoded = AT_END, **options: int) -> SchedulerAdapter:
        return make_adapter(ONE_FULL, index, decoded=decoded, **options)

    return made


def start(name: str, tokens: int, *, prompt: int, at: int = 0) -> ScheduledRequest:
    """Return the facts of a request that computes its first tokens."""
    hashes, table = HASHES[at : at + tokens // 4], TABLE[at : at + 1 + tokens // 4]
    return scheduled(name, hashes, [table], 0, tokens, is_new=True, prompt=prompt)


def go_on(name: str, computed: int, *, prompt: int, at: int = 0) -> ScheduledRequest:
    """Return the facts of a request that computes one token."""
    blocks = (computed + 1) // 4
    table = TABLE[at : at + 1 + blocks]
    return scheduled(
        name, HASHES[at : at + blocks], [table], computed, 1, prompt=prompt
    )


def end(
    tokens: int, *, prompt: int, computed: int | None = None, at: int = 0
) -> RequestEnd:
    """Return what there is of a request of so many tokens, the last one sampled."""
    return RequestEnd(
        computed_tokens=tokens - 1 if computed is None else computed,
        known_tokens=tokens,
        prompt_tokens=prompt,
        hashes=HASHES[at : at + tokens // 4],
        tables=[TABLE[at : at + 1 + tokens // 4]],
    )


def decode(
    adapter: SchedulerAdapter, name: str, tokens: range, *, prompt: int
) -> list[StepPlan]:
    """Let a request compute one token after the other, told of only when it is due."""
    plans = []
    for computed in tokens:
        request = go_on(name, computed, prompt=prompt)
        told = [request] if computed + 1 >= adapter.due.get(name, 0) else []
        plans.append(adapter.plan_step(StepFacts(scheduled=tuple(told), is_idle=False)))
    return plans


def all_saved(plans: Sequence[StepPlan]) -> list[int]:
    """Return the saved blocks of plans, in order."""
    return [block for plan in plans for block in saved_blocks(plan).get(0, [])]


class TestAtEnd:
    def test_prompt_is_saved_at_once_and_the_answer_when_its_request_ends(
        self, make: Make
    ) -> None:
        """Blocks within the prompt are saved as ever. The others, also the one in which
        the prompt ends, are saved by the plan that also defers the request."""
        adapter = make()
        plans = [adapter.plan_step(facts(start("r", 10, prompt=10)))]
        plans += decode(adapter, "r", range(10, 22), prompt=10)
        assert [1, 2] == all_saved(plans)
        for plan in plans:
            adapter.apply_report(saved(*plan.saves))
        assert Disposition.DEFER is adapter.request_finished("r", end(23, prompt=10))
        assert 1 == adapter.counts()["endings"]
        plan = adapter.plan_step(StepFacts())
        assert {0: [3, 4, 5]} == saved_blocks(plan)
        assert HASHES[2:5] == plan.saves[0].split_hashes()
        assert ["r"] == [each.request_id for each in plan.deferred]
        adapter.apply_report(saved(*plan.saves))
        adapter.deferral_ended({"r"})
        assert adapter.is_idle
        assert 0 == adapter.totals.dropped_blocks

    def test_request_is_looked_at_when_a_span_is_full(self, make: Make) -> None:
        """Behind the prompt a full span of decoded blocks is saved as one ticket, and in
        no step before it is anybody told of the request."""
        adapter = make(span_blocks=3)
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        assert 20 == adapter.due["r"]
        plans = decode(adapter, "r", range(8, 20), prompt=8)
        assert [((3, 4, 5),)] == [
            tuple(order.block_ids for order in plan.saves)
            for plan in plans
            if plan.saves
        ]
        assert 32 == adapter.due["r"]

    @pytest.mark.parametrize(
        ("tokens", "computed", "expected"),
        [
            pytest.param(17, 16, [3, 4], id="all-accepted"),
            pytest.param(16, 20, [3], id="last-token-may-be-a-guess"),
            pytest.param(17, 14, [3], id="not-all-computed"),
            pytest.param(17, 0, [], id="lost-its-blocks"),
            pytest.param(8, 8, [], id="nothing-decoded"),
        ],
    )
    def test_only_accepted_tokens_count(
        self, make: Make, tokens: int, computed: int, expected: list[int]
    ) -> None:
        """Rejected guesses, and tokens that were sampled and not computed, make no block
        whole; where nothing is left the engine frees the blocks at once."""
        adapter = make()
        plan = adapter.plan_step(facts(start("r", 8, prompt=8)))
        adapter.apply_report(saved(*plan.saves))
        told = end(tokens, prompt=8, computed=computed)
        answer = adapter.request_finished("r", told)
        assert (Disposition.DEFER if expected else Disposition.FREE_NOW) is answer
        assert expected == all_saved([adapter.plan_step(StepFacts())])

    def test_whole_prompt_counts_where_nothing_is_sampled(self, make: Make) -> None:
        """A prompt for which no plan had room is saved at the end as far as it was
        computed, its last token included: a pooling model samples none."""
        adapter = make(max_step_blocks=1)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=8)))]
        adapter.request_finished("r", end(8, prompt=8, computed=8))
        plans.append(adapter.plan_step(StepFacts()))
        assert [[1], [2]] == [all_saved([plan]) for plan in plans]

    def test_many_that_end_at_once_travel_together(self, make: Make) -> None:
        """What several requests leave is one ticket, and defers each of them."""
        adapter = make()
        names = ("r", "s", "t")
        starts = [start(name, 4, prompt=4, at=4 * i) for i, name in enumerate(names)]
        adapter.apply_report(saved(*adapter.plan_step(facts(*starts)).saves))
        for i, name in enumerate(names):
            adapter.request_finished(name, end(9, prompt=4, at=4 * i))
        plan = adapter.plan_step(StepFacts())
        (order,) = plan.saves
        assert ((2, 6, 10), names) == (
            order.block_ids,
            tuple(owner.request_id for owner in order.owners),
        )
        assert names == tuple(each.request_id for each in plan.deferred)

    @pytest.mark.parametrize(
        ("bound", "expected"),
        [
            pytest.param({"tickets": 1}, ["r", "s", "t", "u"], id="tickets"),
            pytest.param({"nbytes": 128}, ["rs", "tu"], id="bytes"),
            pytest.param({"max_step_blocks": 3}, ["rst", "u"], id="blocks"),
        ],
    )
    def test_many_that_end_at_once_are_spread_over_plans(
        self, make: Make, bound: dict[str, int], expected: list[str]
    ) -> None:
        """No plan orders more than the workers let wait; the others follow as tickets are
        released, and each request is deferred with its last block."""
        adapter = make(**bound)
        names = "rstu"
        for i, name in enumerate(names):
            plan = adapter.plan_step(facts(start(name, 4, prompt=4, at=4 * i)))
            adapter.apply_report(saved(*plan.saves))
        for i, name in enumerate(names):
            told = end(9, prompt=4, at=4 * i)
            assert Disposition.DEFER is adapter.request_finished(name, told)
        plans = []
        for together in expected:
            plan = adapter.plan_step(StepFacts())
            assert list(together) == [each.request_id for each in plan.deferred]
            if "max_step_blocks" not in bound:
                assert adapter.plan_step(StepFacts()).is_empty
            adapter.apply_report(saved(*plan.saves))
            plans.append(plan)
        assert [2, 6, 10, 14] == all_saved(plans)

    def test_deferral_waits_for_the_last_block_of_its_request(self, make: Make) -> None:
        """A request of which a plan saves a part only is deferred by the next."""
        adapter = make(max_step_blocks=2)
        adapter.apply_report(
            saved(*adapter.plan_step(facts(start("r", 4, prompt=4))).saves)
        )
        adapter.request_finished("r", end(17, prompt=4))
        plans = [adapter.plan_step(StepFacts()) for _ in range(2)]
        assert [[2, 3], [4]] == [all_saved([plan]) for plan in plans]
        assert [0, 1] == [len(plan.deferred) for plan in plans]

    def test_what_waits_for_too_long_is_dropped_and_counted(self, make: Make) -> None:
        """A request whose blocks nobody could take in time is deferred all the same."""
        adapter = make(tickets=1)
        first = adapter.plan_step(facts(start("r", 8, prompt=4)))
        assert 1 == len(first.saves)
        adapter.request_finished("r", end(9, prompt=4))
        for now, deferred in ((0.0, 0), (29.0, 0), (30.0, 1)):
            adapter.tick(now)
            plan = adapter.plan_step(StepFacts())
            assert ((), deferred) == (plan.saves, len(plan.deferred))
        assert 1 == adapter.totals.dropped_blocks

    def test_block_that_another_saves_is_left_to_it(self, make: Make) -> None:
        """Two equal answers are saved once, whoever comes first."""
        adapter = make()
        starts = [start(name, 4, prompt=4) for name in ("r", "s")]
        adapter.apply_report(saved(*adapter.plan_step(facts(*starts)).saves))
        for name in ("r", "s"):
            assert Disposition.DEFER is adapter.request_finished(name, end(9, prompt=4))
        plan = adapter.plan_step(StepFacts())
        assert ([2], 2) == (all_saved([plan]), len(plan.deferred))


class TestTrouble:
    def test_preempted_request_loses_what_waited(self, make: Make) -> None:
        """The blocks are the engine's again; how many were lost is counted."""
        adapter = make()
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        plan = adapter.plan_step(StepFacts(preempted={"r": 18}))
        assert ((), 2) == (plan.saves, adapter.totals.dropped_blocks)
        assert Disposition.FREE_NOW is adapter.request_finished(
            "r", end(19, prompt=8, computed=0)
        )

    def test_after_a_preemption_all_that_waits_is_saved_for_a_while(
        self, make: Make
    ) -> None:
        """Who may be next saves what it has, and each block as it becomes whole; later
        blocks wait again."""
        adapter = make()
        adapter.plan_step(facts(start("r", 8, prompt=8), start("s", 4, prompt=4, at=8)))
        assert 40 == adapter.due["r"]
        adapter.plan_step(StepFacts(preempted={"s": 4}))
        assert {0} == set(adapter.due.values())
        assert [3] == all_saved(decode(adapter, "r", range(12, 13), prompt=8))
        assert 16 == adapter.due["r"]
        for _ in range(64):
            adapter.plan_step(StepFacts())
        assert [] == all_saved(decode(adapter, "r", range(15, 16), prompt=8))
        assert 44 == adapter.due["r"]

    @pytest.mark.parametrize("what", ["doubt", "failed"])
    def test_nothing_that_waits_is_saved_once_nothing_may_be(
        self, make: Make, what: str
    ) -> None:
        """When the weights are in doubt, or the workers have failed, what requests left is
        dropped, and the engine gets its blocks back."""
        adapter = make()
        plan = adapter.plan_step(
            facts(start("r", 4, prompt=4), start("s", 4, prompt=4))
        )
        adapter.apply_report(saved(*plan.saves))
        adapter.request_finished("r", end(9, prompt=4))
        if what == "doubt":
            adapter.doubt(1)
            adapter.rekey(DIGEST)
        else:
            adapter.apply_report(StepReport(rank=0, healthy=False))
        assert Disposition.FREE_NOW is adapter.request_finished("s", end(9, prompt=4))
        plan = adapter.plan_step(StepFacts())
        assert ((), ["r"]) == (plan.saves, [each.request_id for each in plan.deferred])
        assert 2 == adapter.totals.dropped_blocks

    def test_request_that_waits_for_a_load_leaves_nothing(self, make: Make) -> None:
        """What was computed on a prefix that is not there yet is garbage if it fails."""
        adapter = make()
        adapter.blocks_allocated(
            "r", [TABLE[:3]], HASHES[:1], computed_tokens=0, external_tokens=4
        )
        adapter.plan_step(facts(start("r", 12, prompt=4)))
        assert Disposition.FREE_NOW is adapter.request_finished("r", end(13, prompt=4))
        assert () == adapter.plan_step(StepFacts()).saves


class TestOtherWays:
    def test_each_block_is_saved_in_its_step(self, make: Make) -> None:
        """With ``each_block`` nothing waits; the end saves what no step could: a block
        whose hash came late."""
        adapter = make(SaveDecoded.EACH_BLOCK)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=4)))]
        plans += decode(adapter, "r", range(8, 12), prompt=4)
        assert [1, 2, 3] == all_saved(plans)
        for plan in plans:
            adapter.apply_report(saved(*plan.saves))
        adapter.request_finished("r", end(17, prompt=4))
        assert [4] == all_saved([adapter.plan_step(StepFacts())])

    def test_never_saves_prompts_only(self, index: SetIndex) -> None:
        """With ``never`` no block behind the prompt is saved, in any kind of group, nor
        looked at, nor counted as dropped."""
        layout = make_layout((4, None), (4, 9), (4, STATE))
        adapter = make_adapter(layout, index, decoded=SaveDecoded.NEVER)
        tables = [[1, 2, 3], [4, 5, 6], [0, 0, 7]]
        offers = [StateOffer(2, 7, 12)]
        request = scheduled(
            "r", HASHES[:3], tables, 0, 12, is_new=True, states=offers, prompt=8
        )
        plan = adapter.plan_step(facts(request))
        assert {0: [1, 2], 1: [4, 5]} == saved_blocks(plan)
        assert adapter.due["r"] > 1 << 40
        adapter.apply_report(saved(*plan.saves))
        left = RequestEnd(
            computed_tokens=12,
            known_tokens=13,
            prompt_tokens=8,
            hashes=HASHES[:3],
            tables=tables,
        )
        assert Disposition.FREE_NOW is adapter.request_finished("r", left)
        assert 0 == adapter.totals.dropped_blocks

    def test_windows_and_states_do_not_wait(self, index: SetIndex) -> None:
        """With ``at_end`` a window's block and a state are saved in their step: the one
        goes back to the engine, the other is written over."""
        layout = make_layout((4, None), (4, 9), (4, STATE))
        adapter = make_adapter(layout, index, decoded=AT_END)
        request = scheduled(
            *("r", HASHES[:2], [[1, 2], [4, 5], [0, 7]], 0, 8),
            is_new=True,
            states=[StateOffer(2, 7, 8)],
            prompt=4,
        )
        plan = adapter.plan_step(facts(request))
        assert {0: [1], 1: [4, 5], 2: [7]} == saved_blocks(plan)
        assert 12 == adapter.due["r"]

    def test_engine_that_saves_nothing_is_told_of_nobody_again(
        self, index: SetIndex, make: Make
    ) -> None:
        """R-18: while nothing is saved no request is due, and all are once it begins."""
        adapter = make()
        adapter.rekey(b"")
        adapter.plan_step(facts(start("r", 4, prompt=4)))
        assert adapter.due["r"] > 1 << 40
        adapter.rekey(DIGEST)
        assert {0} == set(adapter.due.values())
        assert [1] == all_saved([adapter.plan_step(facts(go_on("r", 4, prompt=4)))])


class TestLimit:
    def test_limited_request_is_saved_so_far_and_not_looked_at_again(
        self, make: Make
    ) -> None:
        """R-58, R-18: of a prompt and its answer what is within the request's limit is saved,
        at once or at its end, and behind it nobody looks."""
        for most, at_once, at_end in ((7, [1], []), (13, [1, 2], [3])):
            adapter = make()
            one = replace(start("r", 8, prompt=8), wishes=Wishes(most_saved=most))
            assert {0: at_once} == saved_blocks(adapter.plan_step(facts(one)))
            assert adapter.due["r"] > 20
            last = replace(end(20, prompt=8), wishes=one.wishes)
            adapter.request_finished("r", last)
            plan = adapter.plan_step(StepFacts())
            assert at_end == saved_blocks(plan).get(0, [])
            assert 0 == adapter.totals.dropped_blocks
