# SPDX-License-Identifier: Apache-2.0
"""
A host with stages of its own in the chain of each save: written from docs/embedding.md.

One keeps blocks of nothing but zeros out of the store, one counts what passes. Run
``python examples/own_stage.py``.
"""

import tempfile

import numpy as np

import ucm
from ucm.pipeline.save import OwnStage, Sealed, sealed_blocks
from ucm.pipeline.stage import Chain

POOL = {"layer": np.zeros((8, 16, 4), np.float32)}
LAYOUT = ucm.paged_layout({"layer": POOL["layer"][0].nbytes}, block_tokens=16)
KEYSPACE = ucm.keyspace_of(
    LAYOUT, model="none", weights="1", kv_dtype="float32", engine="example"
)


class NoZeros(OwnStage):
    """Fails a save that has a block of zeros: the host forgot to compute it."""

    name = "no_zeros"

    def run(self, given: Sealed) -> Sealed:
        """Look at each block, on the store's thread."""
        for key, block in sealed_blocks(given):
            if not block.any():
                raise ValueError(f"block {key.hex()[-8:]} was never computed")
        return given


class Count(OwnStage):
    """Adds up what the stages before it have let pass."""

    name = "count"
    total = 0

    def run(self, given: Sealed) -> Sealed:
        """Add up."""
        self.total += sum(block.nbytes for _, block in sealed_blocks(given))
        return given


count = Count()
keys = ucm.PrefixHasher(KEYSPACE, 16).keys(range(64))
with (
    tempfile.TemporaryDirectory(dir="/dev/shm") as path,
    ucm.blocking.open(
        {"store": {"path": f"{path}/slab", "capacity": "1MiB"}},
        layout=LAYOUT,
        device=POOL,
        keyspace=KEYSPACE,
        before_commit=Chain.start(NoZeros()).then(count),
    ) as cache,
):
    POOL["layer"][:2] = 1.0
    for part in (slice(0, 2), slice(2, 4)):
        end = cache.save(keys[part], range(4)[part]).wait_committed()
        print(
            f"{end.kind.value}, {cache.match(keys)} found, {count.total} bytes counted"
        )
