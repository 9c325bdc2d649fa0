# SPDX-License-Identifier: Apache-2.0
"""
For how long the library holds the loop of a host that saves under load.

Each callback on the host's loop is timed while a hundred or a thousand requests a second save
some blocks and await both moments, and a heartbeat beats beside them: in CPU time of the loop's
thread, since wall time counts what other threads and processes take meanwhile. *Without saves*
as much is awaited and nothing done, and *a bare wake* is a request that does nothing but wake a
waiting thread, as each save must that finds the library's own asleep: what a machine takes for
that no library can save. All are measured in turn. Where little goes on, the CPU has
forgotten the way of a save by the next one, which takes ten times as long then as amid others.
Run ``python -m benchmarks.embed``.
"""

import asyncio
import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np

import ucm
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.stores import MEMORY
from ucm.cache.aio import Cache

LAYERS, NUM_BLOCKS, TOKENS = 8, 1024, 16


class Watch:
    """Times what runs on the loop, by kind, and how late a heartbeat is; in seconds."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.calls: list[float] = []
        self.late: list[float] = []

    def watched(self, call: Callable[..., object], into: list[float]) -> object:
        """Call and note the CPU time."""
        before = time.thread_time()
        try:
            return call()
        finally:
            into.append(time.thread_time() - before)

    async def beat(self) -> None:
        """Note by how much each of many short sleeps is too long."""
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late.append(time.perf_counter() - due)


async def measure(
    request: Callable[[int, Watch], Coroutine[Any, Any, None]],
    numbers: range,
    per_second: int,
) -> Watch:
    """Return what was seen while requests come at a rate."""
    watch = Watch()
    run = asyncio.events.Handle._run  # noqa: SLF001 - what a loop calls
    host = threading.get_ident()

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() == host:
            watch.watched(functools.partial(run, handle), watch.held)
        else:
            run(handle)  # the library's own loop

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(watch.beat())
        asyncio.events.Handle._run = timed  # type: ignore[assignment,method-assign] # noqa: SLF001
        for number in numbers:
            group.create_task(request(number, watch))
            await asyncio.sleep(1 / per_second)
        asyncio.events.Handle._run = run  # type: ignore[method-assign] # noqa: SLF001
        beating.cancel()
    return watch


@contextlib.contextmanager
def waiting_thread() -> Iterator[int]:
    """Have a thread wait for the number that is written to this descriptor; 2**63 ends it."""
    fd = os.eventfd(0)

    def wait() -> None:
        while os.eventfd_read(fd) < 1 << 63:
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield fd
    finally:
        os.eventfd_write(fd, 1 << 63)
        thread.join()
        os.close(fd)


async def embed(
    blocks: int, per_second: int, scale: Scale, path: str
) -> list[tuple[Watch, Watch, Watch]]:
    """Return what was seen without saves, with a bare wake, and with saves, in turn."""
    shape = (NUM_BLOCKS, 2, TOKENS, 64)
    pool = {f"layer.{at}": np.ones(shape, np.uint8) for at in range(LAYERS)}
    nbytes = {name: array[0].nbytes for name, array in pool.items()}
    layout = ucm.paged_layout(nbytes, block_tokens=TOKENS)
    told: Any = {"model": "m", "weights": "w", "kv_dtype": "uint8", "engine": "bench"}
    keyspace = ucm.keyspace_of(layout, **told)
    config = {
        "store": {"path": path, "capacity": "256MiB"},
        "log": {"level": "warning"},
    }
    each = per_second * (1 if scale.is_quick else 5)
    prompts = [
        [number.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(blocks)]
        for number in range(scale.samples * each)
    ]

    async def save(cache: Cache, number: int, watch: Watch) -> None:
        keys = prompts[number]
        first = number * blocks % (NUM_BLOCKS - blocks)
        call = functools.partial(cache.save, keys, range(first, first + blocks))
        saved = watch.watched(call, watch.calls)
        await saved.source_released  # type: ignore[attr-defined]
        end = await saved.committed  # type: ignore[attr-defined]
        if not end.is_whole:
            raise AssertionError(end)

    async def nothing(number: int, watch: Watch) -> None:
        for _ in range(2):
            await asyncio.sleep(0.002)

    async def wake(fd: int, number: int, watch: Watch) -> None:
        watch.watched(functools.partial(os.eventfd_write, fd, 1), watch.calls)
        await nothing(number, watch)

    seen = []
    with waiting_thread() as fd:
        async with ucm.open(
            config, layout=layout, device=pool, keyspace=keyspace
        ) as cache:
            requests = (
                nothing,
                functools.partial(wake, fd),
                functools.partial(save, cache),
            )
            for start in range(0, len(prompts), each):
                numbers = range(start, start + each)
                one, two, three = [
                    await measure(request, numbers, per_second) for request in requests
                ]
                seen.append((one, two, three))
    return seen


def measured(blocks: int, per_second: int, scale: Scale) -> Told:
    """Tell of requests of one size, at one rate."""
    case = f"{blocks} blocks a save, {per_second} a second"
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        seen = asyncio.run(embed(blocks, per_second, scale, path))

    def figure(
        what: str, samples: list[list[float]], share: int, target: str = ""
    ) -> Figure:
        values = [float(np.percentile(each, share)) * 1e6 for each in samples]
        return Figure.over(case, f"{what}, p{share}", "us", values, target)

    without, wakes, with_ = zip(*seen, strict=True)
    held = [watch.held for watch in with_]
    yield figure("callbacks", held, 50)
    yield figure("callbacks", held, 99, "<= 100")
    yield figure("callbacks without saves", [watch.held for watch in without], 99)
    yield figure("callbacks with a bare wake", [watch.held for watch in wakes], 99)
    for share in (50, 99):
        yield figure("save()", [watch.calls for watch in with_], share)
        yield figure("a bare wake", [watch.calls for watch in wakes], share)
    for what, some in (("heartbeat", with_), ("heartbeat without saves", without)):
        yield figure(f"{what} late", [watch.late for watch in some], 99)


CASES = {
    "few": functools.partial(measured, 4, 100),
    "many": functools.partial(measured, 64, 100),
    "often": functools.partial(measured, 4, 1000),
}


if __name__ == "__main__":
    main("embed", CASES)
