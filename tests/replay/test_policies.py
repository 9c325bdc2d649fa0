# SPDX-License-Identifier: Apache-2.0
"""The models of the replay do what the stores do, and say what they should."""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scenarios
from benchmarks.workloads import generate
from ucm.blocks import PackedKey
from ucm.errors import StoreFullError
from ucm.replay.policies import LRU, POLICIES, Newcomers, Optimal, Ours, Stamped
from ucm.replay.traces import (
    Request,
    Trace,
)
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.uses import Uses

STEP = 4
SECOND = 10**9


def trace_of(*prompts: Sequence[int]) -> Trace:
    """Return a trace with a request each second."""
    return Trace(
        "a trace",
        STEP,
        tuple(
            Request((at + 1) * SECOND, STEP * len(blocks), tuple(blocks))
            for at, blocks in enumerate(prompts)
        ),
    )


def hits(policy_name: str, capacity: int, trace: Trace) -> list[int]:
    """Return how many blocks each request found."""
    policy = POLICIES[policy_name](capacity, trace)
    return [policy.ask(request) for request in trace.requests]


def prompts(names: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of a path in a tree: a block is told by all before it."""
    return tuple(
        int("1" + "".join(map(str, names[: at + 1]))) for at in range(len(names))
    )


TREES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=3).map(prompts),
    min_size=1,
    max_size=7,
)


def best(capacity: int, trace: Trace) -> int:
    """Return the most prefix hits that anybody can have, by trying everything."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for kept, count in reached.items():
            absent = [b not in kept for b in request.blocks]
            total = count + (absent.index(True) if True in absent else len(absent))
            could = kept | set(request.blocks)
            for chosen in itertools.combinations(
                sorted(could), min(capacity, len(could))
            ):
                state = frozenset(chosen)
                following[state] = max(following.get(state, 0), total)
        reached = following
    return max(reached.values())


class TestOptimal:
    @settings(max_examples=60, deadline=None)
    @given(TREES, st.integers(1, 3))
    def test_nobody_finds_more(
        self, paths: list[tuple[int, ...]], capacity: int
    ) -> None:
        """Its prefix hits are what trying every choice of blocks gives."""
        trace = trace_of(*paths)
        assert best(capacity, trace) == sum(hits("optimal", capacity, trace))

    def test_written_are_blocks_that_are_used_again(self) -> None:
        """What was kept all along is not written a second time."""
        trace = trace_of([1, 2], [1, 3], [1, 2])
        policy = Optimal(2, STEP, trace)
        assert [0, 1, 2] == [policy.ask(request) for request in trace.requests]
        assert 2 == policy.num_written


class TestPolicies:
    @pytest.mark.parametrize("name", POLICIES)
    @settings(max_examples=40, deadline=None)
    @given(paths=TREES, capacity=st.integers(1, 4))
    def test_capacity_is_kept_and_nobody_beats_the_optimum(
        self, name: str, paths: list[tuple[int, ...]], capacity: int
    ) -> None:
        """A model that cheats on room or on the future is worth nothing."""
        trace = trace_of(*paths)
        policy = POLICIES[name](capacity, trace)
        distinct = {block for path in paths for block in path}
        found = 0
        for request in trace.requests:
            found += policy.ask(request)
            assert capacity >= sum(block in policy for block in distinct)
        assert sum(hits("optimal", capacity, trace)) >= found

    @pytest.mark.parametrize("name", ["lru", "ours", "newcomers", "arc", "s3-fifo"])
    def test_with_room_for_all_each_block_is_found_from_its_second_use_on(
        self, name: str
    ) -> None:
        """Where nothing is evicted there is nothing to choose."""
        trace = generate("mixed", minutes=5, rate=0.5, seed=2)
        capacity = trace.distinct_blocks()
        assert hits("optimal", capacity, trace) == hits(name, capacity, trace)

    def test_prompt_above_the_capacity_keeps_its_head_with_ours_only(self) -> None:
        """The one that was saved three times, with 1.25 times the capacity."""
        trace = trace_of(*[range(50)] * 3)
        assert [0, 0, 0] == hits("lru", 40, trace)
        assert [0, 40, 40] == hits("ours", 40, trace)

    def test_first_span_goes_first_with_lru(self) -> None:
        """In a span the first block counts as used last, across spans it does not."""
        policy = LRU(100, STEP)
        moments = policy.moments(Request(0, 40, tuple(range(10))), 0)
        assert [*range(7, -1, -1), 9, 8] == moments

    def test_block_used_earlier_is_not_taken_in_for_one_used_later(self) -> None:
        """So a request never evicts what it has stored itself."""
        policy = Ours(2, STEP)
        policy.keep([1, 2], [10, 9])
        policy.keep([3], [9])
        assert {1: 10, 2: 9} == policy.stamps
        policy.keep([3, 1], [11, 5])
        assert {1: 10, 3: 11} == policy.stamps
        assert 3 == policy.num_written

    def test_second_use_is_taken_in_and_the_first_is_not(self) -> None:
        """Its first hit is the third use."""
        assert [0, 0, 1, 1] == hits("second-use", 4, trace_of([1], [1], [1], [1]))

    def test_tinylfu_keeps_the_one_used_more_often(self) -> None:
        """A block that comes once pushes nothing out."""
        trace = trace_of([1, 2], [1, 2], [3], [1, 2], [3], [4], [1, 2])
        assert [0, 2, 0, 2, 0, 0, 2] == hits("tinylfu", 2, trace)

    def test_shallow_keeps_the_beginning(self) -> None:
        """Sixteen blocks of each prompt, however much room there is."""
        assert [0, 16] == hits("shallow", 100, trace_of(range(20), range(20)))


class TestNewcomers:
    def flood(self) -> Trace:
        """Return four prompts that come again and again in a stream of others."""
        again = [[10_000 + at] for at in range(4)]
        return trace_of(
            *(
                [each] if at % 4 else again[at // 4 % 4]
                for at, each in enumerate(range(2000))
            )
        )

    def test_what_comes_once_no_longer_pushes_out_what_comes_again(self) -> None:
        """A stream of single prompts leaves a store of eight to the other four."""
        trace = self.flood()
        late = range(1000, 2000, 4)
        ours, new = hits("ours", 8, trace), hits("newcomers", 8, trace)
        assert 0 == sum(ours[at] for at in late)
        assert 240 <= sum(new[at] for at in late)

    def test_where_each_comes_twice_newcomers_are_as_good_as_any(self) -> None:
        """It has no loss where a second use is the last one."""
        trace = generate("pair", minutes=20, rate=1.0, seed=3)
        policy = Newcomers(300, trace.block_tokens)
        found = [policy.ask(request) for request in trace.requests]
        assert hits("ours", 300, trace) == found
        assert 0.0 == policy.share

    def test_block_before_a_known_one_is_known(self) -> None:
        """A parent is never put back behind its child, whatever was forgotten."""
        policy = Newcomers(2, STEP)
        policy.ask(Request(10 * SECOND, 8, (8, 9)))
        policy.ask(Request(20 * SECOND, 8, (6, 7)))
        policy.share = 1.0
        policy._seen[:] = [(9, 1)] * len(policy._seen)
        moments = policy.moments(Request(30 * SECOND, 12, (8, 9, 5)), 0)
        assert 30 * SECOND == moments[0]
        assert 30 * SECOND - STEP == moments[1]
        assert moments[2] < 30 * SECOND - STEP * 2


class _Beside(Newcomers):
    """A model that tells a store what it does itself, and compares all answers."""

    def __init__(self, capacity: int, store: Store) -> None:
        super().__init__(capacity, STEP)
        self.store = store

    def use(self, request: Request, num_held: int) -> None:
        """Match, touch, reserve and commit as a connector does."""
        keys = [PackedKey(block.to_bytes(32)) for block in request.blocks]
        assert num_held == self.store.match(keys)
        moments = self.moments(request, num_held)
        uses = Uses(
            np.array(moments, dtype=np.int64), np.zeros(len(keys), dtype=np.uint32)
        )
        self.store.touch(keys, uses)
        self.keep(request.blocks, moments)
        try:
            with self.store.reserve(keys, 64, uses) as lease:
                lease.seal(0, len(lease.keys))
                lease.commit()
        except StoreFullError:
            pass
        kept = [block in self for block in request.blocks]
        assert kept == self.store.contains(keys)


class _OursBeside(_Beside):
    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return what ``Ours`` does."""
        return Ours.moments(self, request, num_held)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield an empty store of 96 blocks."""
    if request.param == "memory":
        opened: Store = MemoryStore(96, 64)
    else:
        path = str(tmp_path / "slab")
        opened = SlabStore(path=path, capacity_bytes=96 * 4096, block_bytes=4096)
    with opened:
        yield opened


class TestStores:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("kind", "store"),
        [
            (_OursBeside, "memory"),
            (_OursBeside, "slab"),
            (_Beside, "memory"),
            (_Beside, "slab"),
        ],
        indirect=["store"],
    )
    def test_model_and_store_agree_on_each_request(
        self, kind: type[_Beside], store: Store
    ) -> None:
        """What the replay says of us is what the store does, block by block."""
        trace = generate("mixed", minutes=4, rate=1.0, seed=4, block_tokens=STEP)
        assert any(len(each.blocks) > 96 for each in trace.requests)
        # A thousand times as fast, and over by now: what is to come is retention.
        begin = time.monotonic_ns() - SECOND
        model = kind(store.stats().capacity_blocks, store)
        found = 0
        for each in trace.requests:
            moment = begin + each.moment // 1000
            found += model.ask(Request(moment, each.num_tokens, each.blocks))
        assert found > 100  # and no difference at any of them
        assert len(model.stamps) == store.stats().committed_blocks


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Return what became of one trace in all scenarios."""
    trace = generate("chat", minutes=20, rate=0.5, seed=1)
    return list(scenarios.scenarios(trace, 400))


class TestScenarios:
    def test_engines_that_tell_their_hits_keep_them_in_the_store(
        self, rows: list[dict[str, Any]]
    ) -> None:
        """What an engine finds in its own cache is not evicted below it."""
        found = [
            each
            for each in rows
            if each["scenario"] == "engines" and each["policy"] == "ours"
        ]
        silent, told = found[:2]
        assert (False, True) == (
            silent["touches_hits_of_engines"],
            told["touches_hits_of_engines"],
        )
        assert told["ratio"] > silent["ratio"] > silent["ratio_of_engines_alone"] > 0

    def test_budget_moves_hits_to_what_is_retained(
        self, rows: list[dict[str, Any]]
    ) -> None:
        """Retention takes from the others what it gives, within its budget."""
        found = [each for each in rows if each["scenario"] == "retention"]
        none, _, quarter, _ = found
        assert quarter["ratio_of_retained"] > none["ratio_of_retained"]
        assert quarter["ratio_of_others"] < none["ratio_of_others"]

    def test_parts_with_one_moment_leave_together(
        self, rows: list[dict[str, Any]]
    ) -> None:
        """Of no block there is one part and not the other."""
        apart, together = rows[-2:]
        assert ("apart", "together") == (apart["evicted"], together["evicted"])
        assert 0 == together["requests_that_meet_a_broken_block"]
        assert 0 < apart["requests_that_meet_a_broken_block"]


def test_stamped_models_are_told_apart_by_moments_only() -> None:
    """Equal moments, equal contents: what the page says of who is kept."""
    assert Stamped.use is Ours.use is LRU.use
