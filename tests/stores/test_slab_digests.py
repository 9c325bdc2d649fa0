# SPDX-License-Identifier: Apache-2.0
"""Checksums of many blocks by one call are those that are made one by one."""

import ctypes
import itertools
import os
import threading
import warnings

import numpy as np
import pytest

from tests.native_kit import build
from ucm import native, xxh3
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
            ManyDigests(library)(slots, range(3), SEEDS, 1)


class Helped:
    """
    Calls of the library with a digest of ours, which says who computes it.

    Args:
        library: What was compiled.
        meet: Called in each digest.
    """

    def __init__(self, library, meet):
        self.threads = set()
        self._library, self._meet = library, meet
        kind = ctypes.CFUNCTYPE(
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        )
        self._digest = kind(self._compute)

    def _compute(self, _, nbytes, seed):
        self.threads.add(threading.get_native_id())
        self._meet()
        return nbytes + seed

    def ask(self, most, count=8, nbytes=4 << 20):
        """Have slots digested, and return what was found."""
        places, seeds = np.arange(count), np.arange(count, dtype=np.uint64)
        found = np.zeros(count, np.uint64)
        self._library.digests(
            self._digest,
            *(0, 0, nbytes, count, places.ctypes.data, seeds.ctypes.data),
            *(found.ctypes.data, most),
        )
        return (found - np.uint64(nbytes)).tolist()


def exit_status_of_child(library):
    """Fork, and return 0 if the child was helped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
        child = os.fork()
    if child == 0:
        try:
            meet = threading.Barrier(2, timeout=20).wait
            is_right = Helped(library, meet).ask(most=2) == [*range(8)]
        finally:
            os._exit(0 if is_right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestHelpers:
    def test_digests_are_the_same_whoever_helps(self, library, monkeypatch):
        """Each of many blocks gets the digest of its own bytes and seed."""
        pool = np.random.default_rng(4).integers(0, 256, (40, 1 << 20), np.uint8)
        slots = HostSlots(pool, np.arange(40)[::-1].copy(), (1 << 20) - 5)
        seeds = [*range(40)]
        monkeypatch.setattr(_digests, "_many", ManyDigests(library))
        expected = list(digests_of(slots, range(40), seeds))
        for most in (2, 3, 8, 1000):
            assert expected == list(digests_of(slots, range(40), seeds, most))

    def test_as_many_threads_compute_at_once_as_may(self, library):
        """No more either: the engine needs the other cores."""
        asked = Helped(library, threading.Barrier(4, timeout=30).wait)
        assert [*range(8)] == asked.ask(most=4)
        assert len(asked.threads) == 4

    def test_small_blocks_are_computed_where_they_are_asked_for(self, library):
        """A thread that begins takes longer than they do."""
        asked = Helped(library, lambda: None)
        assert [*range(8)] == asked.ask(most=8, nbytes=64 << 10)
        assert {threading.get_native_id()} == asked.threads

    def test_helpers_give_way_and_come_again(self, library):
        """Of two that ask neither waits, and one that is left has all there may be."""
        asked, over = threading.Event(), threading.Event()
        both, later = (threading.Barrier(2, timeout=120) for _ in range(2))
        found, left, firsts = [], set(), itertools.count()

        def wait_for_the_first():
            if next(firsts) == 0:
                asked.set()
                assert over.wait(120)
            else:
                later.wait()

        second = Helped(library, wait_for_the_first)
        thread = threading.Thread(
            target=lambda: found.append(second.ask(most=2, count=9))
        )

        def meet_and_let_the_second_ask():
            if asked.is_set():
                left.add(threading.get_native_id())
                return
            if both.wait() == 0:
                thread.start()
            assert asked.wait(120)

        first = Helped(library, meet_and_let_the_second_ask)
        assert [*range(8)] == first.ask(most=2)
        over.set()
        thread.join(120)
        assert {threading.get_native_id()} == left
        assert len(first.threads) == 2
        assert [[*range(9)]] == found
        assert len(second.threads) == 2

    def test_forked_child_has_helpers_of_its_own(self, library):
        """It has none of the threads that its parent was helped by at that moment."""
        both = threading.Barrier(2, timeout=120)
        forks, told = threading.Lock(), []

        def fork_once():
            both.wait()
            with forks:
                if not told:
                    told.append(exit_status_of_child(library))

        assert [*range(8)] == Helped(library, fork_once).ask(most=2)
        assert [0] == told

    def test_more_threads_than_a_number_holds_are_many(self, library, monkeypatch):
        """What is set too high is no number below nothing."""
        given = []
        many = ManyDigests(library)
        monkeypatch.setattr(many, "_many", lambda *arguments: given.append(arguments))
        many(make_slots(8), range(3), SEEDS, 2**32)
        assert given[0][-1] == 64


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

        monkeypatch.setattr(xxh3.importlib.util, "find_spec", missing)
        assert find_many(library) is None

    def test_library_of_another_release_is_not_used(self, tmp_path, monkeypatch):
        """Its functions may take something else: a call would write anywhere."""
        build(tmp_path)
        monkeypatch.setattr(native, "_VERSION", 0)
        assert native.find_native(tmp_path) is None
