# SPDX-License-Identifier: Apache-2.0
"""A save and a load through the library, in a store of its own that goes again."""

import tempfile
import time
from pathlib import Path

import attrs
import numpy as np

import ucm
from ucm.blocking import open as open_cache
from ucm.config import LogConfig, StoreConfig, UCMConfig
from ucm.doctor.findings import Finding, fine, wrong
from ucm.errors import UCMError

__all__ = ["try_round_trip"]

_LAYERS, _BLOCKS, _TOKENS, _WIDTH = 4, 8, 16, 64
_CAPACITY = 4 << 20
_CHECK = "round trip"
_REMEDY = "Read the message; the engine would meet the same."


def try_round_trip(directory: Path) -> Finding:
    """
    Save blocks and load them into others.

    Args:
        directory: Where a temporary store is made, and removed again.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="ucm-doctor-", dir=directory) as made:
            start = time.perf_counter()
            problem = _round_trip(Path(made) / "store")
            taken = time.perf_counter() - start
    except (UCMError, OSError) as exc:
        return wrong(_CHECK, f"a store in {directory} failed: {exc}", _REMEDY)
    if problem:
        return wrong(_CHECK, f"in {directory} {problem}", _REMEDY)
    return fine(
        _CHECK,
        f"saved and loaded {_BLOCKS} blocks in {directory}: {taken * 1000:.0f} ms",
    )


def _round_trip(path: Path) -> str:
    """Return what went wrong; empty if nothing did."""
    shape = (2 * _BLOCKS, _TOKENS, _WIDTH)
    pool = {
        f"layer.{at}": np.random.default_rng(at).integers(0, 256, shape, np.uint8)
        for at in range(_LAYERS)
    }
    layout = ucm.paged_layout(
        {name: each[0].nbytes for name, each in pool.items()}, block_tokens=_TOKENS
    )
    keyspace = ucm.keyspace_of(
        layout, model="doctor", weights="1", kv_dtype="uint8", engine="doctor"
    )
    keys = ucm.PrefixHasher(keyspace, _TOKENS).keys(range(_BLOCKS * _TOKENS))
    store = StoreConfig(path=str(path), capacity=_CAPACITY)
    config = UCMConfig(store=store, log=LogConfig(level="off"))
    with open_cache(config, layout=layout, device=pool, keyspace=keyspace) as cache:
        saved = cache.save(keys, list(range(_BLOCKS))).wait_committed()
        if saved.leading < _BLOCKS:
            return (
                f"{saved.leading} of {_BLOCKS} blocks were saved: {attrs.asdict(saved)}"
            )
        loaded = cache.load(keys, list(range(_BLOCKS, 2 * _BLOCKS)))
        if loaded.leading < _BLOCKS:
            return f"{loaded.leading} of {_BLOCKS} blocks were loaded"
    same = all(np.array_equal(p[:_BLOCKS], p[_BLOCKS:]) for p in pool.values())
    return "" if same else "what was loaded is not what was saved"
