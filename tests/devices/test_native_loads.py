# SPDX-License-Identifier: Apache-2.0
"""Loads in host memory by native code, which tell the checksums of what they copied."""

import ctypes
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from tests.devices.test_cpu import layout_of
from tests.native_kit import by_native, by_python  # noqa: F401  fixtures
from ucm import native
from ucm.blocks import GroupId, RowId
from ucm.devices import _loads
from ucm.devices.cpu import CPUDevice
from ucm.layout import KVLayout
from ucm.plan import HostSlots

KB = 1 << 10
SEEDS = (2**64 - 1, 0, 5, 2**63, 1 << 33, 9)
BLOCKS = (4, 1, 7, 0, 3, 6)
SLOTS = (5, 0, 2, 7, 1, 4)


@attrs.frozen
class World:
    """An engine's memory, and slots that are loaded into it."""

    device: CPUDevice
    layout: KVLayout
    caches: dict[str, torch.Tensor]
    slots: HostSlots

    @classmethod
    def of(cls, *page_bytes: int) -> "World":
        """Return one of pages of these sizes, of which each second one is in two tensors."""
        dice = np.random.default_rng(7)
        sizes = {f"layer{at}": nbytes for at, nbytes in enumerate(page_bytes)}
        layout, device = layout_of(sizes), CPUDevice()
        caches = {
            name: torch.full((8, nbytes), 0xA5, dtype=torch.uint8)
            for name, nbytes in sizes.items()
        }
        device.register(layout, caches)
        nbytes = sum(page_bytes)
        pool = dice.integers(0, 256, (8, nbytes + 64), np.uint8)
        return cls(device, layout, caches, HostSlots(pool, np.array(SLOTS), nbytes))

    def check(self, told: list[int]) -> None:
        """Check all bytes, and what was told of them."""
        stored = self.slots.pool[list(SLOTS), : self.slots.block_bytes]
        assert told == [
            xxh3_64_intdigest(block.tobytes(), seed)
            for block, seed in zip(stored, SEEDS, strict=True)
        ]
        found = np.concatenate([each.numpy() for each in self.caches.values()], axis=1)
        np.testing.assert_array_equal(stored, found[list(BLOCKS)])
        assert (found[[2, 5]] == 0xA5).all()


@pytest.mark.usefixtures("by_native")
class TestLoads:
    @pytest.mark.parametrize("most", [1, 4])
    @pytest.mark.parametrize(
        "pages",
        [
            (64,),
            (1 << 20,),  # more than a piece
            (256 * KB, 256 * KB + 1),
            (100, 300 * KB, 5, 255 * KB, 1, 700 * KB, 3 * KB),
            (KB,) * 300,
        ],
        ids=lambda pages: f"{len(pages)}x{pages[0]}",
    )
    def test_all_bytes_arrive_and_their_checksums_are_told(
        self, pages: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever sizes pages have, with helpers and without, by pieces and at once; what
        belongs to other blocks stays as it was."""
        for digester in (_loads.DIGESTER, None):
            monkeypatch.setattr(_loads, "DIGESTER", digester)
            world = World.of(*pages)
            world.device.hash_on(most)
            rows = [RowId(at) for at in range(len(pages))]
            where = GroupId(0), rows, world.slots, BLOCKS, SEEDS
            fence = world.device.scatter(*where)
            assert fence.tells_digests
            assert fence.is_done()
            world.check([*fence.digests()])

    def test_pages_that_are_neighbours_are_one_copy_of_any_length(self) -> None:
        """Rows of one tensor lie side by side in memory as they do in the slot."""
        memory = torch.full((8, 3, 200 * KB), 0xA5, dtype=torch.uint8)
        world = World.of(*[200 * KB] * 3)
        device, caches = CPUDevice(), {f"layer{at}": memory[:, at] for at in range(3)}
        device.register(world.layout, caches)
        rows = [RowId(at) for at in range(3)]
        fence = device.scatter(GroupId(0), rows, world.slots, BLOCKS, SEEDS)
        attrs.evolve(world, caches=caches).check([*fence.digests()])

    def test_some_rows_have_no_checksum(self) -> None:
        """It is that of a whole block, which nobody has read."""
        world = World.of(KB, KB)
        where = GroupId(0), [RowId(1)], world.slots, BLOCKS, SEEDS
        assert not world.device.scatter(*where).tells_digests

    def test_a_save_has_none(self) -> None:
        """Its blocks are given back before anybody computes them."""
        world = World.of(KB)
        where = GroupId(0), [RowId(0)], BLOCKS, world.slots, SEEDS
        assert not world.device.gather(*where).tells_digests


@pytest.mark.parametrize(("nbytes", "keeps"), [(256 * KB, True), (257 * KB, False)])
def test_only_a_brief_load_keeps_the_lock(
    by_native: native.Native,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    keeps: bool,
) -> None:
    """R-18: an engine's thread waits for no load of more than 256 KB."""
    called: list[bool] = []

    def noting(has_lock: bool, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*lists: Any) -> Any:
            called.append(has_lock)
            return call(*lists)

        return note

    for name, has_lock in (("brief_loads", True), ("loads", False)):
        call = noting(has_lock, getattr(by_native, name))
        monkeypatch.setattr(by_native, name, call)
    world = World.of(nbytes)
    called.clear()
    one = HostSlots(world.slots.pool, np.array([3]), nbytes)
    world.device.scatter(GroupId(0), [RowId(0)], one, [1], [7])
    assert [keeps] == called


@pytest.mark.parametrize(("given", "wanted"), [(None, 1), (4, 4), (2**40, 64)])
def test_a_load_has_the_threads_that_its_device_was_given(
    by_native: native.Native,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    given: int | None,
    wanted: int,
) -> None:
    """R-18: one until somebody says so, and never more than native code begins."""
    call, told = by_native.loads, list[int]()

    def note(*lists: Any) -> Any:
        told.append(lists[8])
        return call(*lists)

    monkeypatch.setattr(by_native, "loads", note)
    world = World.of(1 << 20)
    told.clear()
    if given is not None:
        world.device.hash_on(given)
    where = GroupId(0), [RowId(0)], world.slots, BLOCKS, SEEDS
    world.check([*world.device.scatter(*where).digests()])
    assert [wanted] == told


@pytest.mark.usefixtures("by_python")
def test_without_native_code_nothing_is_told() -> None:
    """Whoever loads verifies then, piece by piece."""
    world = World.of(KB)
    assert not world.device.tells_digests
    where = GroupId(0), [RowId(0)], world.slots, BLOCKS, SEEDS
    assert not world.device.scatter(*where).tells_digests


@pytest.mark.parametrize("harm", ["digests", "pages"])
def test_a_library_that_says_something_else_is_not_used(
    by_native: native.Native,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    harm: str,
) -> None:
    """One that was built in another way would load garbage, or fail every load."""
    right = by_native.brief_loads

    def wrong(*lists: Any) -> None:
        right(*lists)
        digests, starts = lists[7], lists[10]
        first = ctypes.c_int64.from_address(starts).value
        at = digests if harm == "digests" else first
        ctypes.c_uint8.from_address(at).value ^= 1

    monkeypatch.setattr(by_native, "brief_loads", wrong)
    assert _loads.find_loads(by_native) is None
    assert not CPUDevice().tells_digests
