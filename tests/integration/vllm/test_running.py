# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half asks of the engine's requests, step by step."""

from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from tests.integration.vllm.host_kit import make_setup
from tests.testing.host_kit import HYBRID, ONE_FULL
from ucm.integration.vllm.messages import plan_in
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.worker import WorkerHalf
from ucm.layout import KVLayout
from ucm.scheduler.messages import StepPlan
from ucm.testing.faults import FaultPlan

PROMPT = 8
"""Tokens: two blocks of the layouts' first group."""


class Watched:
    """A request of the engine that counts what it is asked."""

    def __init__(self, name: str, touched: Counter[str]) -> None:
        self._all = {
            "request_id": name,
            "num_tokens": PROMPT + 1,
            "num_prompt_tokens": PROMPT,
            "num_computed_tokens": PROMPT,
            "block_hashes": [bytes([at]) * 32 for at in range(4)],
            "lora_request": None,
            "cache_salt": None,
            "kv_transfer_params": None,
            "kv_hints": None,
            "priority": 0,
            "skip_reading_prefix_cache": False,
            "trace_headers": None,
        }
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """Count an attribute that is read."""
        self._touched[name] += 1
        return self._all[name]


class Running:
    """
    A scheduler's half with requests that decode, one token in each step.

    Args:
        layout: The engine's groups.
        number: How many requests.
        own: Tokens that the engine has in its own cache; None: nobody is asked for more.
        computed: Tokens that are there when they run first.
    """

    def __init__(
        self,
        layout: KVLayout,
        number: int,
        *,
        own: int | None = None,
        computed: int = 0,
    ) -> None:
        setup = make_setup(layout, 1, 16, FaultPlan(), company=0)
        worker = WorkerHalf(setup, 0, "cpu")
        self.half = SchedulerHalf(setup)
        self.half.agree([worker.handshake()])
        worker.close()
        self.layout = layout
        self.touched: Counter[str] = Counter()
        self.names = [f"r{at}" for at in range(number)]
        self.computed, self.has_begun = computed, False
        for name in self.names:
            request = Watched(name, self.touched)
            if own is not None:
                self.half.match(request, own)
            self.half.allocated(request, [], 0)

    def step(
        self, tokens: int, *, resumes: bool = False, invalid: Collection[int] = ()
    ) -> StepPlan:
        """Let every request compute so many tokens; return the plan."""
        names, is_first = self.names, not self.has_begun
        self.has_begun = True
        tables = tuple([1, 2, 3, 4] for _ in self.layout.groups)
        cached = [] if is_first else names
        envelope = self.half.plan(
            SimpleNamespace(
                preempted_req_ids=set(),
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda _: self._resolve(tables),
                    boundary_state_offloads={},
                ),
                new_block_ids_to_zero=None,
                kv_cache_block_copies=None,
                scheduled_new_reqs=[
                    SimpleNamespace(
                        req_id=name,
                        num_computed_tokens=self.computed,
                        block_ids=tables,
                    )
                    for name in (names if is_first else ())
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=cached,
                    resumed_req_ids=set(cached if resumes else ()),
                    num_computed_tokens=[self.computed] * len(cached),
                    new_block_ids=[tables if resumes else None] * len(cached),
                ),
                num_scheduled_tokens=dict.fromkeys(names, tokens),
            )
        )
        self.apply(invalid)
        self.half.stats()
        self.computed += tokens
        return plan_in(envelope)

    def apply(self, invalid: Collection[int] = ()) -> None:
        """Let the output of a step come, of whose blocks so many did not."""
        self.half.apply(
            SimpleNamespace(
                kv_connector_worker_meta=None,
                finished_recving=None,
                finished_sending=(),
                invalid_block_ids=set(invalid),
            )
        )

    def _resolve(self, tables: tuple[list[int], ...]) -> tuple[list[int], ...]:
        self.touched["tables"] += 1
        return tables


@pytest.mark.parametrize("layout", [ONE_FULL, HYBRID], ids=["one", "several"])
@pytest.mark.parametrize("number", [1, 10, 1000])
def test_step_that_completes_no_block_looks_at_no_request(
    layout: KVLayout, number: int
) -> None:
    """R-18: however many requests run, none is asked for anything, no table is resolved
    and nothing is made of any in a step in which no block of them becomes whole."""
    running = Running(layout, number)
    running.step(PROMPT)
    assert running.touched["block_hashes"] >= number
    running.touched.clear()
    running.step(1)
    assert {} == running.touched
    running.half.close()


def test_block_behind_the_prompt_is_looked_at_by_nobody() -> None:
    """R-18: where decoded blocks wait for the end, one that becomes whole costs nothing."""
    running = Running(ONE_FULL, 10)
    running.step(PROMPT)
    running.touched.clear()
    for _ in range(5):
        running.step(1)
    assert {} == running.touched
    running.half.close()


def test_resumed_request_waits_for_no_save_of_blocks_that_it_only_reads() -> None:
    """A request that is resumed tells all its blocks; a save of those that the
    engine still had in its cache is not fenced, as if they were overwritten."""
    running = Running(ONE_FULL, 1)
    assert [(1, 2)] == [save.block_ids for save in running.step(PROMPT).saves]
    assert () == running.step(1, resumes=True).fences
    running.half.close()


def test_resumed_request_waits_for_saves_of_blocks_that_it_computes_anew() -> None:
    """Of the blocks of a resumed request, a save of those that its step writes is fenced: they
    were given back with the request's former life, whose save still reads them."""
    running = Running(ONE_FULL, 1)
    (save,) = running.step(PROMPT).saves
    running.computed = 0
    assert (save.transfer_id,) == running.step(4, resumes=True).fences
    running.half.close()


@pytest.mark.parametrize("own", [0, 4])
def test_save_of_blocks_into_which_another_connector_loads_is_fenced(own: int) -> None:
    """Who waits for a connector beside ours is in no step, and was given blocks all the same: a
    save that still reads one of them is fenced. What the engine had itself is only read."""
    running = Running(ONE_FULL, 1)
    (save,) = running.step(PROMPT).saves
    waits = Watched("s", running.touched)
    running.half.match(waits, own)
    blocks = SimpleNamespace(get_block_ids=lambda: ([2, 9],))
    running.half.allocated(waits, [], 0, blocks)
    assert (() if own else (save.transfer_id,)) == running.step(1).fences
    assert () == running.step(1).fences
    running.half.close()


def saved_in(plan: StepPlan) -> list[int]:
    """Return the blocks that a plan saves."""
    return [block_id for save in plan.saves for block_id in save.block_ids]


def test_blocks_that_another_connector_loads_in_the_step_are_saved_behind_its_output() -> (
    None
):
    """Served by a connector beside ours, a request shows more computed tokens than the engine
    and we gave it: nothing of it is saved before the engine can have said that these came."""
    running = Running(ONE_FULL, 1, own=0, computed=4)
    assert [] == saved_in(running.step(4))
    assert [] == saved_in(running.step(1))
    assert [1, 2] == saved_in(running.step(1))
    running.half.close()


def test_blocks_that_did_not_come_are_saved_once_they_are_computed_anew() -> None:
    """What the output says did not come is not saved before the engine, which goes back, has
    computed it."""
    running = Running(ONE_FULL, 1, own=0, computed=4)
    assert [] == saved_in(running.step(4, invalid={1}))
    running.computed = 0
    assert [1] == saved_in(running.step(4))
    assert [2] == saved_in(running.step(4))
    running.half.close()


@pytest.mark.parametrize("own", [None, 4, 8])
def test_prefix_of_the_engines_own_cache_is_saved_at_once(own: int | None) -> None:
    """Nobody else loaded it; also that of a request whose input streams, for which the engine
    asks nobody."""
    running = Running(ONE_FULL, 1, own=own, computed=4)
    assert [1, 2] == saved_in(running.step(4))
    assert 0 == running.half.counts()["doubts"]
    running.half.close()


def test_load_of_ours_is_nobody_elses() -> None:
    """What we load is waited for as a load of ours, and nothing is in doubt beside it."""
    running = Running(ONE_FULL, 0, computed=4)
    running.names = ["r"]
    request = Watched("r", running.touched)
    running.half.match(request, 0)
    running.half.allocated(request, [[1, 2, 3, 4]], 4)
    assert 1 == len(running.step(4).loads)
    assert 0 == running.half.counts()["doubts"]
    running.half.close()


@pytest.mark.parametrize("is_aborted", [True, False])
def test_aborted_one_is_not_saved_while_the_step_that_loads_may_run(
    is_aborted: bool,
) -> None:
    """An engine aborts without the output of the steps under way; whoever ends by itself has
    its own, and is saved behind what the engine says of it."""
    running = Running(ONE_FULL, 1, own=0, computed=4)
    running.step(4)
    name, tables = running.names[0], [[1, 2, 3, 4]]
    keeps = running.half.finished(name, tables, is_aborted=is_aborted)
    assert keeps is not is_aborted
    assert 0 == len(running.half.running)
    running.half.close()


def test_one_that_is_failed_with_its_blocks_is_not_saved() -> None:
    """An engine that fails requests whose blocks did not come ends them before the output
    tells us: nothing of such a one is saved."""
    running = Running(ONE_FULL, 1, own=0, computed=4)
    running.step(4)
    assert running.half.finished(running.names.pop(), [[1, 2, 3, 4]])
    running.apply({1})
    assert [] == [block_id for _ in range(4) for block_id in saved_in(running.step(0))]
    running.half.close()
