# SPDX-License-Identifier: Apache-2.0
"""The slab store passes the contract, survives restarts and refuses what is wrong."""

import contextlib
import os
from functools import partial
from pathlib import Path

import pytest

from tests.stores.slab_kit import SLOT_BYTES, RawSlab, die, index_path, open_slab
from ucm.blocks import PackedKey
from ucm.config import StoreConfig
from ucm.errors import BlockCorruptError, StoreUnavailableError
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore, _chains, _quick, _store
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import Grant, Word
from ucm.stores.slab._locks import FileLock
from ucm.stores.slab._tables import EVERYTHING
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    load,
    make_keys,
    payload,
    save,
)
from ucm.testing.store_contract import StoreContract

pytestmark = pytest.mark.usefixtures("either_way")


class TestSlabStore(StoreContract):
    """The contract, on whatever file system temporary files live (S3-12)."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Make a slab in that directory."""
        return open_slab(directory, num_blocks)

    def make_tenant_store(
        self, directory: Path, num_blocks: int, share: float
    ) -> Store:
        """Make one that bounds its tenants."""
        return open_slab(directory, num_blocks, tenant_share=share)

    def reopen(self, directory: Path, num_blocks: int) -> Store | None:
        """Open the slab that is there."""
        assert (directory / "slab.json").exists()
        return open_slab(directory, num_blocks)

    def get_raw(self, store: Store, key: PackedKey) -> bytes | None:
        """Read the files."""
        return RawSlab(store._slab.root).get(key)

    def put_raw(self, store: Store, key: PackedKey, data: bytes) -> None:
        """Write the data file."""
        RawSlab(store._slab.root).put(key, data)

    def audit(self, store: Store) -> list[str]:
        """Compare records, chains, free stack and counts."""
        return store.audit()


class TestSharing:
    def test_openers_of_one_process_share_blocks(self, tmp_path):
        """A scheduler and a worker in one process see the same blocks."""
        keys = make_keys(3)
        with (
            open_slab(tmp_path / "s") as worker,
            open_slab(tmp_path / "s", index_only=True) as scheduler,
        ):
            save(worker, keys)
            assert scheduler.match(keys) == 3
            scheduler.touch(keys)
            assert scheduler.forget(keys[2:]) == 1
            assert worker.match(keys) == 2
            assert scheduler.stats() == worker.stats()
            for refused in (
                lambda: scheduler.read(keys[:1]),
                lambda: scheduler.reserve(keys, BLOCK_BYTES),
            ):
                with pytest.raises(ValueError, match="index only"):
                    refused()
            assert worker.audit() == []

    def test_who_only_looks_takes_the_slots_as_they_are(self, tmp_path):
        """A scheduler asks for no memory: a slab of another capacity is looked into all
        the same."""
        keys = make_keys(3)
        with open_slab(tmp_path / "s") as worker:
            save(worker, keys)
            look = partial(
                SlabStore,
                path=str(tmp_path / "s"),
                capacity_bytes=1 << 20,
                block_bytes=BLOCK_BYTES,
            )
            with look(index_only=True) as scheduler:
                assert 3 == scheduler.match(keys)
                assert worker.stats() == scheduler.stats()
                assert worker.capabilities == scheduler.capabilities

    def test_touch_by_one_opener_saves_from_eviction_by_another(self, tmp_path):
        """Uses are counted over all openers (S2-05)."""
        keys = make_keys(8)
        with (
            open_slab(tmp_path / "s") as worker,
            open_slab(tmp_path / "s", index_only=True) as scheduler,
        ):
            for key in keys:
                save(worker, [key])
            save(worker, make_keys(1, first=20))  # lists the oldest
            scheduler.touch(keys[1:3])
            save(worker, make_keys(2, first=30))
            assert (
                worker.contains(keys) == [False, True, True, False, False] + [True] * 3
            )

    def test_look_is_repeated_when_the_index_changed_meanwhile(self, tmp_path):
        """What was seen while another opener changed the index is not believed."""
        keys = make_keys(2)
        with open_slab(tmp_path / "s") as reader, open_slab(tmp_path / "s") as writer:
            save(writer, keys)
            index = reader._slab.index
            batch = index.batch(keys)
            seen = []

            def look():
                seen.append(index._look_up(batch).committed)
                if len(seen) == 1:
                    writer.forget(keys[:1])
                return seen[-1]

            assert [False, True] == index.observe(look).tolist()
            assert [[True, True], [False, True]] == [each.tolist() for each in seen]

    def test_whole_block_under_another_key_is_corrupt(self, tmp_path):
        """Bytes and checksum that belong together do not verify under a third key."""
        keys = make_keys(2)
        with open_slab(tmp_path / "s") as store:
            save(store, keys)
            raw = RawSlab(tmp_path / "s")
            checksums = raw.records["checksum"]
            checksums[raw.slot_of(keys[0])] = checksums[raw.slot_of(keys[1])]
            raw.put(keys[0], payload(keys[1]))
            with store.read(keys) as lease, pytest.raises(BlockCorruptError):
                lease.verify(0, 1)

    def test_settings_open_the_same_slab(self, tmp_path):
        """The store that the settings name is made as they say."""
        config = StoreConfig(path=str(tmp_path / "s"), capacity=5 * SLOT_BYTES)
        with SlabStore.open_configured(
            config, block_bytes=BLOCK_BYTES, index_only=False
        ) as store:
            assert store.stats().capacity_blocks == 5
            assert store.capabilities.max_block_bytes == SLOT_BYTES

    def test_touch_of_many_keys_keeps_the_first_longest(self, tmp_path, monkeypatch):
        """Blocks that are touched together go from the last to the first, also where
        there are more of them than the index is asked for at once."""
        monkeypatch.setattr(_store, "_LOOK_UP_STEP", 3)
        keys = make_keys(8)
        with open_slab(tmp_path / "s") as store:
            save(store, keys)
            store.touch(keys)
            for stored in range(8, 2, -2):
                save(store, make_keys(2, first=10 * stored))
                assert [True] * (stored - 2) == store.contains(keys)[: stored - 2]
                assert stored - 2 == store.match(keys)

    def test_keys_of_equal_hash_are_told_apart(self, tmp_path, monkeypatch):
        """Hashes that are equal by chance make one long chain, and nothing else."""
        monkeypatch.setattr(_chains, "xxh3_64_digest", lambda key, seed: bytes(8))
        monkeypatch.setattr(_chains, "xxh3_64_intdigest", lambda key, seed: 0)
        monkeypatch.setattr(_quick, "_find_digest", lambda library: None)
        keys = make_keys(8)
        with open_slab(tmp_path / "s") as store:
            assert 4 == save(store, keys[:4])
            assert [True] * 4 + [False] * 4 == store.contains(keys)  # one by one
            assert ([True] * 4 + [False] * 4) * 2 == store.contains(keys * 2)
            assert 4 == save(store, keys)
            assert [payload(key) for key in keys] == load(store, keys)
            assert 4 == store.forget(keys[1::2])
            assert [True, False] * 4 == store.contains(keys)
            assert [True, False] * 8 == store.contains(keys * 2)
            assert [1, 0] * 4 == [store.match([key]) for key in keys]
            assert 0 == store.match(make_keys(1, first=20))


class TestRestart:
    def test_killed_user_loses_no_block(self, tmp_path):
        """What was committed before a kill is there at the next start."""
        keys = make_keys(4)
        store = open_slab(tmp_path / "s")
        save(store, keys)
        store.reserve(make_keys(2, first=9), BLOCK_BYTES)
        die(store)
        with open_slab(tmp_path / "s") as again:
            assert [payload(key) for key in keys] == load(again, keys)
            assert again.stats().reserved_blocks == 0
            assert 2 == again._slab.owner_id
            assert again.audit() == []

    @pytest.mark.parametrize("text", ["", '{"kind":"ucm-'], ids=["empty", "torn"])
    def test_creation_killed_at_its_start_is_made_up_for(self, tmp_path, text):
        """A mark that was hardly begun stands alone, and is ours to replace (X-12)."""
        (tmp_path / "s").mkdir(0o700)
        (tmp_path / "s/slab.json.tmp").write_text(text)
        (tmp_path / "s/slab.json.tmp").chmod(0o600)
        with open_slab(tmp_path / "s") as store:
            assert 8 == save(store, make_keys(8))

    def test_half_made_slab_is_made_again(self, tmp_path):
        """A creator that died before the manifest leaves nothing in the way (X-12)."""
        open_slab(tmp_path / "s").close()
        (tmp_path / "s/slab.json").rename(tmp_path / "s/slab.json.tmp")
        with open_slab(tmp_path / "s", 3) as store:
            assert store.stats().capacity_blocks == 3
            names = {path.name for path in (tmp_path / "s").iterdir()}
            assert {"slab.json", "data", "arena", "fates", "index-4096.0"} == names

    def test_half_done_change_is_put_right_by_the_next(self, tmp_path):
        """Derived data that a death left wrong is rebuilt from the records."""
        with open_slab(tmp_path / "s") as store:
            save(store, make_keys(4))
            index = store._slab.index
            index.header[2] |= 1  # the version: somebody died
            index.header[Word.JOURNAL] = EVERYTHING
            index.chains.heads[:] = -1
            index.tally.counts[:] = 0
            index.header[5:8] = 0
            assert store.match(make_keys(4)) == 4
            assert store.audit() == []

    def test_directory_removed_meanwhile_does_not_come_back(self, tmp_path):
        """Closing a slab whose directory is gone makes no new one."""
        store = open_slab(tmp_path / "s")
        (tmp_path / "s").rename(tmp_path / "gone")
        store.close()
        assert not (tmp_path / "s").exists()


class TestOwedSlots:
    def test_slots_that_could_not_be_given_back_are_given_back_later(
        self, tmp_path: Path
    ) -> None:
        """While another process holds the index a discard cannot be done; it is made
        up for before the next reservation, and the keys can be written again."""
        keys = make_keys(3)
        with open_slab(tmp_path / "s", lock_timeout=0.01) as store:
            lease = store.reserve(keys, BLOCK_BYTES)
            path = index_path(tmp_path / "s")
            other = FileLock(os.open(path, os.O_RDWR), path, 1.0)
            with contextlib.closing(other), other.held():
                lease.discard()
                assert 3 == store.stats().reserved_blocks
            again = store.reserve(keys, BLOCK_BYTES)
            assert keys == list(again.keys)
            again.discard()
            assert 0 == store.stats().reserved_blocks
            assert [] == store.audit()

    def test_lock_that_is_not_free_is_waited_for_once_for_all_of_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reservation waits no longer the more leases are owed."""
        asked, discard = [], SlotIndex.discard

        def count(index: SlotIndex, grant: Grant, owner: int) -> None:
            asked.append(grant)
            discard(index, grant, owner)

        with open_slab(tmp_path / "s", lock_timeout=0.01) as store:
            leases = [store.reserve([key], BLOCK_BYTES) for key in make_keys(4)]
            path = index_path(tmp_path / "s")
            other = FileLock(os.open(path, os.O_RDWR), path, 1.0)
            with contextlib.closing(other), other.held():
                for lease in leases:
                    lease.discard()
                monkeypatch.setattr(SlotIndex, "discard", count)
                with pytest.raises(StoreUnavailableError):
                    store.reserve(make_keys(1), BLOCK_BYTES)
                assert 1 == len(asked)
            store.reserve(make_keys(1), BLOCK_BYTES)
            assert 1 == store.stats().reserved_blocks
