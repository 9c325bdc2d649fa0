# SPDX-License-Identifier: Apache-2.0
"""
What a request's life costs: both halves of the connector, hook by hook, in CPU time.

As in ``benchmarks.decode`` 256 requests decode, blocks of 32 tokens become whole, and in
each step three requests begin and three end, of which one in six goes on with a
conversation of before. An engine is only played, on one thread, so that nothing but ours is
counted. *Calls* are calls of Python functions, about the same in each run. Run
``python -m benchmarks.lives``; it starts no engine.
"""

import gc
import hashlib
import itertools
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import attrs
import torch

from benchmarks.decode_side import own_cpu_seconds
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.memory import make_keyspace
from benchmarks.stores import MEMORY
from ucm.config import UCMConfig
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.integration.vllm.messages import RankHandshake
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.prefixes import paged_layout

BLOCK, ROWS, PAGE_BYTES = 32, 4, 16384
RUNNING, PER_STEP = 256, 3
LIFE_STEPS = RUNNING // PER_STEP
POOL = RUNNING * 16
WARM, STEPS, COUNTED = LIFE_STEPS + 20, 300, 50
PAUSE_S = 0.002
CASE = "256 decoding, three begin and end in each step"
"""What it plays."""
SCHEDULER = ("match", "allocated", "plan", "finished", "apply", "stats")
WORKER = {name: name for name in ("fence", "bind", "report", "clear")} | {
    "start_loads": "loads",
    "submit_saves": "saves",
    "finished": "results",
    "stats": "worker's stats",
}

LAYOUT = paged_layout(
    {f"layer.{at}": PAGE_BYTES for at in range(ROWS)}, block_tokens=BLOCK
)


@attrs.frozen(kw_only=True)
class _Setup(Setup):
    """A setup over a device of this process."""

    def make_device(self, device_type: str) -> Device:
        """Return a device."""
        return CPUDevice(self.num_blocks)


def make_setup(directory: Path) -> Setup:
    """Return what both halves agree on, over a slab."""
    return _Setup(
        config=UCMConfig.from_mapping(
            {"store": {"path": str(directory), "capacity": "512MiB"}}
        ),
        layout=LAYOUT,
        keyspace=make_keyspace(LAYOUT),
        num_blocks=POOL,
        recomputes=True,
        adapters=None,
    )


@attrs.define(eq=False)
class Request:
    """vLLM's Request, as far as a connector looks at it."""

    request_id: str
    num_prompt_tokens: int
    table: list[int] = attrs.Factory(list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = attrs.Factory(list)
    tables: tuple[list[int], ...] = ()
    is_waiting: bool = False

    @property
    def left(self) -> int:
        """Tokens that the next step computes."""
        return max(1, self.num_tokens - self.num_computed_tokens)

    def grow(self, tokens: int) -> None:
        """Let it have so many tokens."""
        self.num_tokens = tokens
        while len(self.block_hashes) < tokens // BLOCK:
            before = self.block_hashes[-1] if self.block_hashes else b""
            seed = before + self.request_id.encode()
            self.block_hashes.append(hashlib.sha256(seed).digest())


class Meter:
    """CPU time of this thread by part, and calls of Python functions by part."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = defaultdict(list)
        self.calls: Counter[str] = Counter()
        self.counts = False
        self._now: Counter[str] = Counter()

    def part(self, owner: object, method: str, part: str) -> None:
        """Take the time of a method."""
        call, now = getattr(owner, method), self._now

        def timed(*arguments: object, **named: object) -> object:
            if self.counts:
                sys.setprofile(functions(self.calls, part))
            begun = time.thread_time_ns()
            try:
                return call(*arguments, **named)
            finally:
                now[part] += time.thread_time_ns() - begun
                if self.counts:
                    sys.setprofile(None)

        setattr(owner, method, timed)

    def step(self) -> None:
        """End a step."""
        for part in (*SCHEDULER, *WORKER.values()):
            self.spent[part].append(self._now[part])
        self._now.clear()


def functions(calls: Counter[str], part: str) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that counts calls."""

    def count(_: FrameType, event: str, __: object) -> None:
        calls[part] += event == "call"

    return count


class Engine:
    """
    Plays an engine.

    Args:
        setup: Of both halves.
    """

    def __init__(self, setup: Setup) -> None:
        self.meter = Meter()
        self.worker = WorkerHalf(setup, 0, "cpu")
        pages = torch.ones(ROWS, POOL, PAGE_BYTES, dtype=torch.uint8)
        self.worker.register({f"layer.{at}": pages[at] for at in range(ROWS)})
        self.half = SchedulerHalf(setup)
        self.half.agree([RankHandshake.of(setup.facts(0))])
        for name in SCHEDULER:
            self.meter.part(self.half, name, name)
        for name, part in WORKER.items():
            self.meter.part(self.worker, name, part)
        self._free = list(range(1, POOL))
        self._running: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._kept: dict[str, Request] = {}
        self._loaded: set[str] = set()
        self._ended: list[Request] = []
        self._ids = itertools.count()
        self.lives = self.hits = 0

    def begin(self, *, is_second_turn: bool) -> None:
        """Let a request come."""
        number = next(self._ids)
        request = Request(f"cmpl-{number:032x}-0", 40 + number * 7 % 41)
        if is_second_turn and len(self._ended) > 40:
            before = self._ended[-40]
            request.block_hashes = list(before.block_hashes)
            request.num_prompt_tokens = before.num_tokens + 9
        request.grow(request.num_prompt_tokens)
        self._waiting.append(request)

    def step(self) -> None:
        """Schedule and carry out a step."""
        cached = list(self._running.values())
        new = self._admit()
        counts = {each.request_id: each.left for each in (*cached, *new)}
        plan = self.half.plan(self._output(cached, new, counts))
        for request in (*cached, *new):
            request.num_computed_tokens += counts[request.request_id]
        worker = self.worker
        worker.fence(plan)
        worker.bind(plan)
        worker.start_loads()
        time.sleep(PAUSE_S)  # the forward pass
        worker.submit_saves()
        sent, received, _ = worker.finished()
        report = worker.report()
        worker.clear()
        worker.stats()
        for request in (*cached, *new):
            request.grow(request.num_tokens + 1)
        self._end()
        told = {"finished_sending": sent, "finished_recving": received}
        self.half.apply(SimpleNamespace(kv_connector_worker_meta=report, **told))
        self.half.stats()
        for name in sent:
            self._free += self._kept.pop(name).table
        self._loaded |= received
        self.meter.step()

    def _admit(self) -> list[Request]:
        """Let those run that wait for nothing; order the loads of others."""
        new = []
        for request in self._waiting[:]:
            if request.is_waiting and request.request_id not in self._loaded:
                continue
            if request.is_waiting:
                self._loaded.remove(request.request_id)
                self.half.allocated(request, request.tables, 0)
            elif self._is_parked(request):
                continue
            self._waiting.remove(request)
            self._running[request.request_id] = request
            new.append(request)
        return new

    def _is_parked(self, request: Request) -> bool:
        """Look a request up and give it blocks; return whether it is loaded first."""
        tokens, is_async = self.half.match(request, 0)
        need = -(-(request.num_tokens + LIFE_STEPS + 1) // BLOCK)
        request.table = [self._free.pop() for _ in range(need)]
        request.tables = (request.table,)
        self.half.allocated(request, request.tables, tokens or 0)
        request.num_computed_tokens = tokens or 0
        request.is_waiting = is_async
        self.hits += is_async
        return is_async

    def _output(
        self, cached: list[Request], new: list[Request], counts: dict[str, int]
    ) -> Any:  # noqa: ANN401 - vLLM's SchedulerOutput
        return SimpleNamespace(
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: self._running[name].tables,
                boundary_state_offloads={},
            ),
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.request_id,
                    num_computed_tokens=each.num_computed_tokens,
                    block_ids=each.tables,
                )
                for each in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each.request_id for each in cached],
                resumed_req_ids=set(),
                num_computed_tokens=[each.num_computed_tokens for each in cached],
                new_block_ids=[None] * len(cached),
            ),
            num_scheduled_tokens=counts,
        )

    def _end(self) -> None:
        """End those that have all their tokens."""
        for request in list(self._running.values()):
            if request.num_tokens < request.num_prompt_tokens + LIFE_STEPS:
                continue
            del self._running[request.request_id]
            self._ended.append(request)
            self.lives += 1
            if self.half.finished(request.request_id, request.tables):
                self._kept[request.request_id] = request
            else:
                self._free += request.table

    def run(self, steps: int) -> None:
        """Let so many steps go."""
        for number in range(steps):
            for at in range(PER_STEP):
                self.begin(is_second_turn=at == 0 and number % 2 == 0)
            self.step()

    @property
    def saved(self) -> float:
        """Blocks so far."""
        return self.half.counters.total("ucm_saved_blocks_total")


def measure(scale: Scale) -> Told:
    """Measure what a step costs, and a life, part by part."""
    steps = STEPS // 4 if scale.is_quick else STEPS
    with tempfile.TemporaryDirectory(dir=MEMORY) as home:
        engine = Engine(make_setup(Path(home) / "slab"))
        engine.run(WARM)
        gc.collect()
        gc.freeze()
        spent, saved = own_cpu_seconds(), engine.saved
        rounds = []
        for _ in range(scale.repeats):
            engine.meter.spent.clear()
            lives = engine.lives
            engine.run(steps)
            rounds.append((dict(engine.meter.spent), engine.lives - lives))
        spent = own_cpu_seconds() - spent
        saved = engine.saved - saved
        engine.meter.counts = True
        engine.run(COUNTED)
        engine.worker.close()
        engine.half.close()
    calls = engine.meter.calls
    for half, names in (("scheduler", SCHEDULER), ("worker", tuple(WORKER.values()))):
        for parts in (names, *((name,) for name in names)):
            what = f"{half}, {parts[0] if len(parts) == 1 else 'all hooks'}"
            values = [
                sum(sum(taken[name]) for name in parts) / 1e3 / lives
                for taken, lives in rounds
            ]
            yield Figure.over(CASE, f"{what}, a life", "us", values)
            per_step = sum(calls[name] for name in parts) / COUNTED
            yield Figure.over(CASE, f"{what}, a step", "calls", [per_step])
    yield Figure.over(CASE, "our threads, CPU per block", "ms", [1e3 * spent / saved])


CASES = {CASE: measure}


if __name__ == "__main__":
    main("lives", CASES)
