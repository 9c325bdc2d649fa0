# SPDX-License-Identifier: Apache-2.0
"""The breaker over a backend of several servers, which counts by itself those that are away."""

import pytest

from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.wrap import BreakerBackend, WrapperBackend
from ucm.testing.backend_contract import fetch, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
KEYS = make_keys(4)


class Several(WrapperBackend):
    """Servers of which some are away, and some have no answer for what is their affair."""

    def __init__(self):
        super().__init__(MemoryBackend(Shelf(1 << 20)))
        self.lost, self.silent = set(), set()
        self.num_calls = 0

    def _say(self, keys, told, word, wrap=lambda word: word):
        self.num_calls += 1
        words = {key: wrap(word.AWAY) for key in self.lost}
        words |= {key: wrap(self.nothing(word)) for key in self.silent}
        return [words.get(key, one) for key, one in zip(keys, told, strict=True)]

    def nothing(self, word):
        """Return the word for a server of which nothing is known."""
        return Presence.UNKNOWN if word is Presence else Verdict.UNAVAILABLE

    async def exists(self, keys):
        """Say so of theirs."""
        return self._say(keys, await super().exists(keys), Presence)

    async def get(self, keys, targets):
        """Say so of theirs."""
        return self._say(keys, await super().get(keys, targets), Verdict, Fetched)

    async def put(self, blocks):
        """Say so of theirs."""
        keys = [block.key for block in blocks]
        return self._say(keys, await super().put(blocks), Verdict)

    async def delete(self, keys):
        """Say so of theirs."""
        return self._say(keys, await super().delete(keys), Verdict)


class Broken:
    """A breaker over them, with its clock and what it told."""

    def __init__(self):
        self.now = 100.0
        self.told = []
        self.inner = Several()
        self.backend = BreakerBackend(
            self.inner,
            clock=lambda: self.now,
            tell=self.told.append,
            tell_writes=self.told.append,
        )


async def test_servers_that_are_away_open_no_circuit():
    """X-14: however often they are asked for, alone or beside others; callers are told that there is
    no answer, by the words for that, and what the others say."""
    broken = Broken()
    broken.inner.lost = {KEYS[0]}
    for keys in (KEYS[:1], KEYS[:2]):
        rest = len(keys) - 1
        for _ in range(9):
            told = await broken.backend.put([seal(key) for key in keys])
            assert Verdict.UNAVAILABLE is told[0]
            assert {*told[1:]} <= {Verdict.DONE, Verdict.PRESENT}
            told = await broken.backend.exists(keys)
            assert [Presence.UNKNOWN, *[Presence.PRESENT] * rest] == told
            got = [one.verdict for one, _ in await fetch(broken.backend, keys)]
            assert [Verdict.UNAVAILABLE, *[Verdict.DONE] * rest] == got
            told = await broken.backend.delete(keys)
            assert [Verdict.UNAVAILABLE, *[Verdict.DONE] * rest] == told
    assert ([], 2 * 9 * 4) == (broken.told, broken.inner.num_calls)


async def test_others_without_an_answer_open_it_all_the_same():
    """X-14: who is away is no excuse for those who are not."""
    broken = Broken()
    broken.inner.lost, broken.inner.silent = {KEYS[0]}, {KEYS[1]}
    for _ in range(9):
        assert [Presence.UNKNOWN] * 2 == await broken.backend.exists(KEYS[:2])
    assert ([1.0], 3) == (broken.told, broken.inner.num_calls)


async def test_call_of_those_who_are_away_is_no_try():
    """X-14: it neither closes a circuit nor has the next while be longer; one that is answered for others closes it."""
    broken = Broken()
    broken.inner.silent = {*KEYS}
    for _ in range(3):
        await broken.backend.exists(KEYS)
    broken.inner.silent, broken.inner.lost = set(), {KEYS[0]}
    broken.now += 1.01
    for _ in range(3):
        assert [Presence.UNKNOWN] == await broken.backend.exists(KEYS[:1])
    assert (True, [1.0], 6) == (
        broken.backend.is_open,
        broken.told,
        broken.inner.num_calls,
    )
    told = await broken.backend.exists(KEYS[:2])
    assert [Presence.UNKNOWN, Presence.ABSENT] == told
    assert [1.0, 0.0] == broken.told
