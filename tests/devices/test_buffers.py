# SPDX-License-Identifier: Apache-2.0
"""The cpu device over arrays and other buffers."""

import array
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ucm
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.cpu import CPUDevice
from ucm.errors import LayoutError
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.plan import HostSlots

PAGE = 32
LAYOUT = ucm.paged_layout({"a": PAGE, "b": PAGE}, block_tokens=4)


def slots_of(count: int) -> HostSlots:
    """Return slots of host memory for as many blocks."""
    pool = np.zeros((count, LAYOUT.max_block_bytes), np.uint8)
    return HostSlots(pool, np.arange(count), LAYOUT.max_block_bytes)


def copy_there_and_back(device: CPUDevice, blocks: list[int], to: list[int]) -> None:
    """Copy blocks to others by way of host slots."""
    slots = slots_of(len(blocks))
    rows = (RowId(0), RowId(1))
    device.gather(GroupId(0), rows, list(map(BlockId, blocks)), slots)
    device.scatter(GroupId(0), rows, slots, list(map(BlockId, to)))


def buffers_of(kind: str) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return buffers of 8 blocks for two layers, and their bytes block by block."""
    given: dict[str, object] = {}
    for name in "ab":
        if kind == "float16":
            given[name] = np.zeros((8, 4, 4), np.float16)
        elif kind == "bytearray":
            given[name] = memoryview(bytearray(8 * PAGE)).cast("B", (8, PAGE))
        elif kind == "array":
            given[name] = (
                memoryview(array.array("i", range(64))).cast("B").cast("i", (8, 8))
            )
        else:
            given[name] = memoryview(mmap.mmap(-1, 8 * PAGE)).cast("B", (8, PAGE))
    views = {
        name: np.asarray(each).view(np.uint8).reshape(8, PAGE)
        for name, each in given.items()
    }
    return given, views


class TestBuffers:
    @pytest.mark.parametrize("kind", ["float16", "bytearray", "array", "mmap"])
    def test_blocks_travel_between_any_buffers(self, kind: str) -> None:
        """Whatever has the buffer protocol holds blocks as a tensor does."""
        given, views = buffers_of(kind)
        rng = np.random.default_rng(0)
        for view in views.values():
            view[:] = rng.integers(0, 256, (8, PAGE), np.uint8)
        device = CPUDevice()
        device.register(LAYOUT, given)
        before = [view[[1, 6]].tobytes() for view in views.values()]
        copy_there_and_back(device, [1, 6], [4, 0])
        assert before == [view[[4, 0]].tobytes() for view in views.values()]

    def test_layers_may_be_slices_of_one_pool(self) -> None:
        """Blocks outermost: the pages of a layer lie apart, and others between them."""
        pool = np.random.default_rng(0).integers(0, 256, (8, 3, PAGE), np.uint8)
        before = pool.copy()
        device = CPUDevice()
        device.register(LAYOUT, {"a": pool[:, 0], "b": pool[:, 2]})
        copy_there_and_back(device, [1], [5])
        before[5, [0, 2]] = before[1, [0, 2]]
        assert np.array_equal(before, pool)

    def test_buffer_is_held_while_it_is_registered(self) -> None:
        """A bytearray cannot be resized under a copy."""
        memory = bytearray(8 * PAGE)
        pool = memoryview(memory).cast("B", (8, PAGE))
        device = CPUDevice()
        other = np.zeros((8, PAGE), np.uint8)
        device.register(LAYOUT, {"a": pool, "b": other})
        del pool
        with pytest.raises(BufferError):
            memory.append(0)

    @pytest.mark.slow
    def test_no_torch_is_needed(self) -> None:
        """A host of arrays runs where torch cannot be imported."""
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "import numpy as np, ucm\n"
            "from ucm.stores.memory import MemoryStore\n"
            "pool = {'a': np.ones((4, 32), np.uint8)}\n"
            "layout = ucm.paged_layout({'a': 32}, block_tokens=4)\n"
            "space = ucm.keyspace_of(layout, model='m', weights='w', kv_dtype='u8',"
            " engine='e')\n"
            "keys = ucm.PrefixHasher(space, 4).keys(range(8))\n"
            "with ucm.blocking.open({}, layout=layout, device=pool, keyspace=space,"
            " store=MemoryStore(8, 32)) as cache:\n"
            "    cache.save(keys, [0, 1]).wait_committed()\n"
            "    pool['a'][:] = 0\n"
            "    assert cache.load(keys, [2, 3]).is_whole\n"
            "print(pool['a'].sum())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "64\n" == done.stdout


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"a": np.zeros((8, 32), np.uint8)}, "'b' has no buffer"),
            ({"c": np.zeros((8, 32), np.uint8)}, "'a' has no buffer"),
            ({"b": np.zeros((8, 16), np.uint8)}, "'b'.* is no page of page_bytes=32"),
            ({"b": np.zeros((8, 8, 8), np.uint8)[:, ::2]}, "strides .* is no page"),
            ({"b": np.zeros((8, 64), np.uint8)[:, ::2]}, "is no page"),
            ({"b": np.zeros((8, 32), np.uint8)[::-1]}, "'b': .* they overlap"),
            ({"b": np.broadcast_to(np.uint8(0), (8, 32))}, "read-only"),
            ({"b": bytes(256)}, "read-only"),
            ({"b": bytearray(256)}, "is no page"),
            ({"b": np.zeros((0, 32), np.uint8)}, "empty"),
            ({"b": np.zeros((), np.uint8)}, "empty"),
            ({"b": np.zeros((8, 4), "datetime64[s]")}, "cannot be read"),
            ({"b": np.zeros((8, 4), object)}, "holds objects"),
            ({"b": np.zeros((8, 2), [("a", object), ("b", "u8")])}, "holds objects"),
        ],
    )
    def test_buffer_that_does_not_fit_is_named(self, given: dict, told: str) -> None:
        """Before any byte moves, with the layer and what is wrong with it."""
        whole = {"a": np.zeros((8, 32), np.uint8), **given}
        if "c" in given:
            del whole["a"]
        with pytest.raises(LayoutError, match=told):
            CPUDevice().register(LAYOUT, whole)

    def test_too_few_blocks_are_refused(self) -> None:
        """All layers have as many blocks as the host says."""
        two = {"a": np.zeros((8, 32), np.uint8), "b": np.zeros((7, 32), np.uint8)}
        with pytest.raises(LayoutError, match="has no 8 blocks"):
            CPUDevice(8).register(LAYOUT, two)
        CPUDevice().register(LAYOUT, two)

    def test_layers_on_the_same_bytes_are_refused(self) -> None:
        """Blocks of two layers would overwrite each other."""
        one = np.zeros((8, 32), np.uint8)
        with pytest.raises(LayoutError, match="overlap"):
            CPUDevice().register(LAYOUT, {"a": one, "b": one})

    def test_layers_that_share_a_row_must_share_its_bytes(self) -> None:
        """As where groups overlay each other."""
        row = RowLayout(row_id=RowId(0), page_bytes=32, layer_names=("a", "b"))
        group = GroupLayout(
            group_id=GroupId(0), kind=GroupKind.FULL, block_tokens=4, rows=(row,)
        )
        shared = KVLayout(groups=(group,), hash_block_tokens=4, engine_tag="t")
        one, two = np.zeros((8, 32), np.uint8), np.zeros((8, 32), np.uint8)
        CPUDevice().register(shared, {"a": one, "b": one})
        with pytest.raises(LayoutError, match="lie apart"):
            CPUDevice().register(shared, {"a": one, "b": two})
