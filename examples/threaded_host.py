# SPDX-License-Identifier: Apache-2.0
"""
A server with threads and no loop, written from docs/embedding.md alone.

Conversations grow turn by turn, each on any thread. Between turns the server keeps no
blocks: what a turn needs of those before it comes from the cache, also after a restart.
"""

import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ucm

TOKENS, NUM_BLOCKS = 16, 96
POOL = np.zeros((NUM_BLOCKS, TOKENS), np.int64)
LAYOUT = ucm.paged_layout({"kv": POOL[0].nbytes}, block_tokens=TOKENS)
KEYSPACE = ucm.keyspace_of(
    LAYOUT, model="sums", weights="1", kv_dtype="int64", engine="threads 1.0"
)
HASHER = ucm.PrefixHasher(KEYSPACE, TOKENS)
CONFIG = {"store": {"path": "/dev/shm/ucm-chat", "capacity": "4MiB"}}
FREE: queue.SimpleQueue[int] = queue.SimpleQueue()


def turn(cache, tokens: list[int], keys: list[bytes], user: int) -> list[bytes]:  # noqa: ANN001
    """Answer a conversation of which *keys* are known; return those of all its blocks."""
    if keys:
        keys = keys + HASHER.keys(tokens[len(keys) * TOKENS :], after=keys[-1])
    else:
        keys = HASHER.keys(tokens, salt=f"user {user}".encode())
    blocks = [FREE.get() for _ in keys]
    found = cache.match(keys)
    done = cache.load(keys[:found], blocks[:found]).leading
    for at in range(done, len(blocks)):  # the "model": each block needs the one before
        before = POOL[blocks[at - 1], -1] if at else 0
        POOL[blocks[at]] = before + np.cumsum(tokens[at * TOKENS :][:TOKENS])
    assert sum(tokens[: len(keys) * TOKENS]) == POOL[blocks[-1], -1]
    place = ucm.Place(first=done, tenant=user)
    cache.save(keys[done:], blocks[done:], place=place).wait_released()
    for block in blocks:
        FREE.put(block)
    print(f"user {user}: {done} of {len(keys)} blocks loaded\n", end="")
    return keys


for block in range(NUM_BLOCKS):
    FREE.put(block)
opening = ucm.blocking.open(
    CONFIG, layout=LAYOUT, device={"kv": POOL}, keyspace=KEYSPACE
)
with opening as cache, ThreadPoolExecutor(4) as threads:
    known: dict[int, list[bytes]] = {user: [] for user in range(1, 9)}
    for length in (40, 90, 170):  # the last block of a turn is rarely whole
        chats = {user: list(range(user, user + length)) for user in known}
        begun = {u: threads.submit(turn, cache, chats[u], known[u], u) for u in known}
        known = {user: each.result() for user, each in begun.items()}
