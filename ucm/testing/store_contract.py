# SPDX-License-Identifier: Apache-2.0
"""
What every store must pass: derive a class from ``StoreContract`` and run it by pytest.

An author says how a store is made and gives two bypasses, which reach the bytes
without the store's own verbs: a store that writes and reads the same wrong place
would otherwise agree with itself.
"""

import contextlib
import threading
from abc import abstractmethod
from pathlib import Path

import attrs
import numpy as np
import pytest

from ucm.blocks import PackedKey, keyspace_prefix
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    LeaseExpiredError,
    StoreError,
)
from ucm.seals import block_checksum
from ucm.stores.abc import Store, StoreGrowth
from ucm.testing.lease_contract import NUM_BLOCKS
from ucm.testing.room_contract import RoomContract
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    make_keyspace,
    payload,
    save,
)

__all__ = ["StoreContract"]

_LIMIT_S = 60.0


class StoreContract(RoomContract):
    """The promises of ``ucm.stores.abc.Store`` as tests; 8 blocks of 96 bytes."""

    @abstractmethod
    def put_raw(self, store: Store, key: PackedKey, data: bytes) -> None:
        """Overwrite the stored bytes of a committed key and nothing else."""

    def reopen(self, directory: Path, num_blocks: int) -> Store | None:
        """Return the store that was closed, opened again; None if it is not durable."""
        return None

    # -- visibility --------------------------------------------------------------

    def test_uncommitted_blocks_are_invisible(self, store: Store) -> None:
        """A block is seen by no verb before its lease is committed."""
        keys = make_keys(2)
        with store.reserve(keys, BLOCK_BYTES) as lease:
            fill(lease)
            assert store.match(keys) == 0
            assert store.contains(keys) == [False, False]
            with pytest.raises(BlockNotFoundError):
                store.read(keys)
            assert lease.commit() == 2
        assert store.match(keys) == 2
        assert [payload(key) for key in keys] == load(store, keys)

    def test_committed_bytes_are_found_by_the_bypass(self, store: Store) -> None:
        """What was written to the lease's slots is what the store has kept."""
        keys = make_keys(3)
        save(store, keys)
        for key in keys:
            assert self.get_raw(store, key) == payload(key)
        assert self.get_raw(store, make_keys(1, first=9)[0]) is None

    def test_match_stops_at_the_first_gap(self, store: Store) -> None:
        """Only blocks from the start without a gap count as matched."""
        keys = make_keys(4)
        save(store, [keys[0], keys[1], keys[3]])
        assert store.match(keys) == 2
        assert store.match(keys[2:]) == 0
        assert store.match([]) == 0
        assert store.contains(keys) == [True, True, False, True]

    # -- leases ------------------------------------------------------------------

    def test_second_commit_is_refused(self, store: Store) -> None:
        """A lease commits once, also one that was granted nothing."""
        for _ in range(2):
            lease = store.reserve(make_keys(1), BLOCK_BYTES)
            fill(lease)
            lease.commit()
            with pytest.raises(LeaseExpiredError):
                lease.commit()
            with pytest.raises(LeaseExpiredError):
                lease.seal(0, 1)
        assert store.match(make_keys(1)) == 1

    def test_second_discard_does_nothing(self, store: Store) -> None:
        """A lease gives its slots back once, even when they serve another since."""
        keys = make_keys(NUM_BLOCKS)
        first = store.reserve(keys, BLOCK_BYTES)
        first.discard()
        with store.reserve(keys, BLOCK_BYTES) as second:
            first.discard()
            with pytest.raises(LeaseExpiredError):
                first.commit()
            fill(second)
            assert second.commit() == NUM_BLOCKS
            second.discard()
        assert store.match(keys) == NUM_BLOCKS

    def test_stored_keys_are_not_granted_again(self, store: Store) -> None:
        """A reservation leaves out what is stored and says which it granted."""
        keys = make_keys(4)
        save(store, [keys[0], keys[2]])
        with store.reserve(keys, BLOCK_BYTES) as lease:
            assert lease.keys == (keys[1], keys[3])
            assert (lease.positions, lease.num_stored) == ((1, 3), 2)
            assert len(lease.slots) == 2
        with store.reserve([keys[0]], BLOCK_BYTES) as lease:
            assert (lease.keys, lease.commit()) == ((), 0)

    def test_keys_being_written_are_not_granted_again(self, store: Store) -> None:
        """Two writers never hold a slot for one key at the same time (X-02)."""
        keys = make_keys(2)
        with store.reserve(keys[:1], BLOCK_BYTES) as first:
            with store.reserve(keys, BLOCK_BYTES) as second:
                assert (second.keys, second.num_stored) == ((keys[1],), 1)
            fill(first)
            assert first.commit() == 1
        with store.reserve(keys, BLOCK_BYTES) as third:
            assert third.keys == (keys[1],)

    def test_threads_that_write_one_key_store_it_once(self, store: Store) -> None:
        """Of many threads that save the same keys, one commits each key."""
        keys = make_keys(4)
        counts: list[int] = []
        start = threading.Barrier(4)

        def write() -> None:
            start.wait(60)
            counts.append(save(store, keys))

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(counts) == 4
        assert [payload(key) for key in keys] == load(store, keys)

    def test_capabilities_tell_the_truth(self, store: Store) -> None:
        """A block of the largest size is stored, one byte more or none is refused."""
        largest = store.capabilities.max_block_bytes
        keys = make_keys(1)
        assert save(store, keys, largest) == 1
        assert [payload(keys[0], largest)] == load(store, keys)
        for wrong in (largest + 1, 0):
            with pytest.raises(ValueError, match="bytes"):
                store.reserve(make_keys(1, first=1), wrong)

    # -- wrong bytes -------------------------------------------------------------

    def test_missing_key_refuses_the_whole_read(self, store: Store) -> None:
        """A read opens all blocks or none, and names the one that is missing."""
        keys = make_keys(3)
        save(store, keys[:2])
        with pytest.raises(BlockNotFoundError) as caught:
            store.read(keys)
        assert caught.value.key == keys[2]

    @pytest.mark.parametrize("position", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
    def test_flipped_bit_is_corrupt(self, store: Store, position: int) -> None:
        """A single wrong bit anywhere in a block is noticed before it is used."""
        keys = make_keys(2)
        save(store, keys)
        wrong = bytearray(payload(keys[1]))
        wrong[position] ^= 1
        self.put_raw(store, keys[1], bytes(wrong))
        with store.read(keys) as lease:
            lease.verify(0, 1)
            with pytest.raises(BlockCorruptError) as caught:
                lease.verify(0, 2)
        assert caught.value.key == keys[1]

    def test_each_block_of_a_read_is_verified(self, store: Store) -> None:
        """Wherever it stands, and each time that it was stored: one that was right is no proof."""
        keys = make_keys(5)
        assert save(store, keys) == len(load(store, keys))
        for at, key in enumerate(keys):
            store.forget([key])
            save(store, [key])
            self.put_raw(store, key, payload(make_keys(1, first=9)[0]))
            with store.read(keys) as lease:
                for start in (0, at):
                    with pytest.raises(BlockCorruptError) as caught:
                        lease.verify(start, 5)
                    assert caught.value.key == key
            self.put_raw(store, key, payload(key))
        assert [payload(key) for key in keys] == load(store, keys)

    def test_blocks_come_in_the_order_in_which_they_are_asked_for(
        self, store: Store
    ) -> None:
        """Not in that in which they lie; and a lease goes on beside others."""
        keys = make_keys(NUM_BLOCKS)
        save(store, keys)
        mixed = [keys[at] for at in (5, 0, 7, 2, 6, 1)]
        with store.read(keys[3:5]) as other:
            assert [payload(key) for key in mixed] == load(store, mixed)
            other.verify(0, 2)
            other.recheck()

    def test_bytes_that_change_behind_their_seal_are_not_served(
        self, store: Store
    ) -> None:
        """What is visible is what ``seal`` ran over: a late write is noticed, or never seen."""
        keys = make_keys(2)
        with store.reserve(keys, BLOCK_BYTES) as lease:
            fill(lease)
            lease.slots.block(1)[5] ^= 1
            lease.commit()
        with store.read(keys) as got:
            got.verify(0, 1)
            with contextlib.suppress(BlockCorruptError):
                got.verify(1, 2)
                assert got.slots.block(1).tobytes() == payload(keys[1])

    def test_foreign_block_is_corrupt(self, store: Store) -> None:
        """The whole bytes of another key are no valid bytes of this one."""
        keys = make_keys(2)
        save(store, keys)
        self.put_raw(store, keys[0], payload(keys[1]))
        with store.read(keys[:1]) as lease, pytest.raises(BlockCorruptError):
            lease.verify(0, 1)

    def test_block_of_another_size_is_corrupt(self, store: Store) -> None:
        """A lease over blocks of two sizes verifies only those of the first's."""
        keys = make_keys(2)
        save(store, keys[:1])
        save(store, keys[1:], BLOCK_BYTES // 2)
        with store.read(keys) as lease:
            lease.verify(0, 1)
            with pytest.raises(BlockCorruptError, match="bytes"):
                lease.verify(1, 2)
            if lease.takes_digests:
                told = [block_checksum(key, payload(key)) for key in keys]
                with pytest.raises(BlockCorruptError, match="bytes"):
                    lease.verify_with(1, told[1:])

    @pytest.mark.parametrize("how", ["forgotten", "evicted", "rewritten"])
    def test_slot_recycled_while_read_is_noticed(self, store: Store, how: str) -> None:
        """A reader whose slot went to another save does not believe its copy."""
        keys = make_keys(1)
        save(store, keys)
        with store.read(keys) as lease:
            lease.verify(0, 1)
            lease.recheck()
            if how == "evicted":
                save(store, make_keys(NUM_BLOCKS, first=1))
            else:
                store.forget(keys)
                if how == "rewritten":
                    save(store, keys)
            with pytest.raises(BlockNotFoundError):
                lease.recheck()

    def test_recycled_slots_are_told(self, store: Store) -> None:
        """Who read several blocks hears of each whose slot was given away."""
        keys = make_keys(3)
        save(store, keys)
        with store.read(keys) as lease:
            assert lease.recycled() == [False] * 3
            store.forget(keys[1:2])
            assert lease.recycled()[1]
            with pytest.raises(BlockNotFoundError):
                lease.recheck()

    def test_seals_are_the_checksums_that_travel(self, store: Store) -> None:
        """Writer and reader are told what seals a block elsewhere, too."""
        keys = make_keys(4)
        expected = [block_checksum(key, payload(key)) for key in keys]
        with store.reserve(keys, BLOCK_BYTES) as lease:
            fill(lease)
            assert lease.seals(0, 4) == expected
            lease.commit()
        with store.read(keys) as got:
            got.verify(1, 3)
            assert got.seals(1, 3) == expected[1:3]

    # -- what a device pins, and hints --------------------------------------------

    def test_slots_lie_in_the_memory_that_is_offered(self, store: Store) -> None:
        """Who offers buffers has all slots there, and at last says that all memory came."""
        keys, words, over = make_keys(2), list[StoreGrowth](), threading.Event()

        def tell(growth: StoreGrowth) -> None:
            words.append(growth)
            if growth.problem or growth.nbytes >= growth.total:
                over.set()

        store.watch(tell)
        with store.reserve(keys, BLOCK_BYTES) as lease:
            blocks = [lease.slots.block(at) for at in range(2)]
            fill(lease)
            lease.commit()
        with store.read(keys) as got:
            blocks += [got.slots.block(at) for at in range(2)]
        for block in blocks if store.buffers else ():
            assert any(np.may_share_memory(block, each) for each in store.buffers)
        assert over.wait(_LIMIT_S), words

    def test_hints_are_aligned_with_their_keys(self, store: Store) -> None:
        """Each key has an answer, also where nothing is known; asking is no use of a block."""
        keys = make_keys(NUM_BLOCKS)
        save(store, keys)
        for _ in range(2):
            store.match(keys[-2:])
            store.contains(keys[-2:])
            assert store.everywhere([*make_keys(1, first=90), keys[-1]]) == [
                False,
                True,
            ]
            assert len(store.fates(keys[:3])) == 3
        save(store, make_keys(2, first=20))
        assert store.match(keys) == NUM_BLOCKS - 2

    def test_numbers_are_plain_ones(self, store: Store) -> None:
        """What a store tells goes to other processes, where numpy's numbers cannot be sent."""
        keys = make_keys(2)
        with store.reserve(keys[:1], BLOCK_BYTES) as lease:
            fill(lease)
            told: list[object] = [lease.num_stored, lease.commit()]
        told += [store.match(keys), store.capabilities.max_block_bytes]
        told += attrs.astuple(store.stats())
        there: object = store.contains(keys)
        assert isinstance(there, list)
        assert [bool] * 2 == [type(each) for each in there]
        told.append(store.forget(keys))
        assert {int} == {type(each) for each in told}, told

    # -- forgetting -------------------------------------------------------------

    def test_forget_frees_committed_blocks_only(self, store: Store) -> None:
        """Forgetting takes what is stored, not what is unknown or being written."""
        keys = make_keys(4)
        save(store, keys[:3])
        with store.reserve(keys[3:], BLOCK_BYTES) as lease:
            assert store.forget([keys[1], keys[3], *make_keys(1, first=9)]) == 1
            fill(lease)
            lease.commit()
        assert store.contains(keys) == [True, False, True, True]
        assert store.stats().committed_blocks == 3

    def test_clear_forgets_one_key_space(self, store: Store) -> None:
        """Clearing by prefix leaves the blocks of other key spaces."""
        other = make_keyspace("other")
        mine, theirs = make_keys(2), make_keys(2, keyspace=other)
        save(store, mine)
        save(store, theirs)
        assert store.clear(keyspace_prefix(other.digest)) == 2
        assert store.match(mine) == 2
        assert store.match(theirs) == 0
        assert store.clear(b"") == 2

    # -- the end -----------------------------------------------------------------

    def test_close_ends_open_leases(self, store: Store) -> None:
        """After close a lease does nothing more and may be left in peace."""
        keys = make_keys(2)
        save(store, keys[:1])
        with store.reserve(keys[1:], BLOCK_BYTES) as write, store.read(keys[:1]) as got:
            store.close()
            for use in (lambda: write.seal(0, 1), write.commit, got.recheck):
                with pytest.raises(StoreError):
                    use()

    def test_durable_store_keeps_committed_blocks(self, tmp_path: Path) -> None:
        """A store that calls itself durable has all its blocks after a restart."""
        keys = make_keys(3)
        store = self.make_store(tmp_path / "store", NUM_BLOCKS)
        save(store, keys[:2])
        store.describe(make_keyspace())
        lease = store.reserve(keys[2:], BLOCK_BYTES)
        fill(lease)
        durable = store.capabilities.durable
        store.close()
        again = self.reopen(tmp_path / "store", NUM_BLOCKS)
        assert durable == (again is not None)
        if again is not None:
            with again:
                assert [payload(key) for key in keys[:2]] == load(again, keys[:2])
                assert again.match(keys) == 2
                assert list(again.keyspaces().values()) == [make_keyspace()]
                assert self.audit(again) == []
