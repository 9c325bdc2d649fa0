# SPDX-License-Identifier: Apache-2.0
"""
What one step costs the engine's scheduler thread: matching, planning, reports.

64 requests with 1000 blocks together hit nothing and are saved, or hit as a whole and
are loaded, over the index of a slab. Part of ``benchmarks.engine_thread``.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Figure, Scale, freeze_garbage, latencies
from benchmarks.lookup import fill
from benchmarks.memory import GROUP, make_memory
from benchmarks.step import (
    BLOCK_TOKENS,
    BLOCKS,
    DIGEST,
    PAGE_BYTES,
    hashes_of,
    sizes,
    spans,
)
from benchmarks.stores import MEMORY
from ucm.blocks import ShardId
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepReport, decode_plan, encode
from ucm.scheduler.requests import ScheduledRequest, StepFacts
from ucm.stores.slab import SlabStore

__all__ = ["measure_scheduler"]

STORED_STEPS = 20

_Requests = list[tuple[str, list[int], list[bytes]]]


def _requests(step: int) -> _Requests:
    return [
        (request, list(blocks), hashes_of(contents))
        for request, blocks, contents in spans(step)
    ]


def measure_scheduler(scale: Scale) -> Iterator[Figure]:
    """Measure matching, planning and reports, over the index of a slab."""
    rounds, steps = sizes(scale)
    taken: dict[str, list[list[float]]] = {}
    layout, _ = make_memory(1, PAGE_BYTES)
    with tempfile.TemporaryDirectory(dir=MEMORY) as home:
        path = Path(home) / "slab"
        num_keys = STORED_STEPS * BLOCKS
        fill(path, num_keys)
        with SlabStore(
            path=str(path),
            capacity_bytes=num_keys * 4096,
            block_bytes=4096,
            index_only=True,
        ) as store:
            adapter = SchedulerAdapter(
                layout,
                store,
                keyspace_digest=DIGEST,
                num_ranks=1,
                shards=[ShardId(0)],
                span_blocks={GROUP: 256},
                max_step_blocks=16384,
                full_hits=True,
            )
            side = SchedulerSide(adapter)
            freeze_garbage()
            for at in rounds:
                for step in steps:
                    number = at * len(steps) + step
                    spent = side.save(STORED_STEPS + number)
                    spent |= side.load(number % STORED_STEPS)
                    for what, seconds in spent.items():
                        every = taken.setdefault(what, [[] for _ in rounds])
                        every[at].append(seconds)
    for what, every in taken.items():
        yield from latencies("scheduler", what, every)


class SchedulerSide:
    """
    One scheduler's steps, timed part by part.

    Args:
        adapter: Whose.
    """

    def __init__(self, adapter: SchedulerAdapter) -> None:
        self._adapter = adapter

    def save(self, step: int) -> dict[str, float]:
        """Plan a step of requests that hit nothing, and take its report."""
        requests = _requests(step)
        scheduled = tuple(
            ScheduledRequest(
                request_id=request,
                computed_tokens=0,
                end_tokens=len(blocks) * BLOCK_TOKENS,
                prompt_tokens=len(blocks) * BLOCK_TOKENS,
                hashes=hashes,
                tables=[blocks],
                new_block_ids=[blocks],
                is_new=True,
            )
            for request, blocks, hashes in requests
        )
        facts = StepFacts(scheduled=scheduled)
        spent: dict[str, float] = {}
        with timed(spent, "match_prefix of 64 requests, misses"):
            matched = self._match(requests)
        with timed(spent, "plan_step, saves"):
            plan = self._adapter.plan_step(facts)
        with timed(spent, "encode the plan"):
            payload = encode(plan)
        if matched or plan != decode_plan(payload):
            raise AssertionError("the keys were new")
        ids = tuple(order.transfer_id for order in plan.saves)
        report = StepReport(rank=0, released=ids, settled_saves=ids)
        with timed(spent, "apply_report, saves"):
            self._adapter.apply_report(report)
        self._finish(requests)
        return spent

    def load(self, step: int) -> dict[str, float]:
        """Plan a step of requests that hit as a whole, and take its report."""
        requests = _requests(step)
        spent: dict[str, float] = {}
        with timed(spent, "match_prefix of 64 requests, hits"):
            matched = self._match(requests)
        if matched != BLOCKS * BLOCK_TOKENS:
            raise AssertionError(f"{matched} tokens matched")
        with timed(spent, "blocks_allocated and plan_step, loads"):
            for request, blocks, hashes in requests:
                self._adapter.blocks_allocated(
                    request,
                    [blocks],
                    hashes,
                    computed_tokens=0,
                    external_tokens=len(blocks) * BLOCK_TOKENS,
                )
            plan = self._adapter.plan_step(StepFacts())
        ids = tuple(order.transfer_id for order in plan.loads)
        self._adapter.apply_report(StepReport(rank=0, loads_done=ids))
        self._finish(requests)
        return spent

    def _match(self, requests: _Requests) -> int:
        match = self._adapter.match_prefix
        return sum(
            match(request, len(blocks) * BLOCK_TOKENS, hashes, 0).tokens
            for request, blocks, hashes in requests
        )

    def _finish(self, requests: _Requests) -> None:
        for request, _, _ in requests:
            self._adapter.request_finished(request)
        if not self._adapter.is_idle:
            raise AssertionError(f"something is left: {self._adapter.counts()}")


@contextlib.contextmanager
def timed(spent: dict[str, float], what: str) -> Iterator[None]:
    """Keep the seconds of a block."""
    start = time.perf_counter()
    yield
    spent[what] = time.perf_counter() - start
