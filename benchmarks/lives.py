# SPDX-License-Identifier: Apache-2.0
"""
What a request's life costs: both halves of the connector, hook by hook, in CPU time.

As in ``benchmarks.decode`` 256 requests decode, blocks of 32 tokens become whole, and in
each step three requests begin and three end, of which one goes on with a conversation of
before. An engine is only played, so that nothing but ours is counted. The two halves are
driven by one thread, as in an engine in this process. *Calls* are calls of Python
functions, the same in each run. Run ``python -m benchmarks.lives``; it starts no engine.
"""

import argparse
import cProfile
import gc
import hashlib
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import attrs
import torch

from benchmarks.stores import MEMORY
from ucm.blocks import GroupId, KeySpace, RowId
from ucm.config import UCMConfig
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.integration.vllm.messages import RankHandshake
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout

BLOCK, ROWS, PAGE_BYTES = 32, 4, 16384
RUNNING, PER_STEP = 256, 3
LIFE_STEPS = RUNNING // PER_STEP
POOL = RUNNING * 8
WARM, STEPS, COUNTED = LIFE_STEPS + 20, 300, 50
PAUSE_S = 0.002
SCHEDULER = ("match", "allocated", "plan", "finished", "apply", "stats")
WORKER = {name: name for name in ("fence", "bind", "report", "clear")} | {
    "start_loads": "loads",
    "submit_saves": "saves",
    "finished": "results",
    "stats": "worker's stats",
}

_ROWS = tuple(
    RowLayout(row_id=RowId(at), page_bytes=PAGE_BYTES, layer_names=(f"layer.{at}",))
    for at in range(ROWS)
)
LAYOUT = KVLayout(
    groups=(
        GroupLayout(
            group_id=GroupId(0), kind=GroupKind.FULL, block_tokens=BLOCK, rows=_ROWS
        ),
    ),
    hash_block_tokens=BLOCK,
    engine_tag="benchmark",
)


@attrs.frozen(kw_only=True)
class _Setup(Setup):
    """A setup over a device of this process."""

    def make_device(self, device_type: str) -> Device:
        """Return a device."""
        return CPUDevice(self.num_blocks)


def make_setup(directory: Path, log: dict[str, object]) -> Setup:
    """Return what both halves agree on, over a slab."""
    return _Setup(
        config=UCMConfig.from_mapping(
            {"store": {"path": str(directory), "capacity": "512MiB"}, "log": log}
        ),
        layout=LAYOUT,
        keyspace=KeySpace(
            model="m",
            weights="w",
            kv_dtype="auto",
            layout=LAYOUT.fingerprint(),
            block_tokens=BLOCK,
            parallel="tp=1",
            hash_algorithm="sha256",
            engine="benchmark",
        ),
        num_blocks=POOL,
        recomputes=True,
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


PLACES: Counter[tuple[str, str]] = Counter()


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

    def count(frame: FrameType, event: str, __: object) -> None:
        if event == "call":
            calls[part] += 1
            code = frame.f_code
            PLACES[
                part,
                f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_name}",
            ] += 1

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


def own_cpu() -> dict[str, float]:
    """Return the CPU seconds of our threads by name."""
    spent = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ucm-"):
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            spent[thread.name] = int(stat.split()[0]) / 1e9
    return spent


def measure(log: dict[str, object], *, profile: str, tells_calls: bool) -> None:
    """Print what a life costs."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as home:
        engine = Engine(make_setup(Path(home) / "slab", log))
        engine.run(WARM)
        gc.collect()
        gc.freeze()
        engine.meter.spent.clear()
        before, lives, saved = own_cpu(), engine.lives, engine.saved
        with cProfile.Profile(time.thread_time) if profile else nullcontext() as seen:
            engine.run(STEPS)
        if seen is not None:
            seen.dump_stats(profile)
        spent = {name: at - before.get(name, 0.0) for name, at in own_cpu().items()}
        lives, saved = engine.lives - lives, engine.saved - saved
        taken = {key: list(each) for key, each in engine.meter.spent.items()}
        engine.meter.counts = True
        engine.run(COUNTED)
        engine.worker.close()
        engine.half.close()
    print(f"{STEPS} steps, {lives} lives, {engine.hits} hits, {saved:.0f} blocks")
    print("| part | us a step | us a life | calls a step |\n|---|---|---|---|")
    for names in (SCHEDULER, WORKER.values()):
        tell({each: taken[each] for each in names}, lives, engine.meter.calls)
    spent["*threads*"] = sum(spent.values())
    for name, seconds in sorted(spent.items()):
        a_step, a_block = 1e6 * seconds / STEPS, 1e6 * seconds / saved
        print(f"| {name} | {a_step:.1f} | {a_block:.1f} a block | |")
    for (part, place), count in PLACES.most_common() if tells_calls else ():
        print(f"{part:10} {place:50} {count / COUNTED:.2f}")


def tell(taken: dict[str, list[int]], lives: int, calls: Counter[str]) -> None:
    """Print the parts of one half, and all of them together."""
    rows = {
        name: (
            statistics.fmean(each) / 1e3,
            sum(each) / 1e3 / lives,
            calls[name] / COUNTED,
        )
        for name, each in taken.items()
    }
    sums = tuple(map(sum, zip(*rows.values(), strict=True)))
    for name, row in (*rows.items(), ("*together*", sums)):
        print(f"| {name} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="", help="where to write a profile")
    parser.add_argument("--log", default="", help="a directory of logs")
    parser.add_argument("--calls", action="store_true", help="tell which functions")
    chosen = parser.parse_args()
    measure(
        {"directory": chosen.log} if chosen.log else {},
        profile=chosen.profile,
        tells_calls=chosen.calls,
    )
