# SPDX-License-Identifier: Apache-2.0
"""Of which blocks of a tier it is told that they come and go."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent.unruly import Unruly
from tests.backends.disk_kit import open_disk, reserve
from tests.backends.test_disk_slots import ENDS, admit, end_writing, make_slots, remove
from tests.backends.test_disk_slots import KEYS as SLOT_KEYS
from tests.backends.test_memory import TestMemoryBackend as Memory
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.backends.watched import WatchedBackend
from ucm.testing.backend_contract import fetch, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(4)


class TestWatched(Memory):
    """The contract through a wrapper that tells."""

    async def open(self, place):
        """Wrap the model."""
        return _watched(await super().open(place))

    async def open_small(self, place):
        """Wrap the small model."""
        return _watched(await super().open_small(place))

    async def test_what_it_watches_it_tells(self, tmp_path):
        """Of what it was asked about: it lists nothing, and says of blocks what their answers do."""
        keys, told = make_keys(5), []
        async with self.opened(tmp_path) as backend:
            await backend.put(sealed(keys[:2]))
            assert () == backend.watch(lambda *news: told.append(news))
            await backend.put(sealed(keys[1:]))
            await backend.delete(keys[:1])
        assert [*((key, True) for key in keys[1:]), (keys[0], False)] == told


del Memory  # it has a file of its own


def sealed(keys):
    """Return blocks to be put."""
    return [seal(key) for key in keys]


def _watched(backend):
    made = WatchedBackend(backend)
    made.watch(lambda key, is_there: None)
    return made


class Heard:
    """Who is told."""

    def __init__(self) -> None:
        self.there: set = set()
        self.told: list = []

    def __call__(self, key, is_there) -> None:
        """Take a word."""
        self.told.append((KEYS.index(key) if key in KEYS else key, is_there))
        (self.there.add if is_there else self.there.discard)(key)


class TestAnswers:
    def test_answers_tell_of_a_backend_that_does_not(self) -> None:
        """R-57: what was put is there, what was not found is not, and what was to be removed
        is not counted on."""

        async def run():
            backend, heard = Unruly(), Heard()
            tier = WatchedBackend(backend)
            await tier.put(sealed(KEYS[:1]))
            assert () == tier.watch(heard)
            await tier.put(sealed(KEYS[:3]))
            assert KEYS[:3] == sorted(heard.there, key=KEYS.index)
            for key in KEYS[:2]:
                del backend.shelf.values[key]
            await fetch(tier, KEYS[:1])
            assert KEYS[1:3] == sorted(heard.there, key=KEYS.index)
            await tier.exists(KEYS)
            assert KEYS[2:3] == list(heard.there)
            await tier.put(sealed(KEYS[:1]))
            await tier.delete(KEYS[:1])
            backend.does.is_down = True
            await tier.put(sealed(KEYS[3:]))
            await tier.exists(KEYS)
            return heard.there

        assert {KEYS[2]} == asyncio.run(run())

    def test_removal_without_an_answer_is_told(self) -> None:
        """R-57: nobody counts on a block that may be gone."""

        async def run():
            backend, heard = Unruly(), Heard()
            tier = WatchedBackend(backend)
            tier.watch(heard)
            await tier.put(sealed(KEYS[:1]))
            backend.delete = lambda keys: 1 / 0
            with pytest.raises(ZeroDivisionError):
                await tier.delete(KEYS[:1])
            return heard.told

        assert [(0, True), (0, False)] == asyncio.run(run())

    def test_nobody_is_told_before_somebody_watches(self) -> None:
        """R-57: a tier that nobody watches tells nothing, and costs as much."""

        async def run():
            tier = WatchedBackend(MemoryBackend(Shelf(1 << 20)))
            await tier.put(sealed(KEYS))
            await tier.delete(KEYS)
            return [each.value for each in await tier.exists(KEYS)]

        assert ["absent"] * 4 == asyncio.run(run())


class TestDisk:
    def test_disk_tells_what_it_has_and_what_it_lets_go(self, tmp_path) -> None:
        """R-57: what a disk made room with is told before anybody could ask for it."""

        async def run():
            disk, heard = await open_disk(tmp_path, capacity=1 << 20), Heard()
            keys = make_keys(400)
            await disk.put(sealed(keys[:2]))
            tier = WatchedBackend(disk)
            heard.there.update(tier.watch(heard))
            assert set(keys[:2]) == heard.there
            for at in range(2, 400, 50):
                await tier.put(sealed(keys[at : at + 50]))
            await tier.delete(keys[-2:])
            await tier.exists(keys)
            stats = await disk.stats()
            found = [key for key in keys if disk._slots.find(key)]
            await disk.aclose()
            return heard, stats, found

        heard, stats, found = asyncio.run(run())
        assert stats.evicted_blocks_total > 0
        assert stats.blocks == len(found)
        assert set(found) == heard.there
        assert stats.evicted_blocks_total + 2 == sum(not is_ for _, is_ in heard.told)

    @settings(max_examples=80, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from([*ENDS, "delete", "restore", "keep"]),
                st.integers(0, 39),
                st.integers(1, 3),
            ),
            max_size=40,
        )
    )
    def test_index_tells_of_each_change_whatever_is_done(self, steps) -> None:
        """R-57: writes that end badly and removals that are taken back are told as well."""
        slots, heard = make_slots(), Heard()
        slots.tell = heard
        for what, at, pages in steps:
            key = SLOT_KEYS[at]
            there = slots.find(key)
            if what in ENDS and there is None:
                end_writing(slots, reserve(slots, key, pages * 4096), what)
            elif what not in ENDS and there is not None:
                remove(slots, there, what)
            admit(slots, 1)
            assert set(slots.keys()) == heard.there


class Slow(Unruly):
    """Has looked before it answers, which takes until a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.has_looked = asyncio.Event()

    async def exists(self, keys):
        """Look, and answer later."""
        told = await super().exists(keys)
        self.has_looked.set()
        await self.free.wait()
        return told


class TestRemovedMeanwhile:
    @pytest.mark.asyncio
    async def test_answer_that_is_older_than_a_removal_is_not_told(self) -> None:
        """R-57: a look that began before a block was removed, and ends behind it, is no word
        that the block is there; the next one is."""
        backend, heard = Slow(), Heard()
        watched = WatchedBackend(backend)
        watched.watch(heard)
        await watched.put(sealed(KEYS[:2]))
        look = asyncio.create_task(watched.exists(KEYS[:2]))
        await backend.has_looked.wait()
        await watched.delete(KEYS[:1])
        backend.free.set()
        assert 2 == len(await look)
        assert {KEYS[1]} == heard.there
        await watched.put(sealed(KEYS[:1]))
        assert set(KEYS[:2]) == heard.there


class TestPutMeanwhile:
    @pytest.mark.asyncio
    async def test_answer_that_is_older_than_a_put_is_not_told(self) -> None:
        """R-57: a look that began before a block was put, and ends behind it, is no word that
        the block is not there; the next one is."""
        backend, heard = Slow(), Heard()
        watched = WatchedBackend(backend)
        watched.watch(heard)
        look = asyncio.create_task(watched.exists(KEYS[:2]))
        await backend.has_looked.wait()
        await watched.put(sealed(KEYS[:1]))
        backend.free.set()
        assert 2 == len(await look)
        assert [(0, True), (1, False)] == heard.told
        del backend.shelf.values[KEYS[0]]
        await watched.exists(KEYS[:1])
        assert set() == heard.there

    @pytest.mark.asyncio
    async def test_put_that_failed_proves_nothing(self) -> None:
        """R-57: a block that could not be put, and was not found before either, is told of as
        not there."""
        backend, heard = Slow(), Heard()
        watched = WatchedBackend(backend)
        watched.watch(heard)
        await watched.put(sealed(KEYS[:1]))
        backend.shelf.values.clear()
        look = asyncio.create_task(watched.exists(KEYS[:1]))
        await backend.has_looked.wait()
        backend.does.is_down = True
        await watched.put(sealed(KEYS[:1]))
        backend.free.set()
        await look
        assert [(0, True), (0, False)] == heard.told
