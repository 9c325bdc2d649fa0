# SPDX-License-Identifier: Apache-2.0
"""R-41: the same verbs for a host without a loop, on any of its threads."""

import sys
import threading
from collections.abc import Callable
from concurrent import futures
from types import FrameType
from typing import Any, NoReturn

import pytest

from tests.cache.kit import Host, keys_of, leaving_nothing, span_of
from tests.clocks import AdvancingThreads
from ucm.cache.forgetting import Forgotten
from ucm.cache.sync import Cache
from ucm.devices.cpu import CPUDevice
from ucm.errors import (
    BlockInUseError,
    DeviceTimeoutError,
    PipelineClosedError,
    StoreUnavailableError,
)
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising


def interrupted_at(nth: int, call: Callable[[], object]) -> bool:
    """Call; return whether there was an *nth* point in the library, to interrupt it at."""
    points = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal points
        if "/ucm/cache/" in frame.f_code.co_filename and event in ("call", "c_return"):
            points += 1
            if points > nth:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    try:
        sys.setprofile(look)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


class CopiesItself(CPUDevice):
    """A device whose copies go on by themselves, as an accelerator's do."""

    is_synchronous = False


class TestVerbs:
    def test_accelerator_has_larger_tickets(self) -> None:
        """Our own way of a ticket takes as long as its copy: four times as many blocks go by
        one of a save, and eight times as many by one of a load."""
        host = Host(config=span_of(), make_device=CopiesItself)
        keys = keys_of(20)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys, range(20))
            assert save.wait_committed().is_whole
            assert [8, 8, 4] == [
                len(order.block_ids) for order in save._transfer.orders.values()
            ]
            assert 1 == cache.forget(keys[18:19]).in_store
            assert 16 == cache.load(keys, range(20, 40)).leading

    def test_each_does_what_its_awaitable_twin_does(self) -> None:
        """Saved, found, loaded, kept, counted and forgotten."""
        host = Host(config=span_of())
        keys = keys_of(5)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            assert 0 == cache.match(keys)
            save = cache.save(keys, range(5))
            save.wait_released()
            assert save.wait_committed().is_whole
            assert save.is_over
            assert 5 == cache.match(keys)
            assert [True, False] == cache.contains([keys[4], keys_of(6)[5]])
            assert cache.load(keys, range(20, 25)).is_whole
            assert host.content(range(5)) == host.content(range(20, 25))
            cache.touch(keys)
            cache.retain(keys, ttl=1.0)
            cache.flush()
            told = cache.statistics()
            assert (5, 5) == (told.saved_blocks, told.loaded_blocks)
            assert Forgotten(2) == cache.forget(keys[3:])
            assert 3 == cache.load(keys, range(20, 25)).leading + 1

    def test_wait_without_end_is_a_wait(self) -> None:
        """Who gives no limit says infinity, which no lock of Python's takes."""
        host = Host()
        keys, ever = keys_of(2), float("inf")
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save(keys, range(2)).wait_committed()
            assert 2 == cache.match(keys, timeout=ever)
            assert [True, True] == cache.contains(keys, timeout=1e10)
            assert 2 == cache.prefetch(keys, timeout=ever).found
            assert cache.begin_load(keys, [4, 5]).wait_until_over(ever)

    def test_saves_of_many_threads_are_all_stored(self) -> None:
        """Calls of several threads at once neither mix nor lose anything."""
        host = Host(config={"queue": {"tickets": 2}})
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            ends = []

            def save(first: int) -> None:
                for seed in range(first, first + 20):
                    saved = cache.save(keys_of(2, seed), [3, 4], wait_for_room=True)
                    ends.append(saved.wait_committed().kind)

            threads = [
                threading.Thread(target=save, args=(at,)) for at in range(0, 80, 20)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [OutcomeKind.COMMITTED] * 80 == ends
            assert 160 == cache.statistics().saved_blocks

    def test_line_moves_without_a_newcomer(self) -> None:
        """The last to wait for room is let in by the end of the one before."""
        gate = Gate()
        config = {"queue": {"tickets": 1}, "timeout": {"save": 10.0, "stuck": 10.0}}
        host = Host(FaultPlan(Fault("commit", gate)), config)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save(keys_of(1), [0], wait_for_room=True)
            gate.wait_reached()
            second = cache.save(keys_of(1, 1), [1], wait_for_room=True)
            assert 1 == cache.statistics().waiting_parts
            gate.open()
            assert second.wait_committed().is_whole

    def test_line_moves_into_the_room_of_who_was_cancelled(self) -> None:
        """They were refused, as if they had not waited, until a sweep came by."""
        gate = Gate()
        host = Host(FaultPlan(Fault("reserve", gate)), {"queue": {"tickets": 64}})
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            first = cache.save(keys_of(1), [0])
            gate.wait_reached()
            saves = [
                cache.save(keys_of(1, 1 + at), [1 + at % 63], wait_for_room=True)
                for at in range(123)
            ]
            assert 60 == cache.statistics().waiting_parts
            for save in saves[:63]:
                save.cancel()
            for save in saves[:63]:
                assert Reason.WITHDRAWN is save.wait_committed().reason
            gate.open()
            assert all(each.wait_committed().is_whole for each in (first, *saves[63:]))

    def test_cancelled_save_is_over(self) -> None:
        """Whoever waits for it on another thread hears of it."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            save = cache.save(keys_of(2), range(2))
            gate.wait_reached()
            save.cancel()
            assert OutcomeKind.CANCELLED is save.wait_committed().kind
            gate.open()


class TestMistakes:
    def test_closed_cache_says_so(self) -> None:
        """Each verb, before anything else."""
        host = Host()
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            pass
        one = keys_of(1)
        for verb in (
            lambda: cache.match(one),
            lambda: cache.load(one, [1]),
            lambda: cache.save(one, [1]),
            lambda: cache.touch(one),
            lambda: cache.forget(one),
            cache.statistics,
        ):
            with pytest.raises(PipelineClosedError):
                verb()

    def test_block_is_not_written_by_two_threads(self) -> None:
        """The second load of a block is refused while the first goes on."""
        gate = Gate()
        host = Host(FaultPlan(Fault("read", gate)))
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            thread = threading.Thread(target=cache.load, args=(keys_of(2), [0, 1]))
            thread.start()
            gate.wait_reached()
            with pytest.raises(BlockInUseError):
                cache.load(keys_of(1), [1])
            gate.open()
            thread.join()

    def test_store_that_does_not_answer_is_not_waited_for(self) -> None:
        """A look-up is a miss at its deadline; other questions have an error."""
        gate = Gate()
        host = Host(FaultPlan(Fault("match", gate)), {"timeout": {"load": 0.05}})
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            assert 0 == cache.match(keys_of(1))
            assert [False] == cache.contains(keys_of(1))
            with pytest.raises(StoreUnavailableError):
                cache.statistics()
            gate.open()

    @pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("bug")])
    def test_store_that_raises_anything_has_nothing(self, error: Exception) -> None:
        """R-81: no host knows what a store of somebody else's may raise."""
        host = Host(
            FaultPlan(*(Fault(verb, raising(error)) for verb in ("match", "contains")))
        )
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            answer = cache.begin_contains(keys_of(1))
            assert 0 == cache.match(keys_of(1))
            with pytest.raises(StoreUnavailableError, match=str(error)) as told:
                answer.result()
            assert error is told.value.__cause__

    def test_load_that_is_interrupted_leaves_nothing_that_writes(self) -> None:
        """Whatever a signal's handler raises: its blocks are the host's again then."""
        gate, waits = Gate(), list[threading.Event]()
        host = Host(FaultPlan(Fault("scatter", gate)))

        class Interrupted(threading.Event):
            def wait(self, timeout: float | None = None) -> NoReturn:
                gate.wait_reached()
                raise KeyboardInterrupt

        def new_event() -> threading.Event:
            if waits:
                gate.open()  # somebody waits for what goes on
            waits.append(threading.Event() if waits else Interrupted())
            return waits[-1]

        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save(keys_of(2), [0, 1]).wait_committed()
            core: Any = cache._core
            core.new_event = new_event
            with pytest.raises(KeyboardInterrupt):
                cache.load(keys_of(2), [4, 5])
            assert 0 == len(core._users)

    @pytest.mark.parametrize("verb", ["load", "save"])
    def test_caller_interrupted_anywhere_leaves_nothing_that_goes_on(
        self, verb: str
    ) -> None:
        """Wherever Python looks for signals: calls of ours, and ends of the others."""
        host, keys = Host(), keys_of(2)
        with leaving_nothing(host), Cache(*host.open_core()) as cache:
            cache.save(keys, [0, 1]).wait_committed()
            call: Callable[..., object] = getattr(cache, verb)
            nth = 0
            while interrupted_at(nth, lambda: call(keys, [4, 5])):
                assert 0 == len(host.core._users)  # they are the host's again
                nth += 1
            cache.flush()
            assert 20 < nth

    def test_load_that_never_ends_is_an_error_with_a_name(self) -> None:
        """Its blocks are still written to: the host must not believe they are free."""
        gate, threads = Gate(), AdvancingThreads()
        host = Host(
            FaultPlan(Fault("scatter", gate)),
            {"timeout": {"shutdown": 0.2}},
            threads=threads,
        )
        cache = Cache(*host.open_core())
        cache.save(keys_of(2), [0, 1]).wait_committed()
        with futures.ThreadPoolExecutor(1) as pool:
            load = pool.submit(cache.load, keys_of(2), [4, 5])
            gate.wait_reached()
            while not load.done():
                threads.advance(100.0)  # its deadline, then that of its copy
                futures.wait([load], 0.01)
        with pytest.raises(DeviceTimeoutError):
            load.result()
        with pytest.raises(BlockInUseError):
            cache.load(keys_of(2), [5, 6])
        assert "stuck" in cache.statistics().failure
        cache.close()
        gate.open()
        host.join()

    def test_close_that_is_interrupted_closes_all_the_same(self) -> None:
        """Ctrl-C while it drains left the loop running, and a second close did nothing."""
        nth, is_interrupted = 0, True
        while is_interrupted:
            host = Host()
            with leaving_nothing(host):
                cache = Cache(*host.open_core())
                save = cache.save(keys_of(2), [0, 1])
                is_interrupted = interrupted_at(nth, cache.close)
                cache.close()
                assert save.is_over
                host.join()
            nth += 1
        assert 1 < nth

    def test_close_of_two_threads_closes_in_order(self) -> None:
        """What was opened last is closed before the rest, whoever closes it."""
        host, gate = Host(), Gate()
        core, opened = host.open_core()
        closed: list[str] = []

        def last() -> None:
            gate()
            closed.append("last")

        opened.callback(closed.append, "first")
        opened.callback(last)
        cache = Cache(core, opened)
        with leaving_nothing(host), futures.ThreadPoolExecutor(2) as pool:
            one = pool.submit(cache.close)
            gate.wait_reached()
            other = pool.submit(cache.close)
            futures.wait([other], 0.1)  # as long as one that does not wait takes
            gate.open()
            futures.wait([one, other])
        assert ["last", "first"] == closed
