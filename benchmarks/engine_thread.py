# SPDX-License-Identifier: Apache-2.0
"""
What one step costs the engine's threads: 64 requests, 1000 blocks, 32 rows.

Each step saves new blocks, through ``Runtime.submit`` alone (``submit``) and through
all hooks of the worker's half (``hooks``), while something goes on beside it:

- ``idle``: nothing; each step begins when the one before is over;
- ``saturated``: steps come faster than they are saved, so that the queue is full;
- ``busy loop``: the event loop runs Python all the time;
- ``blocked store``: a store that does not answer.

``hooks empty`` is a step that saves nothing, ``hooks decoding`` one that saves a decoded
block of each of twelve requests in one ticket, both with nothing beside them.

Between steps the thread sleeps for 2 ms, as an engine's does while its kernels run.
``scheduler`` measures the other side of the same step: matching, planning, reports.
Run ``python -m benchmarks.engine_thread``.
"""

import asyncio
import contextlib
import functools
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from benchmarks.harness import Figure, Scale, Told, freeze_garbage, latencies, main
from benchmarks.memory import (
    GROUP,
    log_in,
    make_keyspace,
    make_memory,
    make_order,
    running,
)
from benchmarks.scheduler import measure_scheduler
from benchmarks.step import (
    BLOCK_BYTES,
    BLOCKS,
    DIGEST,
    PAGE_BYTES,
    REQUESTS,
    hashes_of,
    sizes,
    spans,
)
from benchmarks.stores import MEMORY
from ucm.blocks import Owner
from ucm.config import UCMConfig
from ucm.devices.abc import Fence
from ucm.devices.cpu import CPUDevice
from ucm.runtime import Runtime
from ucm.scheduler.messages import (
    SpanOrder,
    StepPlan,
    TransferKind,
    encode,
)
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore
from ucm.threads import SYSTEM, Threads
from ucm.tracing import Log

PAUSE_S = 0.002
TARGETS = ("<= 100", "<= 1")
DECODED = 12
"""Blocks that become whole in a step of 256 decoding requests, about."""


# -- what goes on beside it --------------------------------------------------------


class BusyLoop(Threads):
    """Threads whose event loop runs Python all the time, in pieces of about 1 ms."""

    def __init__(self) -> None:
        self._is_busy = True

    def calm(self) -> None:
        """Let the loop rest."""
        self._is_busy = False

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop that is busy from the start."""
        loop = super().event_loop()

        def spin() -> None:
            sum(range(50_000))
            if self._is_busy:
                loop.call_soon(spin)

        loop.call_soon(spin)
        return loop


@attrs.frozen
class Beside:
    """
    What goes on beside the engine's thread.

    Args:
        store: Where saves go.
        threads: Where the runtime's come from.
        waits: Whether a step begins when the one before is over.
        release: Called before the runtime is closed.
    """

    store: Store
    threads: Threads = SYSTEM
    waits: bool = False
    release: Callable[[], None] = lambda: None


def _busy(home: Path) -> Beside:
    threads = BusyLoop()
    return Beside(_slab(home), threads=threads, release=threads.calm)


def _blocked(home: Path) -> Beside:
    opened = threading.Event()

    def stand() -> None:
        opened.wait()

    store = FaultStore(_slab(home), FaultPlan(Fault("reserve", stand, nth=0)))
    return Beside(store, release=opened.set)


def _slab(home: Path) -> Store:
    return SlabStore(
        path=home / "slab",
        capacity_bytes=4 * BLOCKS * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
    )


CONDITIONS: dict[str, Callable[[Path], Beside]] = {
    "idle": lambda home: Beside(_slab(home), waits=True),
    "saturated": lambda home: Beside(_slab(home)),
    "busy loop": _busy,
    "blocked store": _blocked,
}


# -- the worker's side -------------------------------------------------------------


def submit(runtime: Runtime, orders: list[SpanOrder], fence: Fence) -> None:
    """Ask for one step's tickets."""
    runtime.submit(DIGEST, orders, fence)


def measure_submit(name: str, scale: Scale) -> Iterator[Figure]:
    """Measure ``Runtime.submit`` alone."""
    rounds, steps = sizes(scale)
    layout, caches = make_memory(BLOCKS + 1, PAGE_BYTES)
    device = CPUDevice(BLOCKS + 1)
    device.register(layout, caches)
    with tempfile.TemporaryDirectory(dir=MEMORY) as home:
        beside = CONDITIONS[name](Path(home))
        with running(
            beside.store, device, layout, Path(home), threads=beside.threads
        ) as runtime:
            taken: list[list[float]] = []
            freeze_garbage()
            for at in rounds:
                taken.append([])
                for step in steps:
                    orders = _orders(at * len(steps) + step)
                    _pause(beside, runtime)
                    runtime.poll()
                    fence = device.lease(None)
                    start = time.perf_counter()
                    submit(runtime, orders, fence)
                    taken[-1].append(time.perf_counter() - start)
            beside.release()
    yield from latencies(name, "Runtime.submit", taken, TARGETS)


def _orders(step: int) -> list[SpanOrder]:
    return [
        make_order(
            step * REQUESTS + at,
            TransferKind.SAVE,
            request,
            blocks,
            contents.start,
        )
        for at, (request, blocks, contents) in enumerate(spans(step))
    ]


def _pause(beside: Beside, runtime: Runtime) -> None:
    """Let the time of a forward pass go by."""
    time.sleep(PAUSE_S)
    if beside.waits and not runtime.flush(10.0):
        raise TimeoutError("the step before is not over")


HOOKS = (
    "fence, bind",
    "start_loads",
    "submit_saves",
    "finished",
    "report",
    "all hooks",
)


def measure_hooks(
    name: str, scale: Scale, plan_of: Callable[[int], StepPlan], beside_as: str
) -> Iterator[Figure]:
    """
    Measure all hooks of the worker's half, one by one and together.

    Args:
        name: Of the case.
        scale: How much to measure.
        plan_of: Makes the plan of a step, which is counted from 1.
        beside_as: What goes on beside it.
    """
    from ucm.integration.vllm.messages import PlanEnvelope

    rounds, steps = sizes(scale)
    taken: dict[str, list[list[float]]] = {hook: [] for hook in HOOKS}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        beside = CONDITIONS[beside_as](home)
        half = _worker(beside, stack.enter_context(log_in(home)))
        stack.callback(half.close)
        stack.callback(beside.release)
        runtime = half._runtime  # noqa: SLF001 - to wait without polling
        freeze_garbage()
        for at in rounds:
            for each in taken.values():
                each.append([])
            for step in steps:
                envelope = PlanEnvelope(encode(plan_of(at * len(steps) + step + 1)))
                _pause(beside, runtime)
                clock = time.perf_counter
                marks = [clock()]
                half.fence(envelope)
                half.bind(envelope)
                marks.append(clock())
                half.start_loads()
                marks.append(clock())
                half.submit_saves()
                marks.append(clock())
                half.finished()
                half.clear()
                marks.append(clock())
                half.report()
                marks.append(clock())
                spent = [after - before for before, after in _pairs(marks)]
                for hook, seconds in zip(HOOKS, [*spent, sum(spent)], strict=True):
                    taken[hook][-1].append(seconds)
    for hook in HOOKS:
        targets = TARGETS if hook == "submit_saves" else ("", "")
        if (name, hook) == ("empty", "all hooks"):
            targets = ("<= 50", "")
        yield from latencies(name, hook, taken[hook], targets)


def _pairs(marks: list[float]) -> Iterator[tuple[float, float]]:
    return itertools.pairwise(marks)


def _empty_plan(step: int) -> StepPlan:
    return StepPlan(step=step, keyspace_digest=DIGEST)


def _decoding_plan(step: int) -> StepPlan:
    save = SpanOrder(
        transfer_id=step,
        kind=TransferKind.SAVE,
        owners=tuple(Owner(f"request-{at}", 1, 1) for at in range(DECODED)),
        group_id=GROUP,
        block_ids=tuple(range(1, 1 + DECODED)),
        hashes=b"".join(hashes_of(range(step * DECODED, (step + 1) * DECODED))),
    )
    return StepPlan(step=step, keyspace_digest=DIGEST, saves=(save,))


def _plan(step: int) -> StepPlan:
    saves = tuple(
        SpanOrder(
            transfer_id=step * REQUESTS + at,
            kind=TransferKind.SAVE,
            owners=(Owner(request, generation=step, num_blocks=len(blocks)),),
            group_id=GROUP,
            block_ids=tuple(blocks),
            hashes=b"".join(hashes_of(contents)),
        )
        for at, (request, blocks, contents) in enumerate(spans(step))
    )
    return StepPlan(step=step, keyspace_digest=DIGEST, saves=saves)


def _worker(beside: Beside, log: Log):  # noqa: ANN202 - the door is imported late
    from ucm.integration.vllm.setup import Setup
    from ucm.integration.vllm.worker import WorkerHalf

    @attrs.frozen(kw_only=True)
    class LocalSetup(Setup):
        def open_store(self, *, index_only: bool) -> Store:
            return beside.store

        def open_log(self, role: str) -> Log:
            return log

    layout, caches = make_memory(BLOCKS + 1, PAGE_BYTES)
    setup = LocalSetup(
        config=UCMConfig(),
        layout=layout,
        keyspace=make_keyspace(layout),
        num_blocks=BLOCKS + 1,
        recomputes=True,
        threads=beside.threads,
    )
    half = WorkerHalf(setup, 0, "cpu")
    half.register(caches)
    return half


CASES: dict[str, Callable[[Scale], Told]] = {
    **{
        f"submit {name}": functools.partial(measure_submit, name) for name in CONDITIONS
    },
    **{
        f"hooks {name}": functools.partial(
            measure_hooks, name, plan_of=_plan, beside_as=name
        )
        for name in CONDITIONS
    },
    "hooks empty": functools.partial(
        measure_hooks, "empty", plan_of=_empty_plan, beside_as="idle"
    ),
    "hooks decoding": functools.partial(
        measure_hooks, "decoding", plan_of=_decoding_plan, beside_as="idle"
    ),
    "scheduler": measure_scheduler,
}


if __name__ == "__main__":
    main("engine_thread", CASES)
