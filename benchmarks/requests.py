# SPDX-License-Identifier: Apache-2.0
"""
What it costs to have many requests at once.

A span of 1 MB is one of many of a request, or the only one of each of many requests. A
request that *rests* has saved all its blocks; one that *waits* has a save in the queue.
Part of ``benchmarks.pipeline``.
"""

import contextlib
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.bench import KB, Bench
from benchmarks.harness import Figure, Scale, Side, compare, freeze_garbage
from benchmarks.memory import GROUP, ROWS, make_memory
from benchmarks.stores import MEMORY
from ucm.blocks import ShardId
from ucm.config import UCMConfig
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepReport, TransferKind
from ucm.scheduler.requests import ScheduledRequest, StepFacts
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore

__all__ = ["measure_memory", "measure_requests"]

MANY_SPAN_BYTES = 1 << 20
WIDE = UCMConfig.from_mapping(
    {"queue": {"tickets": 1 << 20, "nbytes": "1TiB"}, "timeout": {"save": 600}}
)
"""Nothing is refused, and nothing is too late."""


def measure_requests(scale: Scale) -> Iterator[Figure]:
    """Measure the cost of a span of one request and of one among many."""
    most = 1000 if scale.is_quick else 10_000
    counts = (1, 100, most)
    page_bytes = 16 * KB
    with tempfile.TemporaryDirectory(prefix="ucm-pipeline-", dir=MEMORY) as home:
        bench = Bench(
            SlabStore(
                path=f"{home}/slab",
                capacity_bytes=512 * ROWS * page_bytes,
                block_bytes=ROWS * page_bytes,
            ),
            page_bytes,
            Path(home),
            block_contiguous=True,
            span_bytes=MANY_SPAN_BYTES,
            config=WIDE,
        )

        def side(requests: int) -> Side:
            def prepare(_: int) -> Callable[[], object]:
                keys = [bench.new_keys() for _ in range(most)]
                orders = bench.orders(TransferKind.SAVE, keys, requests)
                return lambda: bench.carry_out(orders, pause=0.005)

            return prepare

        sides = {f"{count} requests": side(count) for count in counts}
        with bench.running():
            freeze_garbage()
            few = scale._replace(samples=min(scale.samples, 3), repeats=1)
            times = compare(sides, few)
    base = times[f"{counts[0]} requests"]
    for count in counts:
        taken = times[f"{count} requests"]
        case = f"{count} concurrent requests"
        costs = [1e6 * spent / most for spent in taken]
        yield Figure.over(case, "cost of a span of 1 MB", "us", costs)
        if count != counts[0]:
            values = [mine / one for mine, one in zip(taken, base, strict=True)]
            yield Figure.over(case, "cost / that of one", "ratio", values, "<= 1.2")


def measure_memory(scale: Scale) -> Iterator[Figure]:
    """Measure what a request takes up that rests, or waits for its turn."""
    count = 1000 if scale.is_quick else 10_000
    yield Figure.over(
        "memory of a request", "scheduler, at rest", "KB", [_resting(count)], "<= 4"
    )
    yield Figure.over(
        "memory of a request", "worker, one save waits", "KB", [_waiting(count)], "<= 4"
    )


def _resting(count: int) -> float:
    """Return KB per request that has saved its blocks, in the scheduler."""
    layout, _ = make_memory(1, KB)
    store = MemoryStore(1, ROWS * KB)
    adapter = SchedulerAdapter(
        layout,
        store,
        keyspace_digest=bytes(16),
        num_ranks=1,
        shards=[ShardId(0)],
        span_blocks={GROUP: 256},
        max_step_blocks=1 << 20,
        full_hits=True,
    )
    facts = []
    for at in range(count):
        blocks = list(range(1 + 4 * at, 5 + 4 * at))
        facts.append(
            ScheduledRequest(
                request_id=f"request-{at}",
                computed_tokens=0,
                end_tokens=64,
                prompt_tokens=64,
                hashes=[block.to_bytes(32, "big") for block in blocks],
                tables=[blocks],
                new_block_ids=[blocks],
                is_new=True,
            )
        )
    with allocated() as nbytes:
        plan = adapter.plan_step(StepFacts(scheduled=tuple(facts)))
        ids = tuple(order.transfer_id for order in plan.saves)
        del plan
        adapter.apply_report(StepReport(rank=0, released=ids, settled_saves=ids))
        del ids
        spent = nbytes()
    store.close()
    return spent / count / KB


def _waiting(count: int) -> float:
    """Return KB per request with one save that waits, in the worker."""
    opened = threading.Event()
    plan = FaultPlan(Fault("reserve", opened.wait, nth=0))
    with tempfile.TemporaryDirectory(prefix="ucm-pipeline-", dir=MEMORY) as home:
        bench = Bench(
            FaultStore(MemoryStore(4, ROWS * KB), plan),
            KB,
            Path(home),
            span_bytes=ROWS * KB,
            config=WIDE,
        )
        keys = [bench.new_keys() for _ in range(count)]
        orders = bench.orders(TransferKind.SAVE, keys, count)
        with bench.running(), contextlib.ExitStack() as stack:
            stack.callback(opened.set)
            with allocated() as nbytes:
                bench.submit(orders)
                bench.taken_in()
                return nbytes() / count / KB


@contextlib.contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """Yield what tells how many bytes Python has allocated since."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
