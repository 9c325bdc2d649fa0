# SPDX-License-Identifier: Apache-2.0
"""Damage of a slab is what it says, and a store notices it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ucm.errors import BlockCorruptError
from ucm.stores.slab import SlabStore
from ucm.testing.slab_damage import Damage, damage, drop, stored, unsound
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, save


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlabStore]:
    """A slab with three blocks."""
    path = str(tmp_path / "slab")
    with SlabStore(path=path, capacity_bytes=1 << 20, block_bytes=BLOCK_BYTES) as store:
        save(store, make_keys(3))
        yield store


@pytest.mark.parametrize("how", [Damage.BITS, Damage.EXCHANGED])
def test_damaged_blocks_are_those_that_were_chosen(
    store: SlabStore, tmp_path: Path, how: Damage
) -> None:
    """Two of three are not what they were, and the store says so of both."""
    keys = make_keys(3)
    assert 2 == damage(tmp_path / "slab", how, keys[1:])
    assert 2 == len(unsound(tmp_path / "slab"))
    assert 1 == len(load(store, keys[:1]))
    for key in keys[1:]:
        with pytest.raises(BlockCorruptError):
            load(store, [key])


def test_dropped_block_is_the_only_one_that_is_gone(
    store: SlabStore, tmp_path: Path
) -> None:
    """Its neighbours stay, and are as they were."""
    keys = make_keys(3)
    assert set(keys) == stored(tmp_path / "slab")
    assert 1 == drop(tmp_path / "slab", keys[1:2])
    assert [True, False, True] == store.contains(keys)
    assert [] == unsound(tmp_path / "slab")


@pytest.mark.usefixtures("store")
def test_damage_without_enough_blocks_is_refused(tmp_path: Path) -> None:
    """Nothing would be damaged, and a test would pass for that reason."""
    with pytest.raises(ValueError, match="1 blocks, too few"):
        damage(tmp_path / "slab", Damage.EXCHANGED, make_keys(1))
    with pytest.raises(ValueError, match="0 blocks, too few"):
        damage(tmp_path / "slab", Damage.BITS, [])
