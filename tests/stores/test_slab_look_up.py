# SPDX-License-Identifier: Apache-2.0
"""What a look-up of a few keys costs, and that it says the same as one of many."""

import pytest

from tests.stores.slab_kit import open_slab
from ucm.errors import BlockNotFoundError
from ucm.stores.slab import _chains
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save

pytestmark = pytest.mark.usefixtures("by_python")


class TestFewKeys:
    """Keys that are looked up one by one."""

    def test_few_keys_are_looked_up_one_by_one_until_one_misses(
        self, tmp_path, monkeypatch
    ):
        """A short prompt makes no batch, nor does a long one that differs at once."""
        digest, asked = _chains.xxh3_64_intdigest, []

        def counting(key, seed):
            asked.append(key)
            return digest(key, seed)

        keys, others = make_keys(16), make_keys(16, first=20)
        with open_slab(tmp_path / "s", 16) as store:
            save(store, keys)
            monkeypatch.setattr(_chains, "xxh3_64_intdigest", counting)
            with monkeypatch.context() as patched:
                patched.delattr(_chains, "xxh3_64_digest")
                assert 12 == store.match(keys[:12])
                assert 2 == store.match([*keys[:2], *others[:2]])
                assert 0 == store.match(others)
            assert [*keys[:12], *keys[:2], others[0], others[0]] == asked
            assert 16 == store.match(keys)

    def test_key_that_is_being_written_is_not_found_alone(self, tmp_path):
        """A slot that is reserved holds nothing yet."""
        keys = make_keys(2)
        with open_slab(tmp_path / "s") as store:
            save(store, keys[:1])
            with store.reserve(keys[1:], BLOCK_BYTES):
                assert 0 == store.match(keys[1:])
                assert 1 == store.match(keys)
                assert [True, False] == store.contains(keys)

    def test_few_keys_are_touched_without_a_batch(self, tmp_path, monkeypatch):
        """The first outlives the second; what is not there is passed over."""
        keys, others = make_keys(4), make_keys(3, first=20)
        with open_slab(tmp_path / "s", 4) as store:
            save(store, keys)
            with monkeypatch.context() as patched:
                patched.delattr(_chains, "xxh3_64_digest")
                store.touch([others[0], *keys[:2]])
            save(store, others)
            assert [True, False, False, False] == store.contains(keys)


class TestLoneBlock:
    """A block that is loaded alone."""

    def test_block_that_is_being_written_cannot_be_read(self, tmp_path):
        """A slot that is reserved holds nothing yet."""
        keys = make_keys(1)
        with (
            open_slab(tmp_path / "s") as store,
            store.reserve(keys, BLOCK_BYTES),
            pytest.raises(BlockNotFoundError),
        ):
            store.read(keys)

    @pytest.mark.parametrize("count", [1, 3])
    def test_slot_that_was_given_away_meanwhile_is_noticed(self, tmp_path, count):
        """The bytes are another block's by then; of several as of one."""
        keys, others = make_keys(count), make_keys(count, first=9)
        with open_slab(tmp_path / "s", count) as store:
            save(store, keys)
            with store.read(keys) as lease:
                lease.verify(0, count)
                lease.recheck()
                save(store, others)
                with pytest.raises(BlockNotFoundError):
                    lease.recheck()

    def test_block_that_was_forgotten_meanwhile_is_noticed(self, tmp_path):
        """Nobody forgets a block without a reason."""
        keys = make_keys(1)
        with open_slab(tmp_path / "s", 1) as store:
            save(store, keys)
            with store.read(keys) as lease:
                lease.verify(0, 1)
                store.forget(keys)
                with pytest.raises(BlockNotFoundError):
                    lease.recheck()
