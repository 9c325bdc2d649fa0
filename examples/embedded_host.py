# SPDX-License-Identifier: Apache-2.0
"""
A server without an engine, with a cache of its blocks: written from docs/embedding.md.

Its "model" adds up tokens: each block depends on all before it, each answer is checked.
Run ``python examples/embedded_host.py``; the second time finds what the first stored.
"""

import asyncio

import numpy as np

import ucm

LAYERS, NUM_BLOCKS, TOKENS = 4, 64, 16
POOL = {f"layer.{at}": np.zeros((NUM_BLOCKS, TOKENS), np.int64) for at in range(LAYERS)}
LAYOUT = ucm.paged_layout(
    {name: each[0].nbytes for name, each in POOL.items()}, block_tokens=TOKENS
)
KEYSPACE = ucm.keyspace_of(
    LAYOUT, model="sums", weights="1", kv_dtype="int64", engine="example"
)
HASHER = ucm.PrefixHasher(KEYSPACE, TOKENS)
CONFIG = {"store": {"path": "/dev/shm/ucm-host", "capacity": "4MiB"}}


def compute(tokens: list[int], blocks: list[int], done: int) -> None:
    """Fill the blocks behind the first *done*, which must be right."""
    for at in range(done, len(blocks)):
        for layer, pages in enumerate(POOL.values()):
            before = pages[blocks[at - 1], -1] if at else layer
            pages[blocks[at]] = before + np.cumsum(tokens[at * TOKENS :][:TOKENS])


async def answer(cache, tokens: list[int], blocks: list[int]) -> None:  # noqa: ANN001
    """Serve one prompt: load what is stored, compute the rest, save that."""
    keys = HASHER.keys(tokens, salt=b"tenant 1")
    found = await cache.match(keys)
    done = (await cache.load(keys[:found], blocks[:found])).leading
    compute(tokens, blocks, done)
    save = cache.save(keys[done:], blocks[done:], place=ucm.Place(first=done))
    assert sum(tokens) == POOL["layer.0"][blocks[-1], -1]
    await save.source_released  # from here on the blocks are free
    print(f"{len(blocks)} blocks, {done} loaded, answer {sum(tokens)}")


async def main() -> None:
    """Serve prompts that share a beginning, two at a time."""
    async with ucm.open(CONFIG, layout=LAYOUT, device=POOL, keyspace=KEYSPACE) as cache:
        for turn in range(3):
            prompts = [list(range(64 + 32 * turn)) + [turn] * 16, [turn] * 80]
            async with asyncio.TaskGroup() as group:
                for at, tokens in enumerate(prompts):
                    blocks = list(range(at * 32, at * 32 + len(tokens) // TOKENS))
                    group.create_task(answer(cache, tokens, blocks))
        print(await cache.statistics())


asyncio.run(main())
