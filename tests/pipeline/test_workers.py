# SPDX-License-Identifier: Apache-2.0
"""Copy threads: order, errors, death and results that nobody wants any more."""

import asyncio
import contextlib
import threading
from queue import SimpleQueue

import pytest

from tests.pipeline.kit import TIMEOUT
from ucm.errors import WorkerDiedError
from ucm.pipeline.workers import CopyThread
from ucm.testing.faults import Gate
from ucm.threads import Threads

pytestmark = pytest.mark.asyncio
dies = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


@contextlib.contextmanager
def copying():
    """Run a copy thread on this test's loop; gives it and the list of its deaths."""
    deaths = []
    thread = CopyThread("ucm-test", deaths.append)
    thread.start()
    try:
        yield thread, deaths
    finally:
        thread.stop()
        assert thread.join(TIMEOUT)


def raising_for(what):
    """Return what raises whatever it is told."""

    def act(_):
        raise ZeroDivisionError(what)

    return act


def die(_):
    """End the thread it runs on."""
    raise SystemExit


def run(thread, function, argument):
    """Queue a job; return the future of its result, or of its thread's death."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def tell(result):
        loop.call_soon_threadsafe(future.set_result, result)

    thread.put(lambda each: tell(function(each)), argument, lambda _, why: tell(why))
    return asyncio.wait_for(future, TIMEOUT)


@contextlib.contextmanager
def sharing(count):
    """Run several copy threads that share their jobs; gives them and their deaths."""
    deaths = []
    thread = CopyThread("ucm-test", deaths.append, count=count)
    thread.start()
    try:
        yield thread, deaths
    finally:
        thread.stop()
        assert thread.join(TIMEOUT)


async def death_of(job):
    """Return the text of the error of a job whose thread has died."""
    error = await job
    assert isinstance(error, WorkerDiedError)
    return str(error)


class TestResults:
    async def test_jobs_run_in_order_on_the_thread(self):
        """Jobs run one after the other, on the one thread, and results come back to
        whoever asked."""
        ran = []

        def job(number):
            ran.append((number, threading.current_thread().name))
            return number * 2

        with copying() as (thread, deaths):
            jobs = [run(thread, job, number) for number in range(20)]
            assert [2 * n for n in range(20)] == [await one for one in jobs]
        assert [(n, "ucm-test") for n in range(20)] == ran
        assert [] == deaths

    async def test_error_of_a_job_that_cleans_up_ends_nothing(self):
        """What cleans up may fail, and nobody waits for it; the thread goes on."""
        with copying() as (thread, deaths):
            thread.put(int, "no number")
            assert 7 == await run(thread, int, "7")
        assert [] == deaths

    async def test_jobs_that_clean_up_run_before_the_thread_stops(self):
        """Nobody waits for it, and stop lets the thread finish what it has."""
        ran = []
        with copying() as (thread, _):
            for number in range(5):
                thread.put(ran.append, number)
        assert [0, 1, 2, 3, 4] == ran

    @pytest.mark.parametrize("is_over", [False, True])
    async def test_no_job_is_lost_behind_the_end(self, is_over):
        """Whoever waits for a job that came too late is told, and what it holds is given
        back, whether the thread has ended by then or is about to."""
        gate, ran, told = Gate(), [], []
        with copying() as (thread, deaths):
            thread.put(lambda _: gate(), None)
            gate.wait_reached()
            thread.stop()
            if is_over:
                gate.open()
                assert thread.join(TIMEOUT)
            thread.put(ran.append, 1)
            thread.put(ran.append, 2, lambda _, why: told.append(str(why)))
            gate.open()
            assert thread.join(TIMEOUT)
            assert ([1], ["copy thread ucm-test has ended"]) == (ran, told)
        assert [] == deaths

    async def test_join_of_a_busy_thread_says_no_in_time(self):
        """Joining is bounded and tells whether the thread has ended."""
        gate = Gate()
        with copying() as (thread, _):
            thread.put(lambda _: gate(), None)
            gate.wait_reached()
            thread.stop()
            assert not thread.join(0)
            gate.open()


class TestSeveral:
    async def test_jobs_run_on_as_many_threads_at_once(self):
        """A job does not wait for another while a thread is free; all end together."""
        gates = [Gate() for _ in range(3)]

        def job(gate):
            gate()
            return threading.current_thread().name

        with sharing(3) as (thread, deaths):
            jobs = [run(thread, job, gate) for gate in gates]
            for gate in gates:
                gate.wait_reached()
            for gate in gates:
                gate.open()
            names = {await one for one in jobs}
        assert {"ucm-test-0", "ucm-test-1", "ucm-test-2"} == names
        assert [] == deaths

    @dies
    @pytest.mark.parametrize("stops_first", [False, True])
    async def test_death_of_one_ends_the_others_behind_their_own_job(self, stops_first):
        """What runs elsewhere goes on, what nobody has begun fails, and no thread stays,
        whether it was stopped before or is afterwards."""
        gates = [Gate(), Gate()]
        with sharing(2) as (thread, deaths):
            dying = run(thread, lambda gate: gate() or die(None), gates[0])
            living = run(thread, lambda gate: gate() or 7, gates[1])
            for gate in gates:
                gate.wait_reached()
            queued = run(thread, int, 1)
            if stops_first:
                thread.stop()
            gates[0].open()
            for job in (dying, queued):
                assert "ucm-test has died" in await death_of(job)
            gates[1].open()
            assert 7 == await living
            assert thread.join(TIMEOUT)
        assert ["copy thread ucm-test has died"] == deaths


@dies
class TestDeath:
    async def test_death_fails_running_and_queued_jobs_and_is_told_once(self):
        """S2-13: when the thread dies, each of its jobs fails and it is told once."""
        gate = Gate()
        with copying() as (thread, deaths):
            running = run(thread, lambda _: gate() or die(None), None)
            gate.wait_reached()
            queued = [run(thread, int, 1) for _ in range(3)]
            thread.stop()
            thread.put(die, None)
            gate.open()
            for job in (running, *queued):
                assert "ucm-test has died" in await death_of(job)
        assert ["copy thread ucm-test has died"] == deaths

    @dies
    async def test_jobs_fail_where_whoever_hears_of_the_death_raises(self):
        """Nobody waits for them, whatever becomes of who was told first."""
        thread = CopyThread("ucm-test", raising_for("death"))
        thread.start()
        jobs = [run(thread, die, None), run(thread, int, "1")]
        for job in jobs:
            assert "has died" in await death_of(job)
        assert thread.join(TIMEOUT)

    async def test_job_after_death_fails(self):
        """A dead thread takes no job in silence; a posted one runs where it is posted."""
        with copying() as (thread, deaths):
            await death_of(run(thread, die, None))
            thread.join(TIMEOUT)
            await death_of(run(thread, int, 1))
            ran = []
            thread.put(ran.append, 1)
            assert [1] == ran
        assert 1 == len(deaths)

    async def test_job_queued_while_the_thread_dies_fails(self):
        """A job that comes between the thread's last look and its end is not lost."""
        with copying() as (thread, _):

            class Late(SimpleQueue):
                def put(self, job):
                    assert thread.join(TIMEOUT)  # it dies just before the job is in
                    super().put(job)

            thread.put(die, None)
            thread._jobs = Late()
            await death_of(run(thread, int, 1))


class Lock(Threads):
    """A clock that jobs move, and what is done at which time; jobs end the thread's wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monotonic = lambda: self.now
        self.done: list[str] = []

    def give_way(self) -> None:
        """Take note."""
        self.done.append("way")


async def test_interpreter_lock_is_given_up_between_small_jobs_that_come_at_once() -> (
    None
):
    """A burst of small copies keeps the engine's thread waiting for one of them at most.
    Nobody waits longer for a job that was waited for, that only cleans up, or that comes
    behind one which took long, and gave the lock up for its bytes."""
    lock = Lock()
    thread = CopyThread("ucm-test", lambda _: None, lock)

    def job(told: tuple[str, float]) -> None:
        name, seconds = told
        lock.done.append(name)
        lock.now += seconds

    def put(name: str, seconds: float) -> None:
        thread.put(job, (name, seconds), lambda _, why: None)

    for name in ("first", "second"):
        put(name, 0.0004)
    thread.put(job, ("cleans up", 0.0))
    put("long", 0.01)
    put("behind it", 0.0)
    thread.put(lambda _: setattr(lock, "now", lock.now + 1.0), None)
    put("waited for", 0.0)
    thread.start()
    thread.stop()
    assert thread.join(TIMEOUT)
    assert [
        *("first", "way", "second", "cleans up", "way", "long"),
        *("behind it", "waited for"),
    ] == lock.done
