# SPDX-License-Identifier: Apache-2.0
"""
What every store must pass, whether or not it keeps what it is given.

``StoreContract`` adds what a store promises that keeps its blocks. Derive from this
class alone only for a store whose capabilities say that it does not.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ucm.blocks import PackedKey
from ucm.errors import BlockCorruptError, BlockNotFoundError, StoreUnavailableError
from ucm.seals import block_checksum
from ucm.stores.abc import Store
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    make_keys,
    make_keyspace,
    payload,
    save,
)

__all__ = ["NUM_BLOCKS", "LeaseContract"]

NUM_BLOCKS = 8


class LeaseContract(ABC):
    """The promises of a store's leases as tests; 8 blocks of 96 bytes."""

    @abstractmethod
    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a new store with room for exactly *num_blocks*."""

    @abstractmethod
    def get_raw(self, store: Store, key: PackedKey) -> bytes | None:
        """Return the stored bytes of a key, None if the store has none."""

    def audit(self, store: Store) -> list[str]:
        """Return what is wrong inside an open store."""
        return []

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Give each test an empty store of 8 blocks and audit it afterwards."""
        with self.make_store(tmp_path / "store", NUM_BLOCKS) as store:
            yield store
            try:
                store.stats()
            except StoreUnavailableError:
                return  # the test closed it
            assert self.audit(store) == []

    @pytest.mark.parametrize("way", ["discard", "scope", "error"])
    def test_lease_left_open_leaves_nothing(self, store: Store, way: str) -> None:
        """A failed save leaves nothing visible and every slot free (S4-31, X-01)."""
        keys = make_keys(NUM_BLOCKS)
        lease = store.reserve(keys, BLOCK_BYTES)
        fill(lease)
        if way == "discard":
            lease.discard()
        elif way == "scope":
            with lease:
                pass
        else:
            with pytest.raises(ZeroDivisionError), lease:
                raise ZeroDivisionError
        assert store.contains(keys) == [False] * NUM_BLOCKS
        assert all(self.get_raw(store, key) is None for key in keys)
        assert save(store, keys) == NUM_BLOCKS

    def test_checksums_that_are_told_are_compared(self, store: Store) -> None:
        """What a device has read of blocks seals them, and is right at a load."""
        keys = make_keys(3)
        with store.reserve(keys, BLOCK_BYTES) as lease:
            for position, key in enumerate(keys):
                lease.slots.block(position)[:] = np.frombuffer(payload(key), np.uint8)
            told = [block_checksum(key, payload(key)) for key in keys]
            if not lease.takes_digests:
                with pytest.raises(NotImplementedError):
                    lease.seal_with(told)
                return
            with pytest.raises(ValueError, match="2 checksums for 3 blocks"):
                lease.seal_with(told[1:])
            lease.seal_with(told)
            assert lease.seals(0, 3) == told
            assert lease.commit() == 3
        if not store.capabilities.keeps:
            return
        with store.read(keys) as lease:
            lease.verify(0, 3)
            assert lease.seals(0, 3) == told
            if lease.takes_digests:
                lease.verify_with(0, told)
                lease.verify_with(1, told[1:])
                for at, wrong in itertools.product(range(3), (told[0] ^ 1, 0)):
                    with pytest.raises(BlockCorruptError) as caught:
                        lease.verify_with(0, [*told[:at], wrong, *told[at + 1 :]])
                    assert caught.value.key == keys[at]

    def test_one_unsealed_block_holds_back_all(self, store: Store) -> None:
        """For each block of a lease: unless it is sealed, none is visible (X-01)."""
        keys = make_keys(3)
        for missing in range(3):
            with store.reserve(keys, BLOCK_BYTES) as lease:
                for position in range(3):
                    if position != missing:
                        lease.seal(position, position + 1)
                with pytest.raises(ValueError, match="sealed"):
                    lease.commit()
            assert store.contains(keys) == [False] * 3

    @pytest.mark.parametrize("without", [[0], [2, 1], [0, 1, 2, 3]])
    def test_block_left_out_of_a_commit_is_given_back(
        self, store: Store, without: list[int]
    ) -> None:
        """The others become visible, and every other slot is free again (X-01)."""
        keys = make_keys(4)
        kept = [at not in without for at in range(4)]
        with store.reserve(keys, BLOCK_BYTES) as lease:
            fill(lease, without)
            assert lease.commit(without) == sum(kept)
        keeps = store.capabilities.keeps
        assert store.contains(keys) == [keeps and each for each in kept]
        for key, is_kept in zip(keys, kept, strict=True):
            assert self.get_raw(store, key) == (
                payload(key) if keeps and is_kept else None
            )
        assert store.stats().reserved_blocks == 0
        with store.reserve(keys, BLOCK_BYTES) as lease:
            again = range(4) if not keeps else sorted(without)
            assert lease.keys == tuple(keys[at] for at in again)
        with store.reserve(make_keys(NUM_BLOCKS, first=20), BLOCK_BYTES) as lease:
            assert len(lease.keys) == NUM_BLOCKS
            assert len(set(lease.slots.slots.tolist())) == NUM_BLOCKS

    def test_equal_keys_in_one_reservation_are_refused(self, store: Store) -> None:
        """The keys of a reservation are distinct."""
        with pytest.raises(ValueError, match="distinct"):
            store.reserve(make_keys(1) * 2, BLOCK_BYTES)

    def test_key_spaces_round_trip(self, store: Store) -> None:
        """A described key space is told back whole, twice described as once."""
        spaces = [make_keyspace("a/b"), make_keyspace("ü")]
        for space in [*spaces, spaces[0]]:
            store.describe(space)
        assert store.keyspaces() == {space.digest: space for space in spaces}

    def test_verbs_after_close_say_so(self, store: Store) -> None:
        """Every verb of a closed store raises, and closing again does nothing."""
        keys = make_keys(1)
        store.close()
        store.close()
        for verb in (
            lambda: store.match(keys),
            lambda: store.contains(keys),
            lambda: store.touch(keys),
            lambda: store.reserve(keys, BLOCK_BYTES),
            lambda: store.read(keys),
            lambda: store.forget(keys),
            lambda: store.clear(b""),
            lambda: store.describe(make_keyspace()),
            store.keyspaces,
            store.stats,
        ):
            with pytest.raises(StoreUnavailableError):
                verb()

    def test_capabilities_tell_what_is_kept(self, store: Store) -> None:
        """Committed blocks are found by every verb, or by none where none are kept."""
        keys, keeps = make_keys(2), store.capabilities.keeps
        assert save(store, keys) == 2
        assert store.contains(keys) == [keeps, keeps]
        assert store.match(keys) == (2 if keeps else 0)
        assert store.stats().committed_blocks == (2 if keeps else 0)
        if keeps:
            store.read(keys).close()
        else:
            with pytest.raises(BlockNotFoundError):
                store.read(keys)
