# SPDX-License-Identifier: Apache-2.0
"""
Speed of ``CPUDevice.gather`` and ``scatter`` as a ratio of memcpy of the same bytes.

Run ``python benchmarks/gather.py [--json] [--busy]``; it takes about 15 s.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.cpu import CPUDevice
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.plan import HostSlots

ROWS, ROUNDS = 32, 6
GROUP = GroupId(0)


class Case(NamedTuple):
    """One shape of memory and spans."""

    name: str
    page_bytes: int
    num_blocks: int
    memory: str
    ids: str
    slot_padding: int


CASES = [
    Case("2 KB", 2048, 256, "layers", "random", 0),
    Case("4 KB", 4096, 128, "layers", "random", 0),
    Case("16 KB", 16384, 32, "layers", "random", 0),
    Case("64 KB", 65536, 8, "layers", "random", 0),
    Case("4 KB, ids in order", 4096, 128, "layers", "ordered", 0),
    Case("2 KB, block-contiguous", 2048, 256, "blocks", "random", 0),
    Case("16 KB, block-contiguous", 16384, 32, "blocks", "random", 0),
    Case("4 KB, one tensor per layer", 4096, 128, "separate", "random", 0),
    Case("16 KB, one tensor per layer", 16384, 32, "separate", "random", 0),
    Case("64 KB, one tensor per layer", 65536, 8, "separate", "random", 0),
    Case("4 KB, padded slots", 4096, 128, "layers", "random", 4096),
    Case("16 KB, padded slots", 16384, 32, "layers", "random", 4096),
    Case("64 KB, padded slots", 65536, 8, "layers", "random", 4096),
]


def make_tensors(memory: str, num_blocks: int, page: int) -> list[torch.Tensor]:
    """Return one ``[num_blocks, page]`` view per row."""
    if memory == "separate":
        return [
            torch.ones(num_blocks, page, dtype=torch.uint8).clone() for _ in range(ROWS)
        ]
    flat = torch.ones(num_blocks * ROWS * page, dtype=torch.uint8)
    if memory == "layers":
        return list(flat.view(ROWS, num_blocks, page))
    return list(flat.view(num_blocks, ROWS, page).unbind(1))


def seconds(call: Callable[[int], object]) -> float:
    """Return the median over spans that share no block."""
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(case: Case, repeats: int) -> dict[str, dict[str, float]]:
    """Measure one case; memcpy, copy, copy, memcpy in turn."""
    page, count = case.page_bytes, case.num_blocks
    num_blocks = count * ROUNDS
    names = [f"layer{number}" for number in range(ROWS)]
    rows = tuple(
        RowLayout(row_id=RowId(number), page_bytes=page, layer_names=(name,))
        for number, name in enumerate(names)
    )
    group = GroupLayout(group_id=GROUP, kind=GroupKind.FULL, block_tokens=16, rows=rows)
    layout = KVLayout(groups=(group,), hash_block_tokens=16, engine_tag="benchmark")
    tensors = make_tensors(case.memory, num_blocks, page)
    device = CPUDevice(num_blocks)
    device.register(layout, dict(zip(names, tensors, strict=True)))
    block = group.block_bytes
    pool = torch.ones(count, block + case.slot_padding, dtype=torch.uint8).numpy()
    slots = HostSlots(pool, np.arange(count), block)
    order = np.arange(num_blocks)
    if case.ids == "random":
        order = np.random.default_rng(0).permutation(num_blocks)
    spans = [list(map(BlockId, span)) for span in order.reshape(ROUNDS, count).tolist()]
    row_ids = [row.row_id for row in rows]
    source = torch.ones(num_blocks * block, dtype=torch.uint8).numpy()
    target = torch.ones(count * block, dtype=torch.uint8).numpy()

    def memcpy(number: int) -> None:
        at = number * count * block
        np.copyto(target, source[at : at + count * block])

    def gather(number: int) -> None:
        device.gather(GROUP, row_ids, spans[number], slots)

    def scatter(number: int) -> None:
        device.scatter(GROUP, row_ids, slots, spans[number])

    result = {}
    for name, call in (("gather", gather), ("scatter", scatter)):
        ratios, speeds = [], []
        for _ in range(repeats):
            before, mine, mine_again, after = map(seconds, (memcpy, call, call, memcpy))
            ratios.append((before + after) / (mine + mine_again))
            speeds.append(2 * count * block / (mine + mine_again) / 1e9)
        result[name] = {
            "of_memcpy": round(statistics.median(ratios), 2),
            "min": round(min(ratios), 2),
            "max": round(max(ratios), 2),
            "gb_per_s": round(statistics.median(speeds), 1),
        }
    device.close()
    return result


def spin() -> None:
    """Run Python for ever, as a busy engine thread does."""
    while True:
        sum(range(1000))


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description="CPUDevice against memcpy")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--busy", action="store_true", help="beside a thread that runs Python"
    )
    args = parser.parse_args()
    if args.busy:
        threading.Thread(target=spin, daemon=True).start()
    results = {case.name: run(case, 3 if args.busy else 9) for case in CASES}
    if args.json:
        print(json.dumps({"busy": args.busy, "cases": results}, indent=1))
        return
    for name, sides in results.items():
        told = ", ".join(
            f"{side} {of['of_memcpy']:.2f} ({of['min']:.2f}-{of['max']:.2f}), "
            f"{of['gb_per_s']:.1f} GB/s"
            for side, of in sides.items()
        )
        print(f"{name:28} {told}")


if __name__ == "__main__":
    main()
