# SPDX-License-Identifier: Apache-2.0
"""Saves and loads whose checksums the device computes."""

import contextlib
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kit.accelerator_digests import DigestingDriver
from tests.kit.accelerator_streams import CUDA, SimHardware
from tests.pipeline.kit import AsyncDevice
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    PAGE_BYTES,
    keys_of,
    order,
    running_on,
)
from ucm.config import Verify
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cpu import CPUDevice
from ucm.fates import Fate
from ucm.pipeline import load as load_stages
from ucm.pipeline import save as save_stages
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.save import Transfer
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.seals import block_checksum
from ucm.stores import memory
from ucm.stores.leases import seals_of
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.stores.wrap import WrapperStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate

SAVED = range(8)
"""Contents, and the blocks that they are saved from."""
INTO = range(16, 24)


class LyingDriver(DigestingDriver):
    """A device that tells a wrong checksum once it ``lies``; what it copies is right."""

    lies = 0

    def make_digester(self):
        """Return one whose seeds are not those that were given."""
        digester = super().make_digester()
        submit = digester.submit

        def lie(table, job, count, stream):
            job[1, :count] += np.uint64(self.lies)
            submit(table, job, count, stream)

        digester.submit = lie
        return digester


def make(driver=DigestingDriver):
    """Return a driver, its device and a store."""
    driver = driver(0, SimHardware(random.Random(3), semantics=CUDA))
    return driver, AcceleratorDevice(driver), MemoryStore(64, BLOCK_BYTES)


@pytest.fixture
def hashed(monkeypatch):
    """Return the blocks of which the host computes a checksum, in order."""
    found = []

    def note(keys, slots, part):
        found.extend(part)
        yield from seals_of(keys, slots, part)

    for module in (memory, load_stages, save_stages):
        monkeypatch.setattr(module, "seals_of", note)
    return found


def save(rig):
    """Save the first blocks, which have random bytes; return these."""
    if (pinning := rig.runtime._pinning._thread) is not None:
        pinning.join(60.0)  # what is not pinned yet goes by way of staging memory
    wanted = rig.fill(SAVED, 1)
    rig.device.begin_step(1)
    submit(rig, order(1, Direction.SAVE, SAVED, SAVED))
    return wanted


def load(rig, number=2):
    """Load them to other blocks; return how that ended."""
    return submit(rig, order(number, Direction.LOAD, SAVED, INTO))


def submit(rig, one):
    """Have an order carried out."""
    rig.runtime.submit(KEYSPACE_DIGEST, [one], rig.device.lease(None))
    outcome = rig.settle()[one.transfer_id]
    while one.transfer_id not in rig.told(NoticeKind.RELEASED):
        rig.runtime.wait_for_notice(60.0)  # what has failed is zeroed first
    return outcome


def left(rig):
    """Return what the log says of who computes checksums instead, each time."""
    return [
        event["checksums"]
        for event in rig.tracer.events
        if event["event"] == "checksums.left"
    ]


def rot(store, number):
    """Damage a stored block."""
    (key,) = keys_of(number)
    store._pool[store._entries[key].slot, 7] ^= 1


def test_the_host_computes_no_checksum_of_what_the_device_has_read(hashed):
    """Saved and loaded blocks have the same checksums as any, by the device alone."""
    driver, device, store = make()
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        wanted = save(rig)
        before = driver.calls["digest"]
        outcome = load(rig)
        assert (OutcomeKind.COMMITTED, 8) == (outcome.kind, outcome.committed)
        assert wanted == rig.content(INTO)
        assert [0] == hashed  # one of the first save: the device is right of this group
        assert (2, 3) == (before, driver.calls["digest"])
        blocks = np.ascontiguousarray(rig.memory[:, SAVED.start : SAVED.stop])
        with store.read(keys_of(*SAVED)) as lease:
            assert lease.seals(0, 8) == [
                block_checksum(key, blocks[:, at].tobytes())
                for at, key in enumerate(lease.keys)
            ]


def test_what_the_device_finds_damaged_is_computed(hashed):
    """A load of it fails as corrupt, leaves zeros, and the block is forgotten; the
    device is believed further on, as the host finds the same."""
    _, device, store = make()
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        save(rig)
        rot(store, 5)
        outcome = load(rig)
        assert (OutcomeKind.FAILED, Reason.CORRUPT) == (outcome.kind, outcome.reason)
        assert not any(rig.content(INTO))
        assert [*SAVED] == sorted({*hashed})
        assert [number != 5 for number in SAVED] == store.contains(keys_of(*SAVED))
        assert device.tells_digests
        assert [] == left(rig)


def test_a_device_that_is_alone_with_its_checksums_is_not_asked_again(hashed):
    """What the host finds right stays stored. That load is computed; the next one is
    verified by the host, and right."""
    driver, device, store = make(LyingDriver)
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        wanted = save(rig)
        driver.lies = 1
        outcome = load(rig)
        assert (OutcomeKind.FAILED, Reason.CORRUPT) == (outcome.kind, outcome.reason)
        assert not any(rig.content(INTO))
        assert "the host computes checksums from now on" in outcome.error
        assert all(store.contains(keys_of(*SAVED)))
        assert not device.tells_digests
        asked = driver.calls["digest"]
        hashed.clear()
        assert OutcomeKind.COMMITTED is load(rig, 3).kind
        assert wanted == rig.content(INTO)
        assert [*SAVED] == hashed
        assert asked == driver.calls["digest"]
        assert ["host: it told wrong ones"] == left(rig)


def test_a_device_that_lies_at_once_seals_nothing(hashed):
    """What the host does not find as well in the first save of a group is sealed by the
    host; of the second one too, and the device is asked no more. All of it loads."""
    driver, device, store = make(LyingDriver)
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        driver.lies = 1
        for number in range(2):
            assert device.tells_digests
            first = 8 * number
            rig.fill(SAVED, number)
            blocks = range(first, first + 8)
            submit(rig, order(1 + number, Direction.SAVE, blocks, SAVED))
            assert [0, *SAVED] == hashed
            hashed.clear()
        assert not device.tells_digests
        assert "host: it told wrong ones" == device.describe()["checksums"]
        submit(rig, order(3, Direction.LOAD, SAVED, INTO))
        assert ["host: it told wrong ones"] == left(rig)
        with store.read(keys_of(*range(16))) as lease:
            lease.verify(0, 16)


def test_a_doubt_in_each_of_two_groups_is_none_in_the_device():
    """What the engine may have overwritten unseen blames nobody, and what it is known to
    have proves nothing; a second doubt of the same group does."""
    _, device, store = make()
    device.register(
        LAYOUT, {name: torch.zeros(4, PAGE_BYTES, dtype=torch.uint8) for name in LAYERS}
    )
    with store.reserve(keys_of(1), BLOCK_BYTES) as lease, contextlib.closing(device):
        (right,) = seals_of(lease.keys, lease.slots, [0])
        transfer = Transfer(device)

        def proves(group, digest, **guard):
            span = SimpleNamespace(group_id=group)
            guard = SimpleNamespace(**{"torn": "", "lost": ()} | guard)
            ticket = SimpleNamespace(span=span, guard=guard)
            return transfer._is_proven(ticket, lease, [digest])

        assert proves(0, right)
        for group in (1, 2):
            assert not proves(group, 0)
            assert not proves(group, 0, torn="recycled")
            assert not proves(group, 0, lost=(0,))
            assert device.tells_digests
        assert proves(2, right)
        assert proves(0, 0)  # proven
        assert not proves(1, 0)
        assert not device.tells_digests
        assert not proves(0, right)


class AsyncTeller(AsyncDevice):
    """One that copies by itself, at once."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, lambda fence: fence.open())


@pytest.mark.parametrize(("kind", "wanted"), [(CPUDevice, 0), (AsyncTeller, 8)])
def test_a_device_that_copies_at_once_is_asked_for_none_of_a_save(kind, wanted):
    """It would hold the blocks for longer."""
    asked = []

    class Asked(kind):
        def gather(self, group_id, row_ids, block_ids, slots, seeds=()):
            asked.extend(seeds)
            return super().gather(group_id, row_ids, block_ids, slots)

    device = Asked(NUM_BLOCKS)
    device.tells_digests = True
    with running_on(MemoryStore(64, BLOCK_BYTES), device) as rig:
        save(rig)
        assert wanted == len(asked)


def test_some_blocks_of_a_save_have_their_own_checksums():
    """Where others are stored already, each one that is not gets its own."""
    _, device, store = make()
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        save(rig)
        store.forget(keys_of(2, 3, 6))
        wanted = save_again(rig)
        with store.read(keys_of(*SAVED)) as lease:
            lease.verify(0, 8)
        assert OutcomeKind.COMMITTED is load(rig).kind
        assert wanted == rig.content(INTO)


def save_again(rig):
    """Save the first blocks as they are, with what is stored left out."""
    rig.device.begin_step(2)
    submit(rig, order(9, Direction.SAVE, SAVED, SAVED))
    return rig.content(SAVED)


def lose(rig, position):
    """Let the engine take a block of the first save back."""
    rig.runtime._waits.for_saves([1], lambda: True, {1: [position]})


@pytest.mark.parametrize("when", ["before its copy", "under its copy"])
def test_a_lost_block_costs_the_others_no_checksum(when):
    """R-01: what the engine takes back is not stored, and what is has its own checksums,
    whoever computed them."""
    driver, device, inner = make()
    gate = Gate()
    plan = FaultPlan(Fault("reserve", gate)) if when == "before its copy" else None
    store = FaultStore(inner, plan or FaultPlan())
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        wanted = rig.fill(SAVED, 1)
        fence = rig.device.lease(None)
        assert fence.wait(60.0)
        if plan is None:
            driver.hardware.pace = (0,)
        one = order(1, Direction.SAVE, SAVED, SAVED)
        rig.runtime.submit(KEYSPACE_DIGEST, [one], fence)
        if plan is None:
            while driver.calls["copy"] < 1:
                time.sleep(0.001)
        else:
            gate.wait_reached()
        lose(rig, 2)
        gate.open()
        driver.hardware.pace = (1,)
        assert 7 == rig.settle()[1].committed
        there = [number for number in SAVED if number != 2]
        assert [number in there for number in SAVED] == store.contains(keys_of(*SAVED))
        with store.read(keys_of(*there)) as lease:
            lease.verify(0, 7)
        assert wanted == rig.content(SAVED)


@pytest.mark.parametrize("verify", Verify)
def test_damage_in_a_slab_is_found_each_time(verify, tmp_path):
    """Also behind a load of the same block, where the host would look but once: the block
    is forgotten, and is not the device's fault."""
    _, device, _ = make()
    with (
        SlabStore(
            path=f"{tmp_path}/slab",
            capacity_bytes=64 * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            verify=verify,
        ) as store,
        running_on(store, device, as_layer=torch.from_numpy) as rig,
    ):
        save(rig)
        assert OutcomeKind.COMMITTED is load(rig, 2).kind
        with store.read(keys_of(5)) as lease:
            lease.slots.block(0)[7] ^= 1
        outcome = load(rig, 3)
        assert (OutcomeKind.FAILED, Reason.CORRUPT) == (outcome.kind, outcome.reason)
        assert [number != 5 for number in SAVED] == store.contains(keys_of(*SAVED))
        assert device.tells_digests


def test_block_that_is_saved_anew_amid_the_search_blames_nobody():
    """A damaged block is forgotten and stored again by another at once: the device, which
    found it, is believed further on."""
    _, device, inner = make()
    store = Resaving(inner)
    with running_on(store, device, as_layer=torch.from_numpy) as rig:
        save(rig)
        rot(inner, 5)
        assert Reason.CORRUPT is load(rig).reason
        assert all(store.contains(keys_of(*SAVED)))
        assert device.tells_digests


class Resaving(WrapperStore):
    """A store into which another process saves at once what is forgotten, undamaged."""

    def forget(self, keys, fate=Fate.FORGOTTEN):
        """Forget, and save."""
        count = super().forget(keys, fate)
        with self.reserve(keys, BLOCK_BYTES) as lease:
            for at in range(len(keys)):
                lease.slots.block(at)[7] ^= 1
            lease.seal(0, len(keys))
            lease.commit()
        return count
