# SPDX-License-Identifier: Apache-2.0
"""What a host may not write: mistakes that cost a block, seen before they run."""

from ucm.cache.aio import Cache


async def serve(cache: Cache) -> int:
    """Make some mistakes."""
    save = cache.save(["text"], [0])  # error: list-item
    await cache.retain([b"key"])  # error: call-arg
    repr(save.committed.leading)  # error: attr-defined
    return await cache.load([b"key"], [0])  # error: return-value
