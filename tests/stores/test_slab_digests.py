# SPDX-License-Identifier: Apache-2.0
"""Checksums of many blocks by one call are those that are made one by one."""

import numpy as np
import pytest

from tests.native_kit import build
from ucm import native
from ucm.plan import HostSlots
from ucm.stores.slab import _digests
from ucm.stores.slab._digests import ManyDigests, digests_of, find_many

SEEDS = [0, 1, 2**64 - 1]


def make_slots(nbytes):
    """Return three slots of a pool, out of order, each with other bytes."""
    pool = np.random.default_rng(3).integers(0, 256, (8, 70_000), dtype=np.uint8)
    return HostSlots(pool, np.array([6, 0, 3]), nbytes)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Give what was compiled just now."""
    return build(tmp_path_factory.mktemp("native"))


class TestMany:
    @pytest.mark.parametrize("nbytes", [0, 3, 16, 128, 240, 241, 1024, 4097, 70_000])
    def test_digests_are_the_same_by_one_call(self, library, nbytes, monkeypatch):
        """Whichever way xxhash takes for a size, blocks of both builds verify."""
        slots = make_slots(nbytes)
        monkeypatch.setattr(_digests, "_many", None)
        expected = list(digests_of(slots, range(3), SEEDS))
        monkeypatch.setattr(_digests, "_many", ManyDigests(library))
        assert expected == list(digests_of(slots, range(3), SEEDS))
        assert expected[1:] == list(digests_of(slots, range(1, 3), SEEDS[1:]))
        assert [] == list(digests_of(slots, range(0), []))

    @pytest.mark.parametrize("slot", [-1, 8])
    def test_slot_outside_of_the_pool_is_not_read(self, library, slot):
        """What stands in a damaged index ends no process."""
        memory = np.zeros((10, 64), np.uint8)  # ours around the pool too
        slots = HostSlots(memory[1:9], np.array([6, slot, 3]), 64)
        with pytest.raises(IndexError, match=r"not in 0\.\.7"):
            ManyDigests(library)(slots, range(3), SEEDS)


class TestFind:
    def test_library_that_says_something_else_is_not_used(self, library):
        """Blocks that others saved would not verify."""

        class Wrong:
            def digests(self, *arguments):
                """Leave what is there."""

        assert isinstance(find_many(library), ManyDigests)
        assert find_many(Wrong()) is None

    def test_without_a_library_there_is_none(self, tmp_path):
        """A machine without a compiler has none, and what is no library is not loaded."""
        assert find_many(native.find_native(tmp_path)) is None
        (tmp_path / "_native.so").write_bytes(b"no library")
        assert native.find_native(tmp_path) is None

    def test_xxhash_without_a_library_is_called_block_by_block(
        self, library, monkeypatch
    ):
        """What is installed may be no package; a store opens all the same."""

        def missing(_):
            raise ModuleNotFoundError("No module named 'xxhash._xxhash'")

        monkeypatch.setattr(_digests.importlib.util, "find_spec", missing)
        assert find_many(library) is None

    def test_library_of_another_release_is_not_used(self, tmp_path, monkeypatch):
        """Its functions may take something else: a call would write anywhere."""
        build(tmp_path)
        monkeypatch.setattr(native, "_VERSION", 0)
        assert native.find_native(tmp_path) is None
