# SPDX-License-Identifier: Apache-2.0
"""A host that is meant to be written like this."""

import ucm


async def serve(pool: dict[str, object], tokens: list[int]) -> int:
    """Find, load, save and wait, with the types that a host relies on."""
    layout = ucm.paged_layout({"layer.0": 64}, block_tokens=16)
    keyspace = ucm.keyspace_of(
        layout, model="m", weights="w", kv_dtype="bfloat16", engine="host"
    )
    keys = ucm.PrefixHasher(keyspace, 16).keys(tokens, salt=b"tenant")
    async with ucm.open({}, layout=layout, device=pool, keyspace=keyspace) as cache:
        found: int = await cache.match(keys)
        loaded = await cache.load(keys[:found], range(found))
        save = cache.save(keys, range(len(keys)), place=ucm.Place(first=loaded.leading))
        await save.source_released
        return (await save.committed).leading


def serve_without_a_loop(pool: dict[str, object], keyspace: ucm.KeySpace) -> bool:
    """Do the same without a loop."""
    layout = ucm.paged_layout({"layer.0": 64}, block_tokens=16)
    with ucm.blocking.open({}, layout=layout, device=pool, keyspace=keyspace) as cache:
        save = cache.save([bytes(32)], [0])
        save.wait_released()
        return save.wait_committed().is_whole
