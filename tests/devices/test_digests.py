# SPDX-License-Identifier: Apache-2.0
"""Checksums that a simulated accelerator computes of what it copies."""

import gc
import weakref

import attrs
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.devices.accelerator_kit import (
    ARRANGEMENT,
    NUM_BLOCKS,
    STILL,
    TIMEOUT,
    World,
    make_driver,
    running,
)
from tests.kit.accelerator_digests import DigestingDriver, SimDigester
from tests.kit.accelerator_kit import BOTH
from ucm.blocks import BlockId
from ucm.devices import digests
from ucm.devices.driver import Digester
from ucm.errors import DeviceError, DeviceFailedError

BLOCKS = [5, 2, 7]
SEEDS = [1, 2**64 - 1, 0]
ODD = attrs.evolve(ARRANGEMENT, pages=(64, 24, 16))
"""A page of it has no whole number of chunks."""
UNALIGNED = attrs.evolve(ARRANGEMENT, paddings=(0, 4, 0))
"""Chunks of it begin anywhere."""


class WrongDriver(DigestingDriver):
    """A device whose checksums are not xxhash's."""

    def make_digester(self) -> Digester:
        """Return one that reads too little."""
        digester = SimDigester(self)
        place = digester.place
        digester.place = lambda words: place(words + (words == words[-1]))
        return digester


class ShortDriver(DigestingDriver):
    """A device whose checksums are right of short blocks only."""

    def make_digester(self) -> Digester:
        """Return one that reads the last chunks of a long block elsewhere."""
        digester = SimDigester(self)
        place = digester.place
        digester.place = lambda words: place(
            words + 16 * (np.arange(len(words)) // 64 % 2)
        )
        return digester


class OldDriver(DigestingDriver):
    """A runtime that takes no kernel."""

    def make_digester(self) -> Digester:
        """Refuse."""
        raise OSError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


def copies(world, blocks=BLOCKS, seeds=SEEDS, rows=None):
    """Yield the fences behind a save of blocks, and behind a load of them."""
    ids = [BlockId(block) for block in blocks]
    rows = world.row_ids if rows is None else rows
    slots = world.slots(range(len(blocks)))
    group = world.group.group_id
    yield world.device.gather(group, rows, ids, slots, seeds)
    yield world.device.scatter(group, rows, slots, ids, seeds)


def write(world):
    """Give each block bytes of its own."""
    for number, memory in enumerate(world.engine.memory):
        memory.random_(0, 256) if number % 2 else memory.fill_(number)


def wanted(world, seeds=SEEDS):
    """Return the checksums of what lies in the first slots."""
    return [xxh3_64_intdigest(world.pool[at].data, s) for at, s in enumerate(seeds)]


@BOTH
def test_copies_tell_the_checksums_of_what_the_device_has(semantics):
    """Of a save those of its blocks, of a load those of what has arrived; the host's own."""
    with running(semantics, driver=DigestingDriver) as world:
        assert world.device.tells_digests
        assert "device" == world.device.describe()["checksums"]
        write(world)
        for fence in copies(world):
            assert fence.wait(TIMEOUT)
            assert fence.tells_digests
            assert wanted(world) == fence.digests() == fence.digests()
            world.set_blocks(7)  # a load brings what was saved


def test_what_arrives_damaged_has_another_checksum():
    """A bit that flips on its way from a slot to a block is told of, as the slot has not."""
    with running(driver=DigestingDriver, pace=STILL) as world:
        write(world)
        pair = copies(world)
        saved = next(pair)
        world.hardware.drain()
        assert saved.wait(TIMEOUT)
        right = saved.digests()
        world.pool[1, 3] ^= 4
        loaded = next(pair)
        world.hardware.drain()
        assert loaded.wait(TIMEOUT)
        told = loaded.digests()
        assert [True, False, True] == [a == b for a, b in zip(right, told, strict=True)]


@pytest.mark.parametrize(
    "how", ["rows", "odd", "unaligned", "none wanted", "unpinned", "too many"]
)
def test_the_host_computes_what_the_device_cannot(how, monkeypatch):
    """Parts of blocks, pages that are no whole chunks, copies nobody asks it of, those by
    way of other memory, and those of too many blocks tell none."""
    monkeypatch.setattr(digests, "_MOST_BLOCKS", 2 if how == "too many" else 8)
    given = {
        "is_pinned": how != "unpinned",
        "arrangement": {"odd": ODD, "unaligned": UNALIGNED}.get(how, ARRANGEMENT),
    }
    with running(driver=DigestingDriver, **given) as world:
        if how == "unpinned":
            assert "" == world.device.stage(1 << 16, world.group.block_bytes)
        rows = world.row_ids[:2] if how == "rows" else None
        seeds = None if how == "none wanted" else SEEDS
        for fence in copies(world, seeds=seeds, rows=rows):
            assert fence.wait(TIMEOUT)
            assert not fence.tells_digests
            with pytest.raises(NotImplementedError):
                fence.digests()
            fence.land()
            fence.close()
        assert 1 == world.driver.calls["digest"]  # the check at the start
        said = world.device.describe()["checksums"]
        wrong = how in ("odd", "unaligned")
        assert ("host: pages are no whole chunks" if wrong else "device") == said


def test_memory_for_digests_goes_round():
    """While all of it is under way the host computes; what is over gives it back, whether
    or not anybody has looked, and a late look finds its own."""
    with running(driver=DigestingDriver, pace=STILL) as world:
        write(world)
        all_fences = [next(copies(world)) for _ in range(digests._NUM_JOBS)]
        with pytest.raises(DeviceError, match="before their copy"):
            all_fences[0].digests()
        assert all(fence.tells_digests for fence in all_fences)
        assert not next(copies(world)).tells_digests
        world.hardware.drain()
        assert all_fences[-1].wait(TIMEOUT)
        before = wanted(world)
        for memory in world.engine.memory:
            memory.fill_(9)
        again = [next(copies(world)) for _ in range(digests._NUM_JOBS)]
        world.hardware.drain()
        assert again[-1].wait(TIMEOUT)
        assert wanted(world) == again[0].digests() != before
        assert all(before == fence.digests() for fence in all_fences)


class FullDriver(DigestingDriver):
    """A device on which there is no room for where the blocks are."""

    def make_digester(self) -> Digester:
        """Return one that has room for the check at the start only."""
        digester = SimDigester(self)
        place, num_placed = digester.place, iter(range(3))

        def refuse(words):
            if next(num_placed, None) is None:
                raise OSError("there is no room")
            return place(words)

        digester.place = refuse
        return digester


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WrongDriver, "wrong"),
        (ShortDriver, "wrong"),
        (OldDriver, "UNSUPPORTED_PTX"),
        (FullDriver, "no room"),
    ],
)
def test_a_device_whose_checksums_are_wrong_is_not_asked(kind, why):
    """Who computes them is found out at the start, and said in the log."""
    with running(driver=kind) as world:
        assert not world.device.tells_digests
        said = world.device.describe()["checksums"]
        assert said.startswith("host: ")
        assert why in said
        for fence in copies(world):
            assert fence.wait(TIMEOUT)
            assert not fence.tells_digests


def test_engine_memory_that_comes_anew_is_read_where_it_is():
    """Behind ``unregister`` and ``register`` checksums are of the new memory, and who still
    has the old one is not read."""
    with running(driver=DigestingDriver) as world:
        for _ in range(2):
            world.device.unregister()
            world.device.register(world.engine.layout, world.engine.kv_caches)
        assert 1 == len(world.device._digests.tables)
        write(world)
        for fence in copies(world):
            assert fence.wait(TIMEOUT)
            assert wanted(world) == fence.digests()


def test_a_device_that_fails_at_checksums_has_failed():
    """The copy before them may be under way: no error that would give its blocks back."""
    driver = make_driver(driver=DigestingDriver)
    world = World(driver)
    driver.fail_at("digest", 1)
    fence = next(copies(world))
    with pytest.raises(DeviceFailedError):
        fence.is_done()
    world.device.close()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_memory_that_may_be_written_still_stays(is_under_way, monkeypatch):
    """A device that has failed under a copy keeps what the copy's checksums go to, whoever
    asks for memory next; any other lets go of it."""
    monkeypatch.setattr(digests, "_abandoned", [])
    world = World(make_driver(driver=DigestingDriver, pace=STILL))
    fence = next(copies(world))
    if is_under_way:
        world.driver.fail("gone")
        with pytest.raises(DeviceFailedError):
            fence.wait(TIMEOUT)
    else:
        world.hardware.drain()
        assert fence.wait(TIMEOUT)
    memory = weakref.ref(world.device._digests._words)
    assert digests._NUM_JOBS - is_under_way == len(world.device._digests._free)
    world.device.close()
    assert is_under_way == bool(digests._abandoned)
    del world, fence
    gc.collect()
    assert is_under_way == (memory() is not None)


def test_copies_without_an_event_tell_theirs_too():
    """Where no event can be had the copy is waited for; its memory comes back as well."""
    with running(driver=DigestingDriver) as world:
        write(world)
        for _ in range(digests._NUM_JOBS + 1):
            world.driver.fail_at("record", 1, stays=False)
            fence = next(copies(world))
            assert fence.is_done()
            assert wanted(world) == fence.digests()


def test_as_many_seeds_as_blocks_are_given():
    """A bug of the caller, found before a byte moves."""
    with (
        running(driver=DigestingDriver) as world,
        pytest.raises(ValueError, match="3 blocks for 2 seeds"),
    ):
        next(copies(world, seeds=[1, 2]))


def test_all_blocks_are_read():
    """Each block of a pool, in any order, has its own checksum."""
    with running(driver=DigestingDriver) as world:
        write(world)
        blocks, seeds = [*reversed(range(NUM_BLOCKS))], [*range(NUM_BLOCKS)]
        for fence in copies(world, blocks, seeds):
            assert fence.wait(TIMEOUT)
            assert wanted(world, seeds) == fence.digests()
