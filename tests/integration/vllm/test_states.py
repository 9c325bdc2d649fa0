# SPDX-License-Identifier: Apache-2.0
"""What the door hands on of recurrent states, from the engine's own classes."""

from collections.abc import Iterator

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)

from tests.integration.vllm.host_kit import make_setup
from tests.testing.host_kit import RECURRENT
from ucm.blocks import GroupId
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.worker import WorkerHalf
from ucm.scheduler.messages import StepPlan
from ucm.testing.faults import FaultPlan

HASHES = [bytes([number]) * 32 for number in range(1, 5)]
TABLES = ([0, 7], [0, 8], [1, 2, 3, 4])


class Request:
    """A request of 16 tokens, four to a hash."""

    request_id = "r"
    num_tokens = num_prompt_tokens = 17
    num_computed_tokens = 16
    block_hashes = HASHES


def output(*offers: tuple[int, int, int], **options: object) -> SchedulerOutput:
    """Return the engine's own description of a step that computes all 16 tokens."""
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = [new_one("r", TABLES)]
    made.num_scheduled_tokens = {"r": 16}
    return described(made, {"r": [*offers]}, **options)


def new_one(
    name: str, tables: tuple[list[int], ...], computed: int = 0
) -> NewRequestData:
    """Return the engine's own description of a request that begins."""
    return NewRequestData(
        req_id=name,
        prompt_token_ids=None,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=tables,
        num_computed_tokens=computed,
        lora_request=None,
    )


def described(
    made: SchedulerOutput, offers: dict[str, list[tuple[int, int, int]]], **options
) -> SchedulerOutput:
    """Add the tables and offers of a step to its description."""
    made.kv_connector_block_state = KVConnectorBlockState(
        req_ids={"r"},
        resolve_block_ids=lambda _: TABLES,
        boundary_state_offloads=offers,
    )
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    """A scheduler's half that knows of one request and of its one rank."""
    setup = make_setup(RECURRENT, 1, 16, FaultPlan())
    half, worker = SchedulerHalf(setup), WorkerHalf(setup, 0, "cpu")
    half.agree([worker.handshake()])
    half.match(Request(), 0)
    half.allocated(Request(), TABLES, 0)
    yield half
    worker.close()
    half.close()


def saves_of(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    """Return the blocks that a plan saves, by group."""
    saves: dict[int, tuple[int, ...]] = {}
    for order in plan.saves:
        saves[order.group_id] = (*saves.get(order.group_id, ()), *order.block_ids)
    return saves


def test_offers_of_the_engine_are_saved(half: SchedulerHalf) -> None:
    """Group, block and tokens of each offer arrive where saves are decided."""
    plan = plan_in(half.plan(output((0, 7, 16), (1, 8, 16), (1, 9, 12))))
    assert {0: (7,), 1: (8,), 2: (1, 2, 3, 4)} == saves_of(plan)


def test_step_that_offers_nothing_saves_no_state(half: SchedulerHalf) -> None:
    """What stands in the tables of states is not looked at."""
    assert {2: (1, 2, 3, 4)} == saves_of(plan_in(half.plan(output())))


def gives(made: SchedulerOutput, blocks: tuple[list[int], ...]) -> SchedulerOutput:
    """Add one that goes on and is given blocks to a step's description."""
    made.scheduled_cached_reqs = cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = ["q"], [20]
    cached.new_block_ids = [blocks]
    made.num_scheduled_tokens["q"] = 1
    return made


def test_state_whose_block_goes_to_who_runs_is_lost(half: SchedulerHalf) -> None:
    """Who is given blocks is looked at in a step that offers states, though no save reads any."""
    made = gives(output((0, 9, 16), (1, 8, 16)), ([9], [], []))
    assert {1: (8,), 2: (1, 2, 3, 4)} == saves_of(plan_in(half.plan(made)))


@pytest.mark.parametrize("who", ["goes on", "begins", "begins behind it", "attends"])
def test_block_onto_which_a_state_is_moved_is_overwritten(
    half: SchedulerHalf, who: str
) -> None:
    """R-01: the second runner moves a state onto a new block before it calls any hook: a save
    that still reads it is torn, and not only waited for. What is read, or computed, is not."""
    first = plan_in(half.plan(output((0, 7, 16))))
    (state,) = (each for each in first.saves if each.group_id == GroupId(0))
    made = described(SchedulerOutput.make_empty(), {})
    if who.startswith("begins"):
        computed = 16 if who == "begins" else 32
        made.scheduled_new_reqs = [new_one("q", ([0, 0, 7], [0, 0, 9], [5]), computed)]
        made.num_scheduled_tokens = {"q": 1}
    else:
        gives(made, ([], [], [7]) if who == "attends" else ([7], [], []))
    plan = plan_in(half.plan(made))
    is_moved, number = who in {"goes on", "begins"}, (state.transfer_id,)
    assert (number if is_moved else ()) == plan.overwritten
    assert (number if who == "attends" else ()) == plan.fences


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_block_copies": [KVCacheBlockCopy(src_block_id=1, dst_block_id=7)]},
        {"new_block_ids_to_zero": [7, 11]},
    ],
    ids=["copied", "cleared"],
)
def test_blocks_that_the_engine_writes_itself_are_fenced(
    half: SchedulerHalf, options: dict[str, object]
) -> None:
    """S1-22: a copy onto a block, and clearing it, wait for the save that reads it;
    the source of a copy is only read."""
    first = plan_in(half.plan(output((0, 7, 16))))
    (state,) = (each for each in first.saves if each.group_id == GroupId(0))
    made = SchedulerOutput.make_empty()
    made.scheduled_cached_reqs = CachedRequestData.make_empty()
    plan = plan_in(half.plan(described(made, {}, **options)))
    assert ((), (state.transfer_id,)) == (plan.fences, plan.overwritten)
