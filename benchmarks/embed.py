# SPDX-License-Identifier: Apache-2.0
"""
For how long the library holds the loop of a host that saves under load.

Each callback on the host's loop is timed while a hundred requests a second save some
blocks and await both moments, and a heartbeat beats beside them: in wall time, which
counts what other threads and processes take meanwhile, and in CPU time of the loop's
thread. The control awaits as much and saves nothing. Run ``python -m benchmarks.embed``;
it takes a minute.
"""

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

import ucm
from ucm.cache.aio import Cache

LAYERS, NUM_BLOCKS, TOKENS = 8, 1024, 16
SAVE, REQUEST = "save()", "request"
TARGET_US = 100.0

_Spent = tuple[float, float]


class Watch:
    """Times what runs on the loop, by kind, and how late a heartbeat is."""

    def __init__(self) -> None:
        self.held: list[_Spent] = []
        self.calls: list[_Spent] = []
        self.late: list[float] = []

    def watched(self, call: Callable[..., object], into: list[_Spent]) -> object:
        """Call and note wall and CPU time."""
        wall, own = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            spent = time.perf_counter() - wall, time.thread_time() - own
            into.append(spent)

    async def beat(self) -> None:
        """Note by how much each of many short sleeps is too long."""
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late.append(time.perf_counter() - due)


async def measure(
    request: Callable[[int, Watch], Awaitable[None]], seconds: float, per_second: int
) -> Watch:
    """Return what was seen while requests come at a rate."""
    watch = Watch()
    run = asyncio.events.Handle._run  # noqa: SLF001 - what a loop calls
    host = threading.get_ident()

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() == host:
            watch.watched(partial(run, handle), watch.held)
        else:
            run(handle)  # the library's own loop

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(watch.beat())
        asyncio.events.Handle._run = timed  # type: ignore[method-assign] # noqa: SLF001
        for number in range(int(seconds * per_second)):
            group.create_task(request(number, watch))
            await asyncio.sleep(1 / per_second)
        asyncio.events.Handle._run = run  # type: ignore[method-assign] # noqa: SLF001
        beating.cancel()
    return watch


def tell(name: str, samples: list[_Spent]) -> None:
    """Print percentiles in microseconds."""
    wall, own = (np.array(each) * 1e6 for each in zip(*samples, strict=True))
    for kind, values in (("wall", wall), ("cpu", own)):
        p50, p90, p99, worst = np.percentile(values, [50, 90, 99, 100])
        print(
            f"{name:28} {kind:5} n={len(values):6} p50={p50:7.1f} p90={p90:7.1f} "
            f"p99={p99:7.1f} max={worst:8.1f} us"
        )


async def embed(blocks: int, seconds: float, per_second: int, path: str) -> None:
    """Measure one size of request."""
    shape = (NUM_BLOCKS, 2, TOKENS, 64)
    pool = {f"layer.{at}": np.ones(shape, np.uint8) for at in range(LAYERS)}
    nbytes = {name: array[0].nbytes for name, array in pool.items()}
    layout = ucm.paged_layout(nbytes, block_tokens=TOKENS)
    told = {"model": "m", "weights": "w", "kv_dtype": "uint8", "engine": "bench"}
    keyspace = ucm.keyspace_of(layout, **told)
    config = {
        "store": {"path": path, "capacity": "256MiB"},
        "log": {"level": "warning"},
    }
    prompts = [
        [number.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(blocks)]
        for number in range(int(seconds * per_second))
    ]
    ends = {"whole": 0, "other": 0}

    async def save(cache: Cache, number: int, watch: Watch) -> None:
        keys = prompts[number]
        first = number * blocks % (NUM_BLOCKS - blocks)
        call = partial(cache.save, keys, range(first, first + blocks))
        saved = watch.watched(call, watch.calls)
        await saved.source_released  # type: ignore[attr-defined]
        end = await saved.committed  # type: ignore[attr-defined]
        ends["whole" if end.is_whole else "other"] += 1

    async def nothing(number: int, watch: Watch) -> None:
        for _ in range(2):
            await asyncio.sleep(0.002)

    async with ucm.open(config, layout=layout, device=pool, keyspace=keyspace) as cache:
        control = await measure(nothing, seconds, per_second)
        watch = await measure(partial(save, cache), seconds, per_second)
    print(f"{blocks} blocks a save, {per_second} a second: {ends}")
    tell("save() itself", watch.calls)
    tell("callbacks, saving", watch.held)
    tell("callbacks, control", control.held)
    for name, seen in (("saving", watch), ("control", control)):
        p50, p99 = np.percentile(np.array(seen.late) * 1e6, [50, 99])
        print(f"heartbeat late, {name:12} p50={p50:8.1f} p99={p99:8.1f} us")
    p99 = float(np.percentile([own * 1e6 for _, own in watch.held], 99))
    verdict = "met" if p99 <= TARGET_US else "missed"
    print(f"target: p99 of callbacks at most {TARGET_US} us of CPU: {verdict}\n")


def main() -> None:
    """Measure requests of few and of many blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--per-second", type=int, default=100)
    given = parser.parse_args()
    for blocks in (4, 64):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            asyncio.run(embed(blocks, given.seconds, given.per_second, path))


if __name__ == "__main__":
    main()
