# SPDX-License-Identifier: Apache-2.0
"""How often the bytes of a block are held against its checksum."""

from pathlib import Path

import pytest

from tests.stores import test_slab
from tests.stores.slab_kit import RawSlab, open_slab
from ucm.config import StoreConfig, Verify
from ucm.errors import BlockCorruptError, BlockNotFoundError
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore, _leases
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save

KEYS = make_keys(3)
WRONG = bytes(BLOCK_BYTES)


class TestSlabStoreVerifiedOnce(test_slab.TestSlabStore):
    """The contract with ``store.verify: once``: it speaks of first loads."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Make a slab that is trusted after the first look."""
        return open_slab(directory, num_blocks, verify=Verify.ONCE)


@pytest.fixture(params=Verify)
def slab(request, tmp_path):
    """Give a slab with three blocks, and how it verifies."""
    with open_slab(tmp_path / "s", verify=request.param) as store:
        save(store, KEYS)
        yield store, request.param


@pytest.fixture
def once(tmp_path):
    """Give a slab with three blocks that verifies once."""
    with open_slab(tmp_path / "s", verify=Verify.ONCE) as store:
        save(store, KEYS)
        yield store


@pytest.fixture
def digests(monkeypatch):
    """Give the positions of the blocks whose bytes are hashed."""
    hashed = []
    whole = _leases.digests_of

    def digests_of(slots, positions, seeds, most_threads):
        hashed.extend(positions)
        return whole(slots, positions, seeds, most_threads)

    monkeypatch.setattr(_leases, "digests_of", digests_of)
    return hashed


@pytest.mark.parametrize("verb", ["seal", "verify"])
def test_checksums_have_the_threads_that_the_store_was_given(
    tmp_path, monkeypatch, verb
):
    """Of a save and of a load; until the store is told it is the one that asks."""
    given, whole = [], _leases.digests_of

    def digests_of(*arguments):
        given.append(arguments[-1])
        return whole(*arguments)

    monkeypatch.setattr(_leases, "digests_of", digests_of)
    with open_slab(tmp_path / "s") as store:
        for most in (1, 5):
            store.clear(b"")
            if most > 1:
                store.hash_on(most)
            save(store, KEYS)
            if verb == "verify":
                given.clear()
                load(store, KEYS)
            assert {most} == set(given)
            given.clear()


def damage(store, key):
    """Overwrite a stored block behind the store's back."""
    RawSlab(store._slab.root).put(key, WRONG)


class TestVerify:
    def test_first_load_finds_damage_and_a_later_one_where_it_always_verifies(
        self, slab
    ):
        """Both protect from what was wrong before; only ``always`` from what somebody
        writes into the memory afterwards."""
        store, verify = slab
        damage(store, KEYS[0])
        with pytest.raises(BlockCorruptError):
            load(store, KEYS[:1])
        assert [payload(KEYS[1])] == load(store, KEYS[1:2])
        damage(store, KEYS[1])
        if verify is Verify.ONCE:
            assert [WRONG] == load(store, KEYS[1:2])
        else:
            with pytest.raises(BlockCorruptError):
                load(store, KEYS[1:2])

    def test_second_load_hashes_what_the_first_did_not(self, once, digests):
        """No byte of a block is read twice for its checksum, in whichever span it is."""
        load(once, KEYS[1:2])
        assert [0] == digests
        digests.clear()
        assert [payload(key) for key in KEYS] == load(once, KEYS)
        assert [0, 2] == digests
        digests.clear()
        load(once, KEYS)
        assert [] == digests

    def test_piece_of_a_span_vouches_for_no_other(self, once, digests):
        """What was verified is what was asked for, not the whole lease."""
        with once.read(KEYS) as lease:
            lease.verify(1, 2)
        assert [1] == digests
        digests.clear()
        load(once, KEYS)
        assert [0, 2] == digests

    def test_block_that_was_saved_anew_is_verified_anew(self, once):
        """A slot's next content is not known by the last one's."""
        load(once, KEYS)
        once.forget(KEYS)
        save(once, KEYS)
        damage(once, KEYS[2])
        with pytest.raises(BlockCorruptError) as caught:
            load(once, KEYS)
        assert KEYS[2] == caught.value.key

    def test_damaged_block_stays_damaged(self, once):
        """A load that failed makes no later one believe."""
        damage(once, KEYS[1])
        for _ in range(2):
            with pytest.raises(BlockCorruptError) as caught:
                load(once, KEYS)
            assert KEYS[1] == caught.value.key

    def test_recycled_slot_is_noticed_all_the_same(self, once):
        """Trust in memory is none in a copy from a slot that was given away."""
        load(once, KEYS)
        with once.read(KEYS) as lease:
            lease.verify(0, 3)
            once.forget(KEYS[:1])
            with pytest.raises(BlockNotFoundError):
                lease.recheck()

    def test_size_of_a_verified_block_is_still_compared(self, once):
        """A block that is known is no block of another size."""
        (short,) = make_keys(1, first=9)
        save(once, [short], BLOCK_BYTES // 2)
        load(once, [short])
        with (
            once.read([KEYS[0], short]) as lease,
            pytest.raises(BlockCorruptError, match="bytes"),
        ):
            lease.verify(0, 2)

    def test_each_user_verifies_for_itself(self, once):
        """What one process has seen, another has not."""
        load(once, KEYS)
        damage(once, KEYS[0])
        with (
            open_slab(once._slab.root, verify=Verify.ONCE) as other,
            pytest.raises(BlockCorruptError),
        ):
            load(other, KEYS)

    def test_memory_is_a_number_for_each_slot_of_who_loads(self, slab, tmp_path):
        """It never grows, and who needs none has none."""
        store, verify = slab
        if verify is Verify.ONCE:
            assert 8 * store.stats().capacity_blocks == store._verified.nbytes
        else:
            assert store._verified is None
        path = tmp_path / "s"
        with open_slab(path, index_only=True, verify=verify) as looker:
            assert looker._verified is None

    def test_slab_verifies_as_it_is_configured(self, tmp_path):
        """The setting reaches the store; left out, each load is verified."""
        for verify, is_once in ({}, False), ({"verify": Verify.ONCE}, True):
            config = StoreConfig(path=str(tmp_path / "s"), capacity=1 << 16, **verify)
            with SlabStore.open_configured(
                config, block_bytes=BLOCK_BYTES, index_only=False
            ) as store:
                assert is_once == (store._verified is not None)
