# SPDX-License-Identifier: Apache-2.0
"""R-41: what a host's thread begins that may not wait, and looks at step by step."""

import threading

import pytest

from tests.cache.kit import LIMIT_S, Host, keys_of, leaving_nothing, span_of
from tests.clocks import AdvancingThreads
from ucm.cache.sync import Cache
from ucm.errors import DeviceTimeoutError, PipelineClosedError, StoreUnavailableError
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate


def told(begun) -> threading.Event:
    """Return what is set when something that was begun is over."""
    over = threading.Event()
    begun.when_over(over.set)
    return over


class TestLoad:
    def test_is_over_when_its_blocks_hold_what_was_saved(self) -> None:
        """Begun at once, told of once, and then its result is there."""
        gate = Gate()
        host = Host(FaultPlan(Fault("scatter", gate)), span_of())
        keys = keys_of(5)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save(keys, range(5)).wait_committed()
            load = cache.begin_load(keys, range(20, 25))
            over = told(load)
            gate.wait_reached()
            assert not load.is_over
            assert not over.is_set()
            gate.open()
            assert over.wait(LIMIT_S)
            assert load.is_over
            assert load.wait().is_whole
            assert host.content(range(5)) == host.content(range(20, 25))
            assert told(load).is_set()

    def test_that_never_ends_is_told_of_as_an_error(self) -> None:
        """Its blocks are still written to, and the host must know."""
        gate, threads = Gate(), AdvancingThreads()
        host = Host(
            FaultPlan(Fault("scatter", gate)),
            {"timeout": {"shutdown": 0.05}},
            threads=threads,
        )
        cache = Cache(*host.open_core())
        cache.save(keys_of(2), [0, 1]).wait_committed()
        over = told(load := cache.begin_load(keys_of(2), [4, 5]))
        gate.wait_reached()
        while not over.wait(0.01):
            threads.advance(100.0)  # its deadline, then that of its copy
        with pytest.raises(DeviceTimeoutError):
            load.wait()
        cache.close()
        gate.open()
        host.join()


class TestSave:
    def test_is_told_of_behind_its_last_word(self) -> None:
        """Not when its blocks are free, which is earlier."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), range(2))
            over = told(save)
            gate.wait_reached()
            save.wait_released()
            assert not over.is_set()
            gate.open()
            assert over.wait(LIMIT_S)
            assert save.wait_committed().is_whole

    def test_that_is_cancelled_is_told_of_when_its_blocks_are_free(self) -> None:
        """Its last word comes while a copy still reads them."""
        gate = Gate()
        host = Host(FaultPlan(Fault("gather", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), range(2))
            over = told(save)
            gate.wait_reached()
            save.cancel()
            assert OutcomeKind.CANCELLED is save.wait_committed().kind
            assert not over.is_set()
            gate.open()
            assert over.wait(LIMIT_S)
            save.wait_released()

    def test_that_is_refused_is_told_of(self) -> None:
        """A full queue ends it before anything of it has begun."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)), {"queue": {"tickets": 1}})
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            saves = [cache.save(keys_of(1, at), [at]) for at in range(4)]
            gate.wait_reached()
            over = told(saves[-1])
            assert over.wait(LIMIT_S)
            assert Reason.QUEUE_TICKETS is saves[-1].wait_committed().reason
            gate.open()


class TestAnswer:
    def test_tells_of_each_key(self) -> None:
        """Whatever is missing before it."""
        host, keys = Host(), keys_of(4)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save([keys[0], keys[2]], [0, 2]).wait_committed()
            answer = cache.begin_contains(keys)
            cache.statistics()  # asked behind it
            assert answer.is_over
            assert [True, False, True, False] == answer.result()

    def test_that_is_late_is_over(self) -> None:
        """The host goes on at the deadline that it gave, and not before."""
        gate, threads = Gate(), AdvancingThreads()
        plan = FaultPlan(Fault("contains", gate))
        host = Host(plan, {"timeout": {"load": 60.0}}, threads=threads)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            answer = cache.begin_contains(keys_of(1), timeout=20.0)
            gate.wait_reached()
            assert not answer.is_over
            threads.advance(21.0)
            assert answer.is_over
            with pytest.raises(StoreUnavailableError):
                answer.result()
            gate.open()

    @pytest.mark.parametrize("timeout", [-1.0, float("nan")])
    def test_that_could_never_be_late_is_not_begun(self, timeout: float) -> None:
        """It would be looked at for ever, were the store to hang."""
        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            with pytest.raises(ValueError, match="0 or more seconds"):
                cache.begin_contains(keys_of(1), timeout=timeout)
            assert {} == cache._core._questions._asked

    def test_store_that_fails_says_so(self) -> None:
        """What it raises is raised where the answer is taken."""

        def gone() -> None:
            raise StoreUnavailableError("gone")

        host = Host(FaultPlan(Fault("contains", gone)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            answer = cache.begin_contains(keys_of(1))
            cache.statistics()  # asked behind it
            with pytest.raises(StoreUnavailableError, match="gone"):
                answer.result()


def test_closed_cache_begins_nothing() -> None:
    """Each says so before anything else."""
    host = Host()
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        pass
    with pytest.raises(PipelineClosedError):
        cache.begin_load(keys_of(1), [1])
    with pytest.raises(PipelineClosedError):
        cache.begin_contains(keys_of(1))
