# SPDX-License-Identifier: Apache-2.0
"""Memory comes in the background, once, and nobody waits for it or runs into a hole."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.stores.slab_kit import die
from tests.stores.test_slab_room import make_system
from ucm.affinity import engine_cpus, give_way, plan_beside_cpu
from ucm.errors import StoreFullError, StoreUnavailableError
from ucm.stores.abc import StoreGrowth
from ucm.stores.slab import SlabStore, _creation, _populate
from ucm.stores.slab._compact import compact
from ucm.stores.slab._locks import Turn
from ucm.stores.slab._memory import populate
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save

SLOT = 4096
EXTENT = 12 * SLOT
CAPACITY = 24 * EXTENT
KEYS = make_keys(300)
LIMIT_S = 60.0


class Kernel:
    """Populates the first extents of a slab, and others once it is let."""

    def __init__(self) -> None:
        self.wanted: list[int] = []
        self.cpus: dict[int, set[int]] = {}
        self.priorities: dict[int, int] = {}
        self.fails: OSError | None = None
        self.dead: threading.Thread | None = None
        self._limit = 1
        self._changed = threading.Condition()

    def let(self, limit: int) -> None:
        """Populate extents up to that one as well."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def await_asked(self, extent: int) -> None:
        """Come back once somebody waits for an extent."""
        with self._changed:
            assert self._changed.wait_for(lambda: extent in self.wanted, LIMIT_S)

    def populate(
        self,
        memory: np.ndarray,
        fd: int,
        offset: int,
        num_threads: int,
        *,
        collapses: bool,
    ) -> None:
        """Stand for the function of that name."""
        extent = offset // EXTENT
        with self._changed:
            self.wanted.append(extent)
            self.cpus[extent] = os.sched_getaffinity(0)
            self.priorities[extent] = os.getpriority(os.PRIO_PROCESS, 0)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: extent < self._limit, LIMIT_S)
        if self.fails:
            raise self.fails
        if threading.current_thread() is self.dead:
            raise StoreUnavailableError("its process is no more")
        populate(memory, fd, offset, num_threads, collapses=collapses)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Let one extent after the other be asked for, and only the first be had."""
    made = Kernel()
    monkeypatch.setattr(_populate, "_STEP_BYTES", EXTENT)
    monkeypatch.setattr(_populate, "_NAP_S", 0.001)
    monkeypatch.setattr(_populate, "populate", made.populate)
    yield made
    made.let(24)


def open_small(path: Path, **more: object) -> SlabStore:
    """Open a slab of 24 extents."""
    return SlabStore(path=str(path), capacity_bytes=CAPACITY, block_bytes=SLOT, **more)


def let_all_end(*stores: SlabStore) -> None:
    """Wait until no store has anything left to do in the background."""
    for store in stores:
        thread = store._slab.populator._thread
        if thread is not None:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def num_there(store: SlabStore) -> int:
    """Return how many extents have their memory."""
    return int(np.count_nonzero(store._slab.arena.populated))


class TestJoining:
    def test_eight_ranks_serve_while_one_waits_for_memory(self, memory_path, kernel):
        """R-25: all have opened the slab, save and load, before the second of its 24
        extents is there; one of them populates, the others do not wait for it."""
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(open_small(memory_path)) for _ in range(8)]
            kernel.await_asked(1)
            assert 1 == num_there(stores[0])
            for number, store in enumerate(stores):
                assert 1 == save(store, KEYS[number : number + 1])
            for store in stores:
                assert [payload(key) for key in KEYS[:8]] == load(store, KEYS[:8])
            asked = list(kernel.wanted)  # one waits, and for the next one only
            kernel.let(24)
            let_all_end(*stores)
            assert 24 == num_there(stores[-1])
            assert [1] == [extent for extent in asked if extent]
            assert 288 - 8 == save(stores[3], KEYS[8:288])

    def test_slot_without_memory_is_not_given(self, memory_path, kernel):
        """R-25: a slab gives what it has by now, evicts within that, and the file has
        no more pages than that."""
        with open_small(memory_path) as store:
            lease = store.reserve(KEYS[:20], BLOCK_BYTES)
            assert 12 == len(lease.keys)
            assert list(range(12)) == lease.slots.slots.tolist()
            with pytest.raises(StoreFullError):
                store.reserve(KEYS[20:21], BLOCK_BYTES)
            lease.discard()
            assert 12 == save(store, KEYS[:12])
            assert 1 == save(store, KEYS[20:21])
            assert 12 == store.stats().committed_blocks
            assert EXTENT == 512 * (memory_path / "data").stat().st_blocks
            kernel.let(24)

    def test_memory_comes_behind_what_an_engine_computes(self, memory_path, kernel):
        """R-18: on the cores of an engine it took half as long again for its first prompt; who opens a
        slab has the priority that it had, and the first piece at once."""
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        with open_small(memory_path) as store:
            kernel.let(24)
            let_all_end(store)
        assert mine == os.getpriority(os.PRIO_PROCESS, 0)
        assert mine == kernel.priorities[0]
        assert {max(mine, 10)} == {kernel.priorities[extent] for extent in range(1, 24)}

    def test_thread_of_a_lower_priority_keeps_it(self):
        """R-18: an engine that was started with a low priority has no thread of a higher one."""
        low, told = max(15, os.getpriority(os.PRIO_PROCESS, 0)), []

        def run():
            os.setpriority(os.PRIO_PROCESS, 0, low)
            give_way()
            told.append(os.getpriority(os.PRIO_PROCESS, 0))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(LIMIT_S)
        assert [low] == told

    def test_memory_comes_beside_the_cpu_of_a_bound_engine(self, memory_path, kernel):
        """R-18: an engine that computes on one CPU opens a slab; what comes later comes on others."""
        all_cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(all_cpus)})
        try:
            store = open_small(memory_path)
        finally:
            os.sched_setaffinity(0, all_cpus)
        with store:
            kernel.let(24)
            let_all_end(store)
        beside = plan_beside_cpu(min(all_cpus), engine_cpus())
        assert {min(all_cpus)} == kernel.cpus[0]
        assert beside == kernel.cpus[1]

    def test_scheduler_populates_nothing(self, memory_path, kernel):
        """R-25: who maps no slot waits for none."""
        with open_small(memory_path, index_only=True) as looker:
            assert 0 == looker.match(KEYS)
            assert [] == kernel.wanted

    def test_slab_that_is_small_is_there_at_once(self, memory_path):
        """A slab of one step needs no thread, and nobody who opens it gets one."""
        with open_small(memory_path) as one, open_small(memory_path) as two:
            assert 24 == num_there(one)
            assert one._slab.populator._thread is None
            assert two._slab.populator._thread is None


class TestEnds:
    def test_another_goes_on_where_one_died(self, memory_path, kernel, monkeypatch):
        """R-25: the turn falls to whoever lives, and no extent is asked for in vain."""
        refused = threading.Event()
        take = Turn.take
        monkeypatch.setattr(Turn, "take", lambda turn: take(turn) or refused.set())
        one, two = open_small(memory_path), open_small(memory_path)
        kernel.await_asked(1)
        assert refused.wait(LIMIT_S)
        kernel.dead = one._slab.populator._thread
        die(one)
        kernel.let(24)
        let_all_end(two)
        assert 24 == num_there(two)
        assert two._slab.populator._has_turn
        two.close()

    def test_close_ends_it(self, memory_path, kernel):
        """R-25: a process that leaves takes no more memory; the next one does."""
        store = open_small(memory_path)
        kernel.let(4)
        kernel.await_asked(4)
        store._slab.populator._ends.set()
        kernel.let(24)
        store.close()
        assert not store._slab.populator._thread.is_alive()
        assert list(range(5)) == kernel.wanted
        with open_small(memory_path) as again:
            let_all_end(again)
            assert 24 == num_there(again)

    def test_thread_that_ends_late_leaves_its_turn(
        self, memory_path, kernel, monkeypatch
    ):
        """R-25: a close that did not wait for it keeps no memory from the others."""
        monkeypatch.setattr(_populate, "_JOIN_S", 0.0)
        with open_small(memory_path) as one, open_small(memory_path) as two:
            kernel.await_asked(1)
            assert one._slab.populator._has_turn
            one.close()
            kernel.let(24)
            let_all_end(two)
            assert 24 == num_there(two)

    def test_child_waits_for_no_lock_of_its_parents_thread(self, memory_path, kernel):
        """A fork while that thread looks whether to end is no deadlock."""
        with open_small(memory_path) as store:
            ends = store._slab.populator._ends
            with ends._cond:
                if not (child := os.fork()):
                    os._exit(0)
            assert 0 == os.waitpid(child, 0)[1]
            kernel.let(24)

    def test_lost_slab_gets_no_more(self, memory_path, kernel):
        """R-25: files that were removed are not filled any further."""
        store = open_small(memory_path)
        kernel.await_asked(1)
        for path in memory_path.iterdir():
            path.unlink()
        kernel.let(24)
        let_all_end(store)
        assert [0, 1] == kernel.wanted
        store.close()


class TestShortage:
    def watch(self, store: SlabStore) -> list[StoreGrowth]:
        """Return what the store tells from now on."""
        told: list[StoreGrowth] = []
        store.watch(told.append)
        return told

    def test_progress_is_told_by_tenths(self, memory_path, kernel):
        """R-25: an operator sees how far it is, and that it is over."""
        with open_small(memory_path) as store:
            told = self.watch(store)
            kernel.let(24)
            let_all_end(store)
        assert [3, 5, 8, 10, 12, 15, 17, 20, 22, 24] == [
            growth.nbytes // EXTENT for growth in told
        ]
        assert {CAPACITY} == {growth.total for growth in told}
        assert {""} == {growth.problem for growth in told}

    def test_who_follows_is_told_as_well(self, memory_path, kernel):
        """S2-04: each rank pins what there is by now, whoever has filled it; large slabs
        are told of more often than by tenths."""
        with open_small(memory_path) as store, open_small(memory_path) as other:
            told = self.watch(other)
            kernel.let(24)
            let_all_end(store, other)
        assert 10 == len(told)
        assert sorted(growth.nbytes for growth in told) == [
            growth.nbytes for growth in told
        ]
        assert CAPACITY == told[-1].nbytes
        assert len(kernel.wanted) == 48  # a follower lacks the page tables

    def test_large_slab_is_told_of_more_often(self, memory_path, kernel, monkeypatch):
        """S2-04: a tenth of a terabyte is a long time by way of staging memory."""
        monkeypatch.setattr(_populate, "_TOLD_BYTES", EXTENT)
        with open_small(memory_path) as store:
            told = self.watch(store)
            kernel.let(24)
            let_all_end(store)
        assert 20 < len(told)

    def test_what_is_told_lies_at_the_start(self, memory_path, kernel):
        """R-26: behind memory that was given back there is more; nobody is told of what lies
        behind a gap as if the gap were there, or a device would fault it in."""
        kernel.let(24)
        with open_small(memory_path) as store:
            let_all_end(store)
            save(store, KEYS[:288])
            store.forget(KEYS[:144])
        compact(memory_path, memory=True)
        kernel.let(1)  # the rest when somebody watches
        gaps = []
        with open_small(memory_path) as store:

            def tell(growth: StoreGrowth) -> None:
                front = growth.nbytes // EXTENT
                there = store._slab.arena.populated[:front]
                gaps.append(int(np.count_nonzero(~there)))

            store.watch(tell)
            kernel.let(24)
            let_all_end(store)
        assert [0] * len(gaps) == gaps
        assert len(gaps) > 1

    def test_last_word_is_told_to_who_watches_late(self, memory_path, kernel):
        """R-25: who opens a slab that is there, or watches when it is, is told so."""
        kernel.let(24)
        with open_small(memory_path) as store:
            let_all_end(store)
            told = self.watch(store)
            with open_small(memory_path) as other:
                let_all_end(other)
                told += self.watch(other)
        assert [StoreGrowth(CAPACITY, CAPACITY)] * 2 == told

    def test_memory_that_ends_half_way_is_told_and_nothing_is_killed(
        self, memory_path, kernel, monkeypatch, tmp_path
    ):
        """R-25: limits are looked at before each step; the slab stays as large as it
        got, and serves."""
        with open_small(memory_path) as store:
            told = self.watch(store)
            kernel.await_asked(1)
            limit = f"{EXTENT + CAPACITY // 16 - 1}"
            system = make_system(
                tmp_path / "system",
                {
                    "proc/self/cgroup": "0::/box\n",
                    "sys/fs/cgroup/box/memory.max": limit,
                    "sys/fs/cgroup/box/memory.current": "0",
                },
            )
            monkeypatch.setattr(_creation, "SYSTEM", system)
            kernel.let(24)
            let_all_end(store)
            assert 2 == num_there(store)
            assert (2 * EXTENT, CAPACITY) == (told[-1].nbytes, told[-1].total)
            assert f"{limit} bytes are left of the limit" in told[-1].problem
            assert 24 == save(store, KEYS[:24])
            assert 1 == save(store, KEYS[30:31])
            assert 24 == store.stats().committed_blocks
            assert [payload(KEYS[30])] == load(store, KEYS[30:31])
            monkeypatch.setattr(_creation, "SYSTEM", Path("/"))
            with open_small(memory_path) as other:  # there is memory again
                let_all_end(other)
                assert 24 == num_there(store)

    def test_only_step_that_comes_to_nothing_is_told(self, memory_path, monkeypatch):
        """R-25: the last word of a small slab is why it has no memory, not that it has all."""

        def populate(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(_populate, "populate", populate)
        with open_small(memory_path) as store:
            (told,) = self.watch(store)
        assert (0, CAPACITY) == (told.nbytes, told.total)
        assert "Cannot allocate memory" in told.problem

    def test_kernel_that_refuses_is_told(self, memory_path, kernel):
        """R-25: a full memory disk is an error of the step, not a signal."""
        with open_small(memory_path) as store:
            told = self.watch(store)
            kernel.await_asked(1)
            kernel.fails = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            kernel.let(24)
            let_all_end(store)
            assert [1] == [growth.nbytes // EXTENT for growth in told]
            assert "Cannot allocate memory" in told[0].problem
            assert 12 == save(store, KEYS[:12])
