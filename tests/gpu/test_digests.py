# SPDX-License-Identifier: Apache-2.0
"""Checksums that a real GPU computes of blocks in its memory."""

import random

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from tests.gpu.kit import make_host_memory, marks, stall
from ucm.blocks import BlockId
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cuda import CudaDriver
from ucm.plan import HostSlots
from ucm.testing.device_memory import Arrangement, Engine, Nesting

pytestmark = marks
TIMEOUT = 60.0
NUM_BLOCKS = 300


@pytest.mark.parametrize(
    ("pages", "paddings"),
    [
        ((1024,), (0,)),
        ((2048, 1024, 5120), (0, 8, 64)),
        ((18432, 18432), (0, 0)),
        ((65536,) * 5, (0,) * 5),
    ],
    ids=["one chunk", "three tensors", "latents", "many chunks"],
)
def test_a_gpu_tells_the_checksums_of_what_it_copies(pages, paddings):
    """Of blocks drawn at random, both ways, behind a busy stream: xxhash's own."""
    arrangement = Arrangement(
        num_blocks=NUM_BLOCKS,
        nesting=Nesting.STORAGES,
        pages=pages,
        paddings=paddings,
        groups=(tuple(range(len(pages))),),
    )
    engine = Engine(
        arrangement,
        lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device="cuda"),
    )
    device = AcceleratorDevice(CudaDriver(0), NUM_BLOCKS)
    group = engine.layout.groups[0]
    pool = make_host_memory(NUM_BLOCKS * group.block_bytes).reshape(NUM_BLOCKS, -1)
    device.register(engine.layout, engine.kv_caches)
    try:
        assert device.describe()["checksums"] == "device"
        assert device.pin(pool) == ""
        rows = [row.row_id for row in group.rows]
        dice = random.Random(len(pages))
        for memory in engine.memory:
            memory.random_(0, 256)
        for count in (1, 2, 63, 64, 65, 200):
            blocks = [BlockId(b) for b in dice.sample(range(NUM_BLOCKS), count)]
            places = np.array(dice.sample(range(NUM_BLOCKS), count), np.int64)
            slots = HostSlots(pool, places, group.block_bytes)
            seeds = [dice.getrandbits(64) for _ in blocks]
            stall(0.001)
            fence = device.lease()
            assert fence.wait(TIMEOUT)
            saved = device.gather(group.group_id, rows, blocks, slots, seeds)
            assert saved.wait(TIMEOUT)
            wanted = [
                xxh3_64_intdigest(slots.block(at).data, seed)
                for at, seed in enumerate(seeds)
            ]
            assert saved.tells_digests
            assert saved.digests() == wanted
            device.clear(group.group_id, rows, blocks).wait(TIMEOUT)
            loaded = device.scatter(group.group_id, rows, slots, blocks, seeds)
            assert loaded.wait(TIMEOUT)
            assert loaded.digests() == wanted
    finally:
        device.close()
