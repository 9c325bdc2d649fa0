# SPDX-License-Identifier: Apache-2.0
"""What a store of somebody else's tells, and raises, in the engine's processes."""

from typing import Any

import attrs
import numpy as np
import pytest

from tests.rig import order, running
from tests.stores.test_bypass import KEYS, Asked
from ucm.errors import StoreUnavailableError
from ucm.metrics import Counters
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.leases import told_count, told_each
from ucm.stores.memory import MemoryStore
from ucm.stores.opening import tell_store
from ucm.testing.store_blocks import BLOCK_BYTES, save


class PanicError(BaseException):
    """What native code raises, as PyO3's panic does: none of ``Exception``."""


class UnspeakableError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise AttributeError

    __repr__ = __str__


def test_numbers_of_numpy_are_plain_ones_to_a_scheduler() -> None:
    """An engine sends them to other processes, and ended over one that it could not encode."""
    asked = Asked()
    save(asked.store, KEYS)
    inner: Any = asked.store.inner
    inner.match = lambda keys: np.int64(2)
    inner.contains = lambda keys: np.array([True, False, True])
    assert (2, int) == (found := asked.store.match(KEYS), type(found))
    there = asked.store.contains(KEYS)
    assert [True, False, True] == there
    assert [list, bool] == [type(there), type(there[0])]


@pytest.mark.parametrize("wrong", [2.0, 4, -1, np.int64(4), np.float64(1), "2", None])
def test_what_counts_no_blocks_is_no_answer(wrong: object) -> None:
    """2.0 was taken for 2, and ended the engine as it cut a list there."""
    asked = Asked()
    asked.store.inner.match = lambda keys: wrong  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailableError, match="match"):
        asked.store.match(KEYS)
    assert 1 == asked.counters.total("ucm_failed_lookups_total")


@pytest.mark.parametrize("error", [PanicError("boo"), UnspeakableError()])
@pytest.mark.parametrize("verb", ["match", "contains", "touch"])
def test_look_up_that_raises_no_exception_has_no_answer(
    verb: str, error: BaseException
) -> None:
    """A panic of native code, or an error that cannot be told, ends no engine."""
    asked = Asked()

    def fail() -> None:
        raise error

    asked.store.inner.look = fail
    with pytest.raises(StoreUnavailableError, match=type(error).__name__):
        getattr(asked.store, verb)(KEYS)
    assert 1 == asked.counters.total("ucm_failed_lookups_total")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_signal_amid_a_look_up_is_the_engines(error: type[BaseException]) -> None:
    """Who is told to end by a signal ends, wherever that meets it."""
    asked = Asked()

    def fail() -> None:
        raise error

    asked.store.inner.look = fail
    with pytest.raises(error):
        asked.store.match(KEYS)
    assert 0 == asked.counters.total("ucm_failed_lookups_total")


@pytest.mark.parametrize("told", [np.int64(1), 1.0, None, -1, 2])
def test_commit_tells_plain_numbers_or_fails(told: Any) -> None:
    """A report with one of numpy's ended the engine, one with 1.0 was thrown away whole: its
    blocks were held for good."""
    with running() as rig:
        publish = MemoryStore.publish
        store = rig.store

        def tell(*lease: Any) -> Any:
            publish(store, *lease)
            return told

        store.publish = tell
        rig.submit(order(1, Direction.SAVE, [1], [1]))
        end = rig.settle()[1]
        assert type(end.committed) is type(end.skipped) is int
        is_well = isinstance(told, np.integer)
        kind = OutcomeKind.COMMITTED if is_well else OutcomeKind.FAILED
        assert (kind, int(is_well)) == (end.kind, end.committed)
        assert is_well or "commit" in end.error


@pytest.mark.parametrize("told", [np.int64(1), 1.0, None, 3])
def test_lease_tells_plain_numbers_or_fails(told: Any) -> None:
    """Of what was stored before as of what is stored now; nothing is stored else."""
    with running() as rig:
        store = rig.store
        reserve = store.reserve

        def tell(*asked: Any) -> Any:
            lease = reserve(*asked)
            lease.num_stored = told
            return lease

        rig.submit(order(1, Direction.SAVE, [1], [1]))
        rig.settle()
        store.reserve = tell
        rig.submit(order(2, Direction.SAVE, [1, 2], [1, 2]))
        end = rig.settle()[2]
        assert type(end.committed) is type(end.skipped) is int
        is_well = isinstance(told, np.integer)
        assert is_well == (end.kind is OutcomeKind.COMMITTED)
        assert 1 + is_well == store.stats().committed_blocks


def test_occupancy_is_told_in_plain_numbers() -> None:
    """One of numpy's ended the engine as it sent its metrics."""
    with MemoryStore(4, BLOCK_BYTES) as store:
        stats = store.stats()
    counters = Counters()
    wide = attrs.evolve(
        stats, committed_blocks=np.int64(3), evicted_blocks_total=np.int64(2)
    )
    tell_store(counters, wide)
    now = counters.snapshot()
    told = [now.gauges["ucm_store_committed_parts"]]
    told.append(now.counters["ucm_store_evicted_parts_total"])
    assert ([3, 2], {int}) == (told, {type(each) for each in told})
    for wrong in (None, -1, 1.5):
        with pytest.raises(StoreUnavailableError, match="committed_parts"):
            tell_store(counters, attrs.evolve(stats, committed_blocks=wrong))


def test_answers_are_counted() -> None:
    """Of each block that was asked about, and of no other."""
    assert [True, False] == told_each("contains", np.array([1, 0]), 2)
    with pytest.raises(StoreUnavailableError, match="of 1 blocks, not 2"):
        told_each("contains", [True], 2)
    assert 0 == told_count("match", 0, 0)
    with pytest.raises(StoreUnavailableError, match="told 1, of 0"):
        told_count("match", 1, 0)
