# SPDX-License-Identifier: Apache-2.0
"""A Mooncake client that gives transfers up, which go on: whoever made the call has its memory back behind them."""

import ctypes
import threading

import anyio
import anyio.lowlevel
import pytest

from tests.backends.test_mooncake import KEYS, FakeClient, fake_native, settings
from ucm.backends.abc import Presence, Verdict
from ucm.backends.mooncake import _STAGED_BYTES, MooncakeBackend
from ucm.testing.backend_contract import fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
LATE = b"\x11" * 8


class Clock:
    """A wall clock that somebody sets."""

    now = 1e9

    def __call__(self):
        """Say what it shows."""
        return self.now


class Leaving(FakeClient):
    """One that gives up what it was asked a minute ago, and whose transfers go on until it is closed."""

    def __init__(self, objects):
        super().__init__(objects)
        self.clock, self.left = None, []

    def _give_up(self, names, addresses, sizes):
        self.clock.now += 61
        for its in zip(addresses, sizes, strict=True):
            self.left += zip(*its, strict=True)
        return [-800] * len(names)

    def land(self):
        """Have write what still may."""
        for address, nbytes in [] if self.is_closed else self.left:
            ctypes.memset(address, LATE[0], nbytes)


class LeavingReads(Leaving):
    """One of gets."""

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        """Give up while the clock has one."""
        if self.clock:
            return self._give_up(names, addresses, sizes)
        return super().batch_get_into_multi_buffers(names, addresses, sizes)


class LeavingWrites(Leaving):
    """One of puts."""

    def batch_put_from_multi_buffers(self, names, addresses, sizes, more):
        """Likewise."""
        if self.clock:
            return self._give_up(names, addresses, sizes)
        return super().batch_put_from_multi_buffers(names, addresses, sizes, more)


def native_of(kind, objects, made):
    """Return a client's module that keeps whom it makes."""

    def make(objects):
        made.append(kind(objects))
        return made[-1]

    return fake_native(objects, make)


@pytest.mark.parametrize("nbytes", [4096, _STAGED_BYTES + 1])
async def test_read_that_goes_on_writes_into_nobody_s_memory(nbytes):
    """R-52: once the wall clock is set ahead amid a get, the client gives its transfers up, which wrote into
    slots that were others' by then; they end before, and the tier goes on with another client."""
    made, objects, clock = [], {}, Clock()
    native = native_of(LeavingReads, objects, made)
    backend = MooncakeBackend(native, settings(threads=1), clock)
    put = await backend.put([seal(key, nbytes) for key in KEYS])
    assert [Verdict.DONE] * 3 == put
    made[0].clock = clock
    told = await fetch(backend, KEYS, nbytes)
    assert [Verdict.UNAVAILABLE] * 3 == [one.verdict for one, _ in told]
    made[0].land()
    assert made[0].is_closed
    assert not any(LATE in bytes(target) for _, target in told)
    assert [True] * 3 == await fetch_sound(backend, KEYS, nbytes)
    assert 2 == len(made)
    await backend.aclose()
    assert made[1].is_closed


async def test_write_that_goes_on_reads_nobody_s_memory():
    """R-52: likewise of a put: what lies there later is no block of that name."""
    made, clock = [], Clock()
    backend = MooncakeBackend(native_of(LeavingWrites, {}, made), settings(), clock)
    assert [Presence.ABSENT] * 3 == await backend.exists(KEYS)
    made[0].clock = clock
    blocks = [seal(key) for key in KEYS]
    assert [Verdict.UNAVAILABLE] * 3 == await backend.put(blocks)
    assert made[0].is_closed
    assert [Verdict.DONE] * 3 == await backend.put(blocks)
    await backend.aclose()


async def test_client_is_closed_behind_the_calls_of_others():
    """R-52: it would crash amid them; who may have left transfers behind waits for those, and nobody
    begins with it any more."""
    may_end, has_begun, made, clock = threading.Event(), threading.Event(), [], Clock()

    class Both(LeavingReads):
        def batch_is_exist(self, names):
            has_begun.set()
            assert may_end.wait(60)
            return super().batch_is_exist(names)

    backend = MooncakeBackend(native_of(Both, {}, made), settings(threads=3), clock)
    await backend._connected()
    made[0].clock = clock
    async with anyio.create_task_group() as calls:
        calls.start_soon(backend.exists, KEYS)
        await anyio.to_thread.run_sync(has_begun.wait, 60)
        calls.start_soon(fetch, backend, KEYS)
        with anyio.fail_after(60):
            while backend._client is not None:
                await anyio.lowlevel.checkpoint()
        was_closed = made[0].is_closed
        may_end.set()
    assert (False, True) == (was_closed, made[0].is_closed)
    assert [Presence.ABSENT] * 2 == await backend.exists(make_keys(2))
    await backend.aclose()


async def test_memory_for_staging_is_lent_again_behind_its_transfers():
    """R-52: what lies there amid a call is nobody else's before the client has ended."""
    lent, made, clock = [], [], Clock()

    class Ending(LeavingReads):
        def close(self):
            super().close()
            lent.append(backend._rooms.qsize())

    backend = MooncakeBackend(native_of(Ending, {}, made), settings(), clock)
    await backend._connected()
    made[0].clock = clock
    await fetch(backend, KEYS)
    assert [1] == lent
    await backend.aclose()


async def test_nothing_is_begun_with_a_client_that_is_over():
    """R-52: it would crash; what waited for its turn has no answer, and the next call has another client."""
    made, clock, keys = [], Clock(), make_keys(40)
    backend = MooncakeBackend(
        native_of(LeavingReads, {}, made), settings(threads=1), clock
    )
    await backend._connected()
    made[0].clock = clock
    told = [one.verdict for one, _ in await fetch(backend, keys)]
    assert ([Verdict.UNAVAILABLE] * 8, 32) == (told[32:], len(made[0].left))
    assert [Presence.ABSENT] * 40 == await backend.exists(keys)
    await backend.aclose()
