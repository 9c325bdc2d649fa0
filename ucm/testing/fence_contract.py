# SPDX-License-Identifier: Apache-2.0
"""
What every device must pass about the ends of what it does, and about what it is not always asked for.

A part of ``DeviceContract``, which authors derive from: the factories are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from threading import Event

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from xxhash import xxh3_64_intdigest

from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.abc import Device, EventRef, Fence
from ucm.errors import DeviceError
from ucm.plan import HostSlots
from ucm.testing.device_memory import Arrangement, Copy, Engine, Nesting

__all__ = ["PLAIN", "TIMEOUT", "FenceContract"]

_Bytes = npt.NDArray[np.uint8]
TIMEOUT = 60.0
PLAIN = Arrangement(
    num_blocks=8,
    nesting=Nesting.LAYERS,
    pages=(64, 64, 64),
    paddings=(0, 0, 0),
    groups=((0, 1, 2),),
)


class FenceContract(ABC):
    """What fences, ``clear``, checksums and pinned memory are; see ``DeviceContract``."""

    @abstractmethod
    def make_device(self, num_blocks: int) -> Device:
        """Return a new device for a pool of *num_blocks*; nothing registered yet."""

    @abstractmethod
    def make_memory(self, nbytes: int) -> torch.Tensor:
        """Return ``[nbytes]`` uint8 in a storage of its own, on the device."""

    def make_pool(self, num_slots: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``[num_slots, slot_bytes]`` host memory that the device can reach."""
        return np.zeros((num_slots, slot_bytes), np.uint8)

    def make_unrecorded_event(self) -> EventRef:
        """Return an event that was never recorded."""
        return torch.Event()

    @contextmanager
    def opened(self, arrangement: Arrangement) -> Iterator[tuple[Device, Engine]]:
        """Register an engine's memory for the length of a block."""
        engine = Engine(arrangement, self.make_memory)
        device = self.make_device(arrangement.num_blocks)
        device.register(engine.layout, engine.kv_caches)
        try:
            yield device, engine
        finally:
            device.close()

    def gather(self, device: Device, copy: Copy) -> None:
        """Gather and wait."""
        with closing(self.begin_gather(device, copy)) as fence:
            assert fence.wait(TIMEOUT)
            assert fence.is_done()
            fence.land()

    def scatter(self, device: Device, copy: Copy) -> None:
        """Scatter and wait."""
        fence = self.begin_scatter(device, copy)
        assert fence.wait(TIMEOUT)
        assert fence.is_done()

    def check_memory(self, engine: Engine, expected: list[_Bytes]) -> None:
        """Check every byte of the engine's memory."""
        for wanted, found in zip(expected, engine.read(), strict=True):
            np.testing.assert_array_equal(wanted, found)

    def plain_copy(self, engine: Engine, block_ids: list[int], first: int = 0) -> Copy:
        """Return a copy of whole blocks into slots that follow each other."""
        group = engine.layout.groups[0]
        return Copy(
            group=group,
            row_ids=tuple(row.row_id for row in group.rows),
            block_ids=tuple(map(BlockId, block_ids)),
            slots=HostSlots(
                self.make_pool(engine.arrangement.num_blocks, group.block_bytes),
                np.arange(first, first + len(block_ids)),
                group.block_bytes,
            ),
        )

    def begin_gather(
        self, device: Device, copy: Copy, seeds: Sequence[int] | None = None
    ) -> Fence:
        """Gather, and return the fence."""
        given = (copy.group.group_id, copy.row_ids, copy.block_ids, copy.slots)
        return device.gather(*given) if seeds is None else device.gather(*given, seeds)

    def begin_scatter(
        self, device: Device, copy: Copy, seeds: Sequence[int] | None = None
    ) -> Fence:
        """Scatter, and return the fence."""
        given = (copy.group.group_id, copy.row_ids, copy.slots, copy.block_ids)
        return (
            device.scatter(*given) if seeds is None else device.scatter(*given, seeds)
        )

    def test_clear_calls_once_when_it_is_over(self) -> None:
        """Blocks go back to the engine by this call alone: without it they never do."""
        with self.opened(PLAIN) as (device, engine):
            engine.fill(8)
            rows = [row.row_id for row in engine.layout.groups[0].rows]
            calls: list[bool] = []
            for _ in range(2):  # as it goes on, and where that was before
                over = Event()

                def call(over: Event = over) -> None:
                    calls.append(over.is_set())
                    over.set()

                fence = device.clear(GroupId(0), rows, [BlockId(2)])
                assert fence.call_when_over(call)
                assert over.wait(TIMEOUT)
                assert fence.is_done()
                over = Event()
                assert fence.call_when_over(over.set)
                assert over.wait(TIMEOUT)
            assert calls == [False] * 2

    def test_who_says_that_a_copy_will_call_does(self) -> None:
        """A fence of a copy calls once, if it says so, and may be closed twice."""
        with self.opened(PLAIN) as (device, engine):
            engine.fill(8)
            copy = self.plain_copy(engine, [1, 3])
            for begin in (self.begin_gather, self.begin_scatter):
                over = Event()
                fence = begin(device, copy)
                is_told = fence.call_when_over(over.set)
                assert fence.wait(TIMEOUT)
                assert not is_told or over.wait(TIMEOUT)
                fence.land()
                fence.close()
                fence.close()

    def test_clear_refuses_what_does_not_exist(self) -> None:
        """A block, row or group that is none raises, and no page is zeroed."""
        with self.opened(PLAIN) as (device, engine):
            image, rows = engine.fill(9), [RowId(0)]
            for group, row_ids, blocks in (
                (GroupId(0), rows, [BlockId(1), BlockId(8)]),
                (GroupId(0), rows, [BlockId(1), BlockId(-1)]),
                (GroupId(0), [RowId(3)], [BlockId(1)]),
                (GroupId(1), rows, [BlockId(1)]),
            ):
                with pytest.raises(DeviceError):
                    device.clear(group, row_ids, blocks)
            self.check_memory(engine, image)
            device.unregister()
            with pytest.raises(DeviceError, match="registered"):
                device.clear(GroupId(0), rows, [BlockId(1)])
            device.close()
            with pytest.raises(DeviceError, match="closed"):
                device.clear(GroupId(0), rows, [BlockId(1)])

    def test_checksums_that_are_told_are_those_of_the_blocks(self) -> None:
        """
        Seeded as the copy was told, in the order of its blocks.

        Of loads by each device that tells digests, of saves by one that is not synchronous.
        """
        with self.opened(PLAIN) as (device, engine):
            if not device.tells_digests:
                pytest.skip("this device leaves them to the host")
            engine.fill(10)
            copy = self.plain_copy(engine, [5, 0, 3], first=2)
            self.gather(device, copy)
            seeds = [7, 2**64 - 1, 0]
            wanted = [
                xxh3_64_intdigest(copy.slots.block(at).tobytes(), seed)
                for at, seed in enumerate(seeds)
            ]
            ways = [self.begin_scatter, self.begin_gather]
            for begin in ways[: 1 if device.is_synchronous else 2]:
                with closing(begin(device, copy, seeds)) as fence:
                    assert fence.wait(TIMEOUT)
                    fence.land()
                    if fence.tells_digests:
                        assert list(fence.digests()) == wanted
            with pytest.raises(ValueError):  # noqa: PT011 - in whatever words
                self.begin_scatter(device, copy, seeds[:2])

    def test_pinned_memory_is_copied_like_any_other(self) -> None:
        """Pinning leaves its bytes, says in words if it is none, and harms no copy."""
        with self.opened(PLAIN) as (device, engine):
            image = engine.fill(11)
            copy = self.plain_copy(engine, [4, 6])
            pool = np.full_like(copy.slots.pool, 0x5A)
            slots = attrs.evolve(copy.slots, pool=pool)
            assert isinstance(device.pin(pool), str)
            assert (pool == 0x5A).all()
            pinned = attrs.evolve(copy, slots=slots)
            self.gather(device, copy)
            self.gather(device, pinned)
            np.testing.assert_array_equal(copy.slots.block(0), slots.block(0))
            np.testing.assert_array_equal(copy.slots.block(1), slots.block(1))
            assert (pool[2:] == 0x5A).all()
            engine.fill(12)
            device.unregister()  # what is pinned stays so
            engine.write(image)
            device.register(engine.layout, engine.kv_caches)
            self.scatter(device, pinned)
            self.check_memory(engine, image)
            device.close()  # before the memory goes
