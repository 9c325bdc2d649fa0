# SPDX-License-Identifier: Apache-2.0
"""The CPU device: the contract, the engine's real shapes, and what it refuses."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.native_kit import build, way  # noqa: F401  a fixture
from ucm import native
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices import cpu
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceError, LayoutError
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.plan import HostSlots
from ucm.testing.device_contract import DeviceContract

GROUP = GroupId(0)


class TestCPUDevice(DeviceContract):
    """`CPUDevice` as it is, with native code where that is built."""

    def make_device(self, num_blocks: int) -> CPUDevice:
        """Return the device itself."""
        return CPUDevice(num_blocks)

    def make_memory(self, nbytes: int) -> torch.Tensor:
        """Return a tensor in host memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)


class TestCPUDeviceByNumpy(TestCPUDevice):
    """`CPUDevice` without native code, where most spans of the contract are staged."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _without_native_code(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "LIBRARY", None)
            yield


class TestCPUDeviceDirect(TestCPUDeviceByNumpy):
    """`CPUDevice` by numpy where every piece is worth a direct call and calls are tiny."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _tiny_limits(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "_DIRECT_BYTES", 0)
            patch.setattr(cpu, "_MAX_UNITS", 6)
            patch.setattr(cpu, "_STAGED_BYTES", 200)
            yield


def layout_of(pages: dict[str, int], groups: int = 1) -> KVLayout:
    """One row per layer, or one group per layer that all overlay row 0."""
    rows = [
        RowLayout(
            row_id=RowId(0 if groups > 1 else number),
            page_bytes=page,
            layer_names=(name,),
        )
        for number, (name, page) in enumerate(pages.items())
    ]
    cut = [[row] for row in rows] if groups > 1 else [rows]
    return KVLayout(
        groups=tuple(
            GroupLayout(
                group_id=GroupId(number),
                kind=GroupKind.FULL,
                block_tokens=16,
                rows=tuple(some),
            )
            for number, some in enumerate(cut)
        ),
        hash_block_tokens=16,
        engine_tag="test",
    )


def round_trip(
    device: CPUDevice, layout: KVLayout, group_id: int, block_ids: list[int]
) -> np.ndarray:
    """Gather blocks, scatter them back, and return their bytes."""
    group = layout.group(GroupId(group_id))
    rows = [row.row_id for row in group.rows]
    ids = [BlockId(block) for block in block_ids]
    pool = np.zeros((len(ids), group.block_bytes), np.uint8)
    slots = HostSlots(pool, np.arange(len(ids)), group.block_bytes)
    device.gather(group.group_id, rows, ids, slots)
    device.scatter(group.group_id, rows, slots, ids)
    return pool


@pytest.mark.usefixtures("way")
class TestShapes:
    """The shapes that engines really give."""

    def test_attention_layers_in_one_storage_are_gathered(self) -> None:
        """Views ``(blocks, heads, tokens, 2 * dim)`` of one storage arrive in row order."""
        flat = torch.randn(3 * 8 * 2 * 16 * 8).to(torch.bfloat16)
        layers = flat.view(3, 8, 2, 16, 8)
        pages = dict.fromkeys(("a", "b", "c"), 2 * 16 * 8 * 2)
        layout = layout_of(pages)
        device = CPUDevice()
        device.register(layout, dict(zip(pages, layers, strict=True)))
        found = round_trip(device, layout, 0, [5, 2])
        wanted = torch.stack([layers[:, 5], layers[:, 2]]).view(torch.uint8)
        np.testing.assert_array_equal(wanted.reshape(2, -1).numpy(), found)

    def test_layers_may_lie_in_memory_in_any_order(self) -> None:
        """Row order is the layout's, also where later rows lie at lower addresses."""
        flat = torch.arange(3 * 4 * 16, dtype=torch.uint8)
        a, b, c = flat.view(3, 4, 16)
        layout = layout_of({"c": 16, "b": 16, "a": 16})
        device = CPUDevice()
        device.register(layout, {"a": a, "b": b, "c": c})
        wanted = torch.cat([c[[1, 3]], b[[1, 3]], a[[1, 3]]], dim=1)
        np.testing.assert_array_equal(
            wanted.numpy(), round_trip(device, layout, 0, [1, 3])
        )

    def test_recurrent_state_with_padding_behind_it_is_gathered(self) -> None:
        """An int8 view whose stride is larger than its payload gives the payload only."""
        flat = torch.arange(4 * 131072, dtype=torch.int32).to(torch.int8)
        state = flat.as_strided((4, 1, 1, 68608), (131072, 68608, 68608, 1))
        layout = layout_of({"state": 68608})
        device = CPUDevice()
        device.register(layout, {"state": state})
        found = round_trip(device, layout, 0, [3, 1])
        np.testing.assert_array_equal(state[[3, 1], 0, 0].numpy().view(np.uint8), found)

    def test_padding_is_part_of_the_page_where_the_layout_says_so(self) -> None:
        """A page as long as the stride covers payload and padding."""
        flat = torch.arange(4 * 64, dtype=torch.uint8)
        layout = layout_of({"state": 64})
        device = CPUDevice()
        device.register(layout, {"state": flat.as_strided((4, 40), (64, 1))})
        found = round_trip(device, layout, 0, [2])
        np.testing.assert_array_equal(flat[128:192].numpy(), found[0])

    def test_groups_on_the_same_bytes_read_the_same_bytes(self) -> None:
        """S4-02: layers of two groups in one row are both served by that row."""
        flat = torch.arange(4 * 64, dtype=torch.uint8)
        layout = layout_of({"full": 64, "state": 40}, groups=2)
        device = CPUDevice()
        device.register(
            layout,
            {"full": flat.view(4, 64), "state": flat.as_strided((4, 40), (64, 1))},
        )
        full = round_trip(device, layout, 0, [3])
        state = round_trip(device, layout, 1, [3])
        np.testing.assert_array_equal(flat[192:].numpy(), full[0])
        np.testing.assert_array_equal(full[:, :40], state)

    def test_layers_that_share_a_row_are_copied_once(self) -> None:
        """Two layers on one tensor make one page per block."""
        tensor = torch.arange(4 * 64, dtype=torch.uint8).view(4, 64)
        row = RowLayout(row_id=RowId(0), page_bytes=64, layer_names=("a", "b"))
        layout = layout_of({"a": 64})
        group = GroupLayout(
            group_id=GROUP, kind=GroupKind.FULL, block_tokens=16, rows=(row,)
        )
        layout = KVLayout(groups=(group,), hash_block_tokens=16, engine_tag="test")
        device = CPUDevice()
        device.register(layout, {"a": tensor, "b": tensor})
        np.testing.assert_array_equal(
            tensor[[1]].numpy(), round_trip(device, layout, 0, [1])
        )

    def test_kernel_blocks_are_counted_as_parts_of_a_block(self) -> None:
        """With ``num_blocks`` given, block 2 of a tensor cut in halves is parts 4 and 5."""
        tensor = torch.arange(8 * 32, dtype=torch.uint8).view(8, 32)
        layout = layout_of({"a": 64})
        device = CPUDevice(4)
        device.register(layout, {"a": tensor})
        np.testing.assert_array_equal(
            tensor[4:6].reshape(1, 64).numpy(), round_trip(device, layout, 0, [2])
        )

    def test_host_memory_between_the_storages_is_left_alone(self) -> None:
        """A slot pool whose address lies between two layers' storages is filled right."""
        memory = np.random.default_rng(0).integers(0, 256, 3 * 1024, np.uint8)
        before = memory.copy()
        parts = [torch.from_numpy(memory[at : at + 512]) for at in (0, 2048)]
        layout = layout_of({"a": 64, "b": 64})
        device = CPUDevice()
        device.register(layout, {"a": parts[0].view(8, 64), "b": parts[1].view(8, 64)})
        pool = memory[1024:2048].reshape(8, 128)
        slots = HostSlots(pool, np.arange(8), 128)
        rows, ids = [RowId(0), RowId(1)], [BlockId(7 - block) for block in range(8)]
        device.gather(GROUP, rows, ids, slots)
        wanted = before.copy()
        wanted[1024:2048] = np.concatenate(
            [before[:512].reshape(8, 64)[::-1], before[2048:2560].reshape(8, 64)[::-1]],
            axis=1,
        ).reshape(-1)
        np.testing.assert_array_equal(wanted, memory)
        device.scatter(GROUP, rows, slots, ids)
        np.testing.assert_array_equal(wanted, memory)

    @pytest.mark.slow
    def test_a_large_span_moves_in_every_way_of_cutting_it(self) -> None:
        """Spans of megabytes are right in one piece, in runs, per block and staged."""
        rows, page, num_blocks = 2, 1 << 18, 40
        flat = torch.from_numpy(
            np.random.default_rng(0).integers(
                0, 256, rows * page * num_blocks, np.uint8
            )
        )
        layers = flat.view(rows, num_blocks, page)
        names = [f"layer{number}" for number in range(rows)]
        layout = layout_of(dict.fromkeys(names, page))
        device = CPUDevice()
        device.register(layout, dict(zip(names, layers, strict=True)))
        row_ids = [RowId(row) for row in range(rows)]
        ids = np.random.default_rng(1).permutation(num_blocks)[:32]
        wanted = layers[:, ids].transpose(0, 1).reshape(32, -1).numpy()
        orders = [
            np.arange(32),
            np.concatenate([np.arange(16, 32), np.arange(16)]),
            np.arange(32)[::-1].copy(),
        ]
        for padding, order in itertools.product((0, 4096), orders):
            pool = np.zeros((32, rows * page + padding), np.uint8)
            slots = HostSlots(pool, order, rows * page)
            device.gather(GROUP, row_ids, ids.tolist(), slots)
            np.testing.assert_array_equal(wanted, pool[order, : rows * page])
            assert not pool[:, rows * page :].any()
            kept = flat.clone()
            layers[:, ids] = 0
            device.scatter(GROUP, row_ids, slots, ids.tolist())
            assert torch.equal(kept, flat)


class TestLock:
    """Whether a copy keeps the interpreter lock."""

    @pytest.mark.parametrize(
        ("count", "keeps"), [(1, True), (4, True), (5, False), (64, False)]
    )
    def test_only_a_brief_copy_keeps_the_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, keeps: bool
    ) -> None:
        """R-18: an engine's thread waits for no copy of more than 256 KB."""
        library = build(tmp_path)
        called: list[bool] = []
        for name, has_lock in (("brief_moves", True), ("moves", False)):
            monkeypatch.setattr(
                library, name, _told(getattr(library, name), called, has_lock)
            )
        monkeypatch.setattr(native, "LIBRARY", library)
        layout, device = layout_of({"a": 1 << 16}), CPUDevice()
        memory = torch.arange(64 << 16).to(torch.uint8).view(64, 1 << 16)
        device.register(layout, {"a": memory})
        blocks = list(range(count))
        pool = round_trip(device, layout, 0, blocks)
        assert np.array_equal(pool, memory[blocks].numpy())
        assert [keeps] * 2 == called


def _told(
    call: Callable[..., object], called: list[bool], has_lock: bool
) -> Callable[..., object]:
    def told(*arguments: object) -> object:
        called.append(has_lock)
        return call(*arguments)

    return told


class TestRefusals:
    """What cannot be mapped safely is refused with the layer and the number."""

    @pytest.mark.parametrize(
        ("tensor", "problem"),
        [
            ({}, "has a dict, not a tensor"),
            ((), "no tensor but an empty tuple"),
            ((torch.zeros(4, 64), "v"), "has a str, not a tensor"),
            ((torch.zeros(4, 64), torch.zeros(4, 64)), "its 2 tensors have 512 bytes"),
            (torch.zeros(4, 64, device="meta"), "on meta"),
            (torch.zeros(4, 64).to_sparse(), "torch.sparse_coo"),
            (torch.zeros(0, 64), r"is empty: \(0, 64\)"),
            (torch.tensor(1), r"is empty: \(\)"),
            (torch.zeros(5, 64, dtype=torch.uint8), r"shape \(5, 64\)"),
            (torch.zeros(2, 4, 64, dtype=torch.uint8), r"shape \(2, 4, 64\)"),
            (torch.zeros(4, 65, dtype=torch.uint8), "page_bytes=64"),
            (torch.zeros(4, 32, dtype=torch.uint8), "are 32 bytes apart"),
            (torch.zeros(64, 4, dtype=torch.uint8).t(), r"strides \[1, 4\]"),
            (torch.zeros(1, 64, dtype=torch.uint8).expand(4, 64), "are 0 bytes apart"),
            (torch.zeros(16, 64, dtype=torch.uint8)[::2], "a block spans 192 bytes"),
            (
                torch.zeros(305, dtype=torch.uint8).as_strided((4, 40), (64, 1), 50),
                "from offset 50 end at 306, behind the storage's 305 bytes",
            ),
        ],
    )
    def test_a_tensor_that_does_not_fit_is_named(
        self, tensor: object, problem: str
    ) -> None:
        """The message tells the layer and which shape, stride, offset or size is wrong."""
        with pytest.raises(LayoutError, match=f"layer 'a'.*{problem}"):
            CPUDevice(4).register(layout_of({"a": 64}), {"a": tensor})

    def test_a_shared_row_in_two_places_names_both_layers(self) -> None:
        """Layers of one row must start at the same byte."""
        flat = torch.zeros(8, 64, dtype=torch.uint8)
        with pytest.raises(LayoutError, match=r"'a' and 'b' share row 0.*offset=256"):
            CPUDevice(4).register(
                layout_of({"a": 64, "b": 64}, groups=2), {"a": flat[:4], "b": flat[4:]}
            )

    @pytest.mark.parametrize(
        ("offset", "stride"), [(32, 128), (96, 128), (64, 192)], ids=str
    )
    def test_rows_that_touch_each_other_name_both_layers(
        self, offset: int, stride: int
    ) -> None:
        """Pages of two rows of a group overlap, or nothing shows that they do not."""
        flat = torch.zeros(2048, dtype=torch.uint8)
        with pytest.raises(LayoutError, match=f"'a' and 'b' overlap.*offset={offset}"):
            CPUDevice().register(
                layout_of({"a": 64, "b": 64}),
                {
                    "a": flat.as_strided((4, 64), (128, 1)),
                    "b": flat.as_strided((4, 64), (stride, 1), offset),
                },
            )

    def test_tensors_over_one_array_that_touch_each_other_name_both_layers(
        self,
    ) -> None:
        """Each has a storage of its own, which begins where its view of the memory does."""
        flat = np.zeros(9 * 64, np.uint8)
        first, second, third = (
            torch.from_numpy(flat[start : start + 256].reshape(4, 64))
            for start in (0, 32, 256)
        )
        layout = layout_of({"a": 64, "b": 64})
        with pytest.raises(LayoutError, match="'a' and 'b' overlap"):
            CPUDevice().register(layout, {"a": first, "b": second})
        CPUDevice().register(layout, {"a": first, "b": third})

    @pytest.mark.filterwarnings("ignore:Accessing the data pointer")
    def test_tensor_without_memory_is_refused(self) -> None:
        """What torch traces with has a shape and an address of zero."""
        with FakeTensorMode():
            fake = torch.zeros(4, 64, dtype=torch.uint8)
        with pytest.raises(LayoutError, match="'a' has no memory"):
            CPUDevice().register(layout_of({"a": 64}), {"a": fake})

    def test_a_pool_without_blocks_is_refused(self) -> None:
        """The number of blocks is at least one."""
        with pytest.raises(ValueError, match="num_blocks=0"):
            CPUDevice(0)

    def test_any_event_is_refused_with_its_type(self) -> None:
        """Torch records no event on the CPU, so an event proves nothing there."""
        device = CPUDevice()
        device.register(layout_of({"a": 64}), {"a": torch.zeros(4, 16)})
        with pytest.raises(DeviceError, match="a Event proves nothing"):
            device.lease(torch.Event())

    def test_copies_return_when_the_bytes_have_moved(self) -> None:
        """The device says of itself that its copies are synchronous."""
        assert CPUDevice.is_synchronous
