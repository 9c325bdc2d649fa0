# SPDX-License-Identifier: Apache-2.0
"""A host has them by the names under which the package has registered them."""

from pathlib import Path

import anyio
import numpy as np

import ucm
from ucm.backends.abc import Verdict
from ucm.backends.opening import open_backend
from ucm.registry import load_class
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys


def test_host_finds_blocks_in_the_store_after_a_restart(tmp_path: Path) -> None:
    """Through the device, which counts them, and a store that is asked for by name."""
    pool = {name: np.arange(8 * 64, dtype=np.uint8).reshape(8, 64) for name in "ab"}
    layout = ucm.paged_layout(dict.fromkeys("ab", 64), block_tokens=16)
    keyspace = ucm.keyspace_of(
        layout, model="m", weights="1", kv_dtype="u1", engine="test"
    )
    keys = ucm.PrefixHasher(keyspace, 16).keys(range(64))
    expected = pool["a"][:4].copy()
    config = {
        "store": {"type": "journal", "path": str(tmp_path / "j"), "capacity": "1MiB"}
    }
    for turn in range(2):
        device = load_class("ucm.devices", "metered", "device")(8)
        device.register(layout, pool)
        with ucm.blocking.open(
            config, layout=layout, device=device, keyspace=keyspace
        ) as cache:
            assert 4 * turn == cache.match(keys)
            if turn:
                assert cache.load(keys, range(4, 8)).is_whole
            else:
                assert cache.save(keys, range(4)).wait_committed().is_whole
        assert {"scattered" if turn else "gathered": 4} == device.moved
    assert (expected == pool["a"][4:]).all()


def test_tier_is_opened_by_its_name(tmp_path: Path) -> None:
    """With its settings, as the agent does it."""

    async def main() -> None:
        settings = {"type": "sqlite", "path": str(tmp_path / "x.db")}
        backend = await open_backend(settings, "tiers.0")
        keys = make_keys(2)
        assert await backend.put([seal(key) for key in keys]) == [Verdict.DONE] * 2
        assert await fetch_sound(backend, keys) == [True] * 2
        await backend.aclose()

    anyio.run(main)
