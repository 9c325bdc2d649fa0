# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half asks of the engine's requests, step by step."""

from collections import Counter
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
            "num_computed_tokens": 0,
            "block_hashes": [bytes([at]) * 32 for at in range(4)],
            "lora_request": None,
            "cache_salt": None,
            "kv_transfer_params": None,
            "kv_hints": None,
            "priority": 0,
            "trace_headers": None,
        }
        self._touched = touched

    def __getattr__(self, name: str) -> object:
        """Count an attribute that is read."""
        self._touched[name] += 1
        return self._all[name]


class Running:
    """A scheduler's half with requests that decode, one token in each step."""

    def __init__(self, layout: KVLayout, number: int) -> None:
        setup = make_setup(layout, 1, 16, FaultPlan(), company=0)
        worker = WorkerHalf(setup, 0, "cpu")
        self.half = SchedulerHalf(setup)
        self.half.agree([worker.handshake()])
        worker.close()
        self.layout = layout
        self.touched: Counter[str] = Counter()
        self.names = [f"r{at}" for at in range(number)]
        self.computed = 0
        for name in self.names:
            self.half.allocated(Watched(name, self.touched), [], 0)

    def step(self, tokens: int, *, resumes: bool = False) -> StepPlan:
        """Let every request compute so many tokens; return the plan."""
        names, is_first = self.names, not self.computed
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
                        req_id=name, num_computed_tokens=0, block_ids=tables
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
        self.half.apply(
            SimpleNamespace(
                kv_connector_worker_meta=None,
                finished_recving=None,
                finished_sending=(),
            )
        )
        self.half.stats()
        self.computed += tokens
        return plan_in(envelope)

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
