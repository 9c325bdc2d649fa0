# SPDX-License-Identifier: Apache-2.0
"""Wrappers: complete by their shape, backends by the contract, and what each one adds."""

import asyncio
import inspect

import anyio
import pytest

from tests.backends.test_memory import TestMemoryBackend as Memory
from tests.clocks import leaping
from ucm.backends.abc import Backend, Fetched, Presence, Verdict
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import BreakerBackend, DeadlineBackend, WrapperBackend
from ucm.testing.backend_contract import fetch, fetch_sound, seal
from ucm.testing.backend_faults import Trouble, TroubledBackend, Troubles
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(4)
VERBS = {
    name: member
    for name, member in inspect.getmembers(Backend)
    if not name.startswith("_")
}
GUARDED = ("exists", "get", "put", "delete", "stats")
UNAVAILABLE, UNKNOWN = Verdict.UNAVAILABLE, Presence.UNKNOWN


class Wrapped(Memory):
    """The contract through a wrapper of the model."""

    def wrap(self, backend):
        """Return it wrapped."""
        return WrapperBackend(backend)

    async def open(self, place):
        """Wrap the model."""
        return self.wrap(await super().open(place))

    async def open_small(self, place):
        """Wrap the small model."""
        return self.wrap(await super().open_small(place))


del Memory  # it has a file of its own


class TestWrapperBackend(Wrapped):
    """One that changes nothing."""


class TestDeadlines(Wrapped):
    """Deadlines that nothing reaches."""

    def wrap(self, backend):
        """Give it a minute."""
        return DeadlineBackend(backend, 60.0)


class TestBreaker(Wrapped):
    """A breaker that nothing trips."""

    def wrap(self, backend):
        """Stand still."""
        return BreakerBackend(backend, clock=lambda: 0.0)


class TestTroubled(Wrapped):
    """A plan without a trouble."""

    def wrap(self, backend):
        """Plan nothing."""
        return TroubledBackend(backend)


del Wrapped


def troubled(*troubles):
    """Return a backend with troubles."""
    return TroubledBackend(MemoryBackend(Shelf(1 << 20)), *troubles)


async def all_verbs(backend):
    """Return what each verb answers about two keys, as verdicts."""
    got = await fetch(backend, KEYS[:2])
    return (
        await backend.exists(KEYS[:2]),
        [one.verdict for one, _ in got],
        await backend.put([seal(key) for key in KEYS[:2]]),
        await backend.delete(KEYS[:2]),
    )


NO_ANSWER = ([UNKNOWN] * 2, *[[UNAVAILABLE] * 2] * 3)


class Spy:
    """Stands in for a backend and notes what it is asked."""

    def __init__(self):
        self.asked = []
        for at in ("capabilities", "away", "refusing", "trouble"):
            setattr(self, at, ("answer", at))

    def __getattr__(self, name):
        async def verb(*args):
            self.asked.append((name, args))
            return ["answer"]

        return verb


class TestShape:
    @pytest.mark.parametrize("name", VERBS)
    def test_wrapper_overrides_each_public_member(self, name):
        """A verb that a new version of ``Backend`` adds breaks this, not a user."""
        assert name in vars(WrapperBackend)
        if callable(VERBS[name]):
            ours = inspect.signature(vars(WrapperBackend)[name])
            assert inspect.signature(VERBS[name]) == ours

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "wrap",
        [
            WrapperBackend,
            TroubledBackend,
            lambda inner: DeadlineBackend(inner, 60.0),
            lambda inner: BreakerBackend(inner, clock=lambda: 0.0),
        ],
        ids=["wrapper", "troubled", "deadline", "breaker"],
    )
    @pytest.mark.parametrize("name", VERBS)
    async def test_wrapper_forwards_arguments_and_answer(self, wrap, name):
        """Each verb reaches the inner backend once, unchanged, and so does its answer."""
        spy = Spy()
        if not callable(VERBS[name]):
            assert ("answer", name) == getattr(wrap(spy), name)
            return
        verb = getattr(wrap(spy), name)
        args = [[number] for number, _ in enumerate(inspect.signature(verb).parameters)]
        answer = await verb(*args)
        assert [(name, args)] == [(asked, list(given)) for asked, given in spy.asked]
        has_answer = inspect.signature(verb).return_annotation is not None
        assert (["answer"] if has_answer else None) == answer


class TestDeadline:
    @leaping
    async def test_call_ends_at_its_deadline(self):
        """R-52, X-14: each verb of a backend that hangs ends in time, with no answer."""
        backend = DeadlineBackend(troubled(Trouble(Troubles.HANGS)), 2.0)
        loop = asyncio.get_running_loop()
        for number in range(1, 4):
            assert NO_ANSWER == await all_verbs(backend)
            assert number * 8.0 == pytest.approx(loop.time())
            assert 4 * number == backend.num_late

    @leaping
    async def test_slow_answer_within_the_deadline_counts(self):
        """One second of two is no reason to throw an answer away."""
        backend = DeadlineBackend(troubled(Trouble(Troubles.SLOW, seconds=1.0)), 2.0)
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
        assert [True] == await fetch_sound(backend, KEYS[:1])
        assert 0 == backend.num_late

    @leaping
    async def test_cancelled_caller_is_no_late_backend(self):
        """The caller's own deadline is told apart from this one."""
        backend = DeadlineBackend(troubled(Trouble(Troubles.HANGS)), 2.0)
        with anyio.move_on_after(1.0) as scope:
            await backend.exists(KEYS)
        assert scope.cancelled_caught
        assert 0 == backend.num_late

    @leaping
    async def test_what_is_not_about_blocks_ends_too(self):
        """Closing and registering wait no longer; statistics are the last ones known."""

        class Stuck(MemoryBackend):
            stats = register = aclose = lambda self, *args: anyio.sleep_forever()

        known = MemoryBackend(Shelf(100))
        backend = DeadlineBackend(known, 2.0)
        assert 100 == (await backend.stats()).capacity_bytes
        backend.inner = Stuck(Shelf(1))
        assert 100 == (await backend.stats()).capacity_bytes
        await backend.register([])
        await backend.aclose()
        assert 3 == backend.num_late


class Circuit:
    """A breaker around a backend with troubles, its clock, and what it told."""

    def __init__(self, *troubles):
        self.now = 100.0
        self.told = []
        self.inner = troubled(*troubles)
        self.backend = BreakerBackend(
            self.inner, clock=lambda: self.now, tell=self.told.append
        )

    @property
    def num_calls(self):
        """How often the inner backend was asked."""
        return self.inner.calls.total()

    async def ask(self):
        """Return what is known of a key that is not there."""
        (presence,) = await self.backend.exists(KEYS[:1])
        return presence


FAILS = Trouble(Troubles.FAILS)


@pytest.mark.asyncio
class TestCircuit:
    async def test_backend_that_fails_is_not_asked_for_a_while(self):
        """X-14: behind three bad calls no verb asks until the while is over."""
        circuit = Circuit(FAILS)
        for number in (1, 2, 3):
            assert (number > 3) == circuit.backend.is_open
            assert UNKNOWN is await circuit.ask()
        assert circuit.backend.is_open
        for _ in range(5):
            assert NO_ANSWER == await all_verbs(circuit.backend)
        assert None is (await circuit.backend.stats()).blocks
        assert (3, 21) == (circuit.num_calls, circuit.backend.num_skipped)
        assert [1.0] == circuit.told

    async def test_backend_that_takes_nothing_is_read(self):
        """X-14: puts that fail keep nobody from what is there, and only a put shows that it takes
        blocks again: a while that a good look ended would double never."""
        told = []
        inner = troubled()
        now = 100.0
        backend = BreakerBackend(
            inner, clock=lambda: now, tell_writes=told.append, bad_calls=3
        )
        for _ in range(9):
            inner.troubles[:] = [FAILS]
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[0])])
            inner.troubles.clear()
            assert [Presence.ABSENT] == await backend.exists(KEYS[:1])
            now += 1.01
        assert ([1.0, 2.0, 4.0], False, True) == (
            told,
            backend.is_open,
            backend.refuses,
        )
        now += 4.0
        assert 0.0 == backend.wait_s
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
        assert (0.0, False) == (told[-1], backend.refuses)

    async def test_one_call_tries_and_closes_the_circuit(self):
        """R-63: when the other side is back it is used again, by itself."""
        circuit = Circuit(FAILS)
        for _ in range(3):
            await circuit.ask()
        circuit.inner.troubles.clear()
        circuit.now += 0.99
        assert UNKNOWN is await circuit.ask()
        circuit.now += 0.02
        assert Presence.ABSENT is await circuit.ask()
        assert not circuit.backend.is_open
        assert [1.0, 0.0] == circuit.told
        assert 4 == circuit.num_calls

    async def test_while_doubles_up_to_a_bound(self):
        """A backend that stays down costs one call every thirty seconds."""
        circuit = Circuit(FAILS)
        for _ in range(3):
            await circuit.ask()
        for _ in range(7):
            circuit.now += 40.0
            await circuit.ask()
            await circuit.ask()
        assert [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0] == circuit.told
        assert 10 == circuit.num_calls

    async def test_only_one_call_at_a_time_tries(self):
        """A node full of waiting requests does not fall upon a server that comes back."""
        circuit = Circuit(FAILS)
        for _ in range(3):
            await circuit.ask()
        circuit.inner.troubles[:] = [Trouble(Troubles.HANGS)]
        circuit.now += 2.0
        async with anyio.create_task_group() as group:
            group.start_soon(circuit.ask)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(circuit.ask)
            await anyio.wait_all_tasks_blocked()
            assert 4 == circuit.num_calls
            group.cancel_scope.cancel()
        circuit.inner.troubles.clear()
        assert Presence.ABSENT is await circuit.ask()  # a cancelled try is none

    async def test_few_bad_calls_among_good_ones_change_nothing(self):
        """Two of eight may be bad for ever."""
        circuit = Circuit(
            *(Trouble(Troubles.FAILS, nth=at) for at in (1, 2, 9, 10, 17))
        )
        for _ in range(18):
            await circuit.ask()
        assert [] == circuit.told

    @pytest.mark.parametrize("what", [Troubles.PARTIAL, Troubles.ANSWER_LOST])
    async def test_half_an_answer_is_a_bad_one(self, what):
        """A call of whose blocks some got no answer counts as bad, and is passed on."""
        circuit = Circuit(Trouble(what))
        for _ in range(3):
            told = await circuit.backend.exists(KEYS)
        assert UNKNOWN in told
        assert [1.0] == circuit.told

    async def test_full_garbage_and_absent_are_answers(self):
        """A backend that says no, or has rubbish, is not down."""
        circuit = Circuit()
        circuit.inner.inner.shelf.values[KEYS[0]] = b"rubbish"
        for _ in range(9):
            told = [one.verdict for one, _ in await fetch(circuit.backend, KEYS[:2])]
            assert [Verdict.GARBAGE, Verdict.ABSENT] == told
            big = seal(KEYS[1], 1 << 20)
            assert [Verdict.FULL] == await circuit.backend.put([big])
        assert [] == circuit.told

    async def test_call_from_before_says_nothing_about_now(self):
        """One that began while all was well neither closes nor lengthens the while."""
        circuit = Circuit(Trouble(Troubles.OVERTAKEN, nth=1, seconds=60.0), FAILS)
        async with anyio.create_task_group() as group:
            group.start_soon(circuit.ask)
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                await circuit.ask()
            assert circuit.backend.is_open
            await circuit.inner.inner.exists(KEYS)
            circuit.inner.troubles.clear()
            await circuit.inner.exists(KEYS)  # overtakes the first, past the breaker
        assert circuit.backend.is_open
        assert [1.0] == circuit.told


class TestTroubles:
    @leaping
    async def test_each_trouble_is_what_it_says(self):
        """The wrapper that troubles others does so, and tells how often it was asked."""
        backend = troubled()
        await backend.put([seal(key) for key in KEYS])

        async def under(what):
            backend.troubles[:] = [Trouble(what)]
            told = await backend.exists(KEYS[:2]), await fetch(backend, KEYS[:2])
            backend.troubles.clear()
            return told[0], [(got, data) for got, data in told[1]]

        seals = [seal(key) for key in KEYS[:2]]
        right = [
            (Fetched(Verdict.DONE, one.checksum), bytes(one.data)) for one in seals
        ]
        there, got = await under(Troubles.SLOW)
        assert ([Presence.PRESENT] * 2, right) == (there, got)
        assert 2.0 == pytest.approx(asyncio.get_running_loop().time())
        there, got = await under(Troubles.ANSWER_LOST)
        assert ([UNKNOWN] * 2, [UNAVAILABLE] * 2) == (
            there,
            [a.verdict for a, _ in got],
        )
        assert [data for _, data in right] == [data for _, data in got]
        there, got = await under(Troubles.PARTIAL)
        assert ([Presence.PRESENT, UNKNOWN], right[0]) == (there, got[0])
        assert UNAVAILABLE is got[1][0].verdict
        _, got = await under(Troubles.GARBAGE)
        assert [one for one, _ in right] == [one for one, _ in got]
        assert all(
            ours != wrong for (_, ours), (_, wrong) in zip(right, got, strict=True)
        )
        there, got = await under(Troubles.LIES)
        assert [Presence.PRESENT] * 2 == there
        assert [Fetched(Verdict.DONE, 1)] * 2 == [one for one, _ in got]
        assert {"put": 1, "exists": 5, "get": 5} == backend.calls

    @leaping
    async def test_overtaken_call_ends_behind_the_next(self):
        """Answers come in another order than they were asked for."""
        backend, ended = troubled(Trouble(Troubles.OVERTAKEN, nth=1, seconds=9.0)), []

        async def ask(name):
            await backend.exists(KEYS)
            ended.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "first")
            await anyio.wait_all_tasks_blocked()
            group.start_soon(ask, "second")
        assert ["second", "first"] == ended
