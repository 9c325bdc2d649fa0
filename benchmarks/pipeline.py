# SPDX-License-Identifier: Apache-2.0
"""
The whole way from the engine's blocks to a slab in DRAM and back, in spans of 8 MB.

- ``copy``: a runtime saves and loads 4 requests of 4 spans each, 32 rows, blocks in
  random order. Beside it the same calls of store and device without a runtime: a plain
  loop on two threads, which is what the runtime is held against: a copy alone does none of
  a save's work, and spans of 8 MB are too short for one thread to be all that the machine
  can do. For orientation the same bytes are copied into a mapped file, as the slab's is.
  Without checksums the digest is replaced by a constant.
- ``pieces``: the CPU time of loads of 16 MB spans that are verified and copied piece by
  piece, by the size of a piece.
- ``hold``: how long blocks are held from the end of their request's last step, against
  a plain gather of the same blocks; also over stores whose commit is slow.
- ``forward``, ``requests`` and ``memory``: see the modules of these names.

Run ``python -m benchmarks.pipeline``.
"""

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import attrs

from benchmarks.bench import CALL_SPANS, KB, POOL_SPANS, SPAN_BYTES, Bench, on_slab
from benchmarks.forward import measure_forward
from benchmarks.harness import Figure, Scale, Side, Told, compare, main, ratio, speed
from benchmarks.memory import ROWS
from benchmarks.requests import measure_memory, measure_requests
from benchmarks.stores import MEMORY, return_nothing
from ucm.scheduler.messages import TransferKind
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore

# -- copy --------------------------------------------------------------------------


@attrs.frozen
class Shape:
    """
    How an engine's blocks lie.

    Args:
        page_bytes: Of a block in each row.
        block_contiguous: Whether all pages of a block lie together.
    """

    page_bytes: int
    block_contiguous: bool = False


SHAPES = {
    "2 KB": Shape(2 * KB),
    "16 KB": Shape(16 * KB),
    "64 KB": Shape(64 * KB),
    "2 KB block-contiguous": Shape(2 * KB, block_contiguous=True),
    "16 KB block-contiguous": Shape(16 * KB, block_contiguous=True),
}


def measure_copy(name: str, scale: Scale) -> Iterator[Figure]:
    """Measure saves and loads of one shape."""
    shape = SHAPES[name]
    nbytes = CALL_SPANS * SPAN_BYTES
    with on_slab(shape.page_bytes, block_contiguous=shape.block_contiguous) as bench:
        for verb in ("save", "load"):
            case = f"{name}, {verb}"
            sides: dict[str, Side] = {
                "pipeline": getattr(bench, verb),
                "plain loop": getattr(bench, f"loop_{verb}"),
                "mapped file": bench.memcpy,
            }
            times = compare(sides, scale)
            yield ratio(times, "pipeline", "mapped file", case)
            pairs = zip(times["pipeline"], times["plain loop"], strict=True)
            added = [100 * (mine / theirs - 1) for mine, theirs in pairs]
            yield Figure.over(case, "added to the plain loop", "%", added, "<= 25")
            for side in times:
                yield speed(times, side, case, nbytes)
            with (
                mock.patch("ucm.stores.slab._leases.digests_of", return_nothing),
                mock.patch.object(bench.device, "tells_digests", new=False),
            ):
                bench.save(0)()
                times = compare(
                    {"no checksums": sides["pipeline"], "mapped file": bench.memcpy},
                    scale,
                )
            yield ratio(times, "no checksums", "mapped file", case)
            bench.save(0)()


# -- hold --------------------------------------------------------------------------

SLOW_S = 0.02


def _in_memory(home: Path, block_bytes: int) -> Store:
    return SlabStore(
        path=f"{home}/slab",
        capacity_bytes=POOL_SPANS * SPAN_BYTES,
        block_bytes=block_bytes,
    )


def _slow(home: Path, block_bytes: int) -> Store:
    slow = Fault("commit", functools.partial(time.sleep, SLOW_S), nth=0)
    return FaultStore(_in_memory(home, block_bytes), FaultPlan(slow))


STORES: dict[str, Callable[[Path, int], Store]] = {
    "slab in DRAM": _in_memory,
    "slab whose commit takes 20 ms": _slow,
}


def hold_times(
    bench: Bench, num_spans: int, scale: Scale
) -> tuple[list[float], list[float]]:
    """Return how long a request's blocks are held and a gather takes, by sample."""
    numbers = itertools.count(0, num_spans)  # cold memory on either side

    def hold() -> float:
        keys = [bench.new_keys() for _ in range(num_spans)]
        orders = bench.orders(TransferKind.SAVE, keys, 1, first=next(numbers))
        return max(bench.carry_out(orders))

    def gather() -> float:
        return bench.gather(num_spans, first=next(numbers))

    held, copied = [], []
    for _ in range(scale.samples):
        times: dict[Callable[[], float], list[float]] = {gather: [], hold: []}
        for call in (gather, hold, hold, gather):
            times[call] += [call() for _ in range(scale.repeats)]
        held.append(statistics.median(times[hold]))
        copied.append(statistics.median(times[gather]))
    return held, copied


def measure_hold(name: str, scale: Scale) -> Iterator[Figure]:
    """Measure how long blocks are held, for requests of one span and of four."""
    with tempfile.TemporaryDirectory(prefix="ucm-pipeline-", dir=MEMORY) as home:
        store = STORES[name](Path(home), 64 * KB * ROWS)
        bench = Bench(store, 64 * KB, Path(home))
        for number in range(POOL_SPANS):  # touches every slot
            bench.save_span(number, bench.new_keys())
        with bench.running():
            for num_spans in (1, 4):
                held, copied = hold_times(bench, num_spans, scale)
                values = [
                    mine / plain for mine, plain in zip(held, copied, strict=True)
                ]
                case = f"{num_spans} x 8 MB, {name}"
                yield Figure.over(
                    case, "held / plain gather", "ratio", values, "<= 1.2"
                )
                yield Figure.over(case, "held", "ms", [1e3 * each for each in held])


CASES: dict[str, Callable[[Scale], Told]] = {
    **{f"copy {name}": functools.partial(measure_copy, name) for name in SHAPES},
    "forward, one core": functools.partial(measure_forward, 1),
    "forward, both cores": functools.partial(measure_forward, 2),
    "requests": measure_requests,
    "memory": measure_memory,
    **{f"hold {name}": functools.partial(measure_hold, name) for name in STORES},
}


if __name__ == "__main__":
    main("pipeline", CASES)
