# SPDX-License-Identifier: Apache-2.0
"""R-41: what a host has called at an end harms neither others nor our threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent import futures

import pytest

from tests.cache.kit import LIMIT_S, Host, keys_of, leaving_nothing
from tests.cache.test_begun import told
from ucm.cache.pending import Pending
from ucm.cache.sync import Cache
from ucm.errors import PipelineClosedError, PipelineError
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

ERRORS = [RuntimeError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Return the kinds of what threads were told to have raised."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda told: seen.append(told.exc_type)
    )
    return seen


def open_once_closing(cache: Cache, gate: Gate) -> None:
    """Open a gate when a close has begun, which then hears of all that is left at once."""
    with contextlib.suppress(PipelineClosedError):
        while True:
            cache.begin_load([], [])
    gate.open()


class TestRaises:
    @pytest.mark.parametrize("error", ERRORS)
    def test_call_that_raises_is_told_and_harms_nobody(
        self, error: type[BaseException], raised: list[type[BaseException]]
    ) -> None:
        """Whatever it raises: others of its save are called, and others' saves go on."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), range(2))
            save.when_over(raising(error()))
            over = told(save)
            gate.wait_reached()
            gate.open()
            assert over.wait(LIMIT_S)
            assert [error] == raised
            cache.save(keys_of(2, 1), range(2)).wait_committed()
            assert cache.load(keys_of(2, 1), range(4, 6)).is_whole
            assert "" == cache.statistics().failure

    def test_call_that_raises_loses_no_end_that_came_with_its_own(
        self, raised: list[type[BaseException]]
    ) -> None:
        """Two saves of whose ends the library hears together."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            first = cache.save(keys_of(2), range(2))
            second = cache.save(keys_of(2, 1), range(2, 4))
            first.when_over(raising(ValueError("of the host's own")))
            gate.wait_reached()
            with futures.ThreadPoolExecutor(1) as pool:
                pool.submit(open_once_closing, cache, gate)
                cache.close()
            assert second.wait_committed().is_whole
            assert [ValueError] == raised

    def test_interrupted_call_of_the_main_thread_loses_no_end_of_others(self) -> None:
        """Ctrl-C is for the host: it is raised, once everybody has been told."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        cache = Cache(*host.open_core())
        first = cache.save(keys_of(2), range(2))
        second = cache.save(keys_of(2, 1), range(2, 4))
        first.when_over(raising(KeyboardInterrupt()))
        over = told(first)
        gate.wait_reached()
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(open_once_closing, cache, gate)
            with pytest.raises(KeyboardInterrupt):
                cache._core.close()
        assert over.is_set()
        assert second.is_over
        assert second.wait_committed().is_whole

    def test_call_at_once_stands_alone_as_well(
        self, raised: list[type[BaseException]]
    ) -> None:
        """What it raises does not depend on whether the end was first."""
        with leaving_nothing(host := Host()), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), range(2))
            save.wait_committed()
            save.when_over(raising(KeyError()))
            load = cache.begin_load(keys_of(2), range(4, 6))
            load.wait()
            load.when_over(raising(OSError()))
        assert [KeyError, OSError] == raised

    def test_waiter_that_raises_keeps_no_other_from_being_called(self) -> None:
        """Also one of ours, which is not expected to."""
        pending, called = Pending[int](threading.Lock()), []
        pending.subscribe(raising(ValueError()))
        pending.subscribe(lambda: called.append(pending.result()))
        with pytest.raises(ValueError, match=r"^$"):
            pending.end(3)
        assert [3] == called


VERBS: dict[str, Callable[[Cache], object]] = {
    "match": lambda cache: cache.match(keys_of(1)),
    "contains": lambda cache: cache.contains(keys_of(1)),
    "prefetch": lambda cache: cache.prefetch(keys_of(1)),
    "load": lambda cache: cache.load(keys_of(1), [9]),
    "touch": lambda cache: cache.touch(keys_of(1)),
    "retain": lambda cache: cache.retain(keys_of(1), ttl=1.0),
    "forget": lambda cache: cache.forget(keys_of(1)),
    "flush": Cache.flush,
    "measure": Cache.measure,
    "statistics": Cache.statistics,
    "close": Cache.close,
    "wait": lambda cache: cache.begin_load(keys_of(1), [9]).wait(),
    "wait_released": lambda cache: cache.save(keys_of(1, 7), [8]).wait_released(),
}


class TestBlocks:
    @pytest.mark.parametrize("verb", VERBS)
    def test_verb_that_blocks_is_refused_in_a_call(
        self, verb: str, raised: list[type[BaseException]]
    ) -> None:
        """At once, where it would wait for the thread that it stands on."""
        with leaving_nothing(host := Host()), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(1), [0])
            save.when_over(lambda: VERBS[verb](cache))
            assert told(save).wait(LIMIT_S)
            cache.flush()
            assert [PipelineError] == raised
            assert 1 == cache.match(keys_of(1))

    def test_what_does_not_block_may_be_called(
        self, raised: list[type[BaseException]]
    ) -> None:
        """Its own result, and whatever is begun."""
        seen: list[object] = []
        with leaving_nothing(host := Host()), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(1), [0])

            def over() -> None:
                save.when_over(lambda: seen.append("nested"))
                seen.append(save.wait_committed().is_whole)
                seen.append(cache.begin_load(keys_of(1), [9]))

            save.when_over(over)
            assert told(save).wait(LIMIT_S)
            cache.flush()
            assert seen[2].wait().is_whole
        assert ["nested", True] == seen[:2]
        assert [] == raised
