# SPDX-License-Identifier: Apache-2.0
"""
The contract of ``Device`` as tests.

Derive, give the two factories, and pytest runs the suite::

    class TestMyDevice(DeviceContract):
        def make_device(self, num_blocks): ...
        def make_memory(self, nbytes): ...

Memory is read and written by torch beside the device, never by its own verbs.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.blocks import BlockId, GroupId, RowId
from ucm.errors import DeviceError, EventNotRecordedError, LayoutError
from ucm.plan import HostSlots
from ucm.testing.device_memory import Arrangement, Copy, Engine, arrangements
from ucm.testing.fence_contract import PLAIN, TIMEOUT, FenceContract

__all__ = ["Copy", "DeviceContract"]

_relaxed = settings(
    max_examples=40,
    deadline=None,
    # Each device runs the same test methods from a class of its own.
    suppress_health_check=[HealthCheck.differing_executors],
)


class DeviceContract(FenceContract):
    """What every device does; derive, and give the factories."""

    def draw_copy(self, data: st.DataObject, engine: Engine) -> Copy:
        """Draw a group, some rows, some blocks and as many slots, in any order."""
        group = data.draw(st.sampled_from(engine.layout.groups))
        row_ids = [row.row_id for row in group.rows]
        if data.draw(st.booleans()):
            row_ids = data.draw(
                st.lists(st.sampled_from(row_ids), min_size=1, unique=True)
            )
        num_blocks = engine.arrangement.num_blocks
        block_ids = data.draw(
            st.permutations(range(num_blocks)) | st.just(list(range(num_blocks)))
        )
        block_ids = block_ids[: data.draw(st.integers(0, num_blocks))]
        num_slots = num_blocks + 2
        slots = data.draw(
            st.permutations(range(num_slots)) | st.just(list(range(num_slots)))
        )
        padding = data.draw(st.sampled_from([0, 7, 64]))
        pool = self.make_pool(num_slots, group.block_bytes + padding)
        pool[:] = 0xA5
        return Copy(
            group=group,
            row_ids=tuple(row_ids),
            block_ids=tuple(map(BlockId, block_ids)),
            slots=HostSlots(
                pool,
                np.array(slots[: len(block_ids)], dtype=np.int64),
                group.block_bytes,
            ),
        )

    @_relaxed
    @given(arrangement=arrangements(), data=st.data())
    def test_gather_copies_the_pages_asked_for_and_nothing_else(
        self, arrangement: Arrangement, data: st.DataObject
    ) -> None:
        """Slots hold their block's pages; other host bytes and the engine's stay."""
        with self.opened(arrangement) as (device, engine):
            image = engine.fill(1)
            copy = self.draw_copy(data, engine)
            expected = copy.slots.pool.copy()
            for block, slot in zip(copy.block_ids, copy.slots.slots, strict=True):
                pages = engine.pages(image, copy.group, copy.row_ids, block)
                for page, place in pages:
                    expected[slot, place] = page
            self.gather(device, copy)
            np.testing.assert_array_equal(expected, copy.slots.pool)
            self.check_memory(engine, image)

    @_relaxed
    @given(arrangement=arrangements(), data=st.data())
    def test_scatter_changes_the_pages_asked_for_and_nothing_else(
        self, arrangement: Arrangement, data: st.DataObject
    ) -> None:
        """Pages hold their slot's bytes; paddings, other pages and slots stay."""
        with self.opened(arrangement) as (device, engine):
            expected = engine.fill(2)
            copy = self.draw_copy(data, engine)
            pool = copy.slots.pool
            pool[:] = np.random.default_rng(3).integers(0, 256, pool.shape, np.uint8)
            before = pool.copy()
            for block, slot in zip(copy.block_ids, copy.slots.slots, strict=True):
                pages = engine.pages(expected, copy.group, copy.row_ids, block)
                for page, place in pages:
                    page[:] = pool[slot, place]
            self.scatter(device, copy)
            self.check_memory(engine, expected)
            np.testing.assert_array_equal(before, pool)

    @_relaxed
    @given(arrangement=arrangements(), data=st.data())
    def test_scatter_after_gather_restores_the_memory(
        self, arrangement: Arrangement, data: st.DataObject
    ) -> None:
        """What was gathered comes back byte for byte after the pages were lost."""
        with self.opened(arrangement) as (device, engine):
            image = engine.fill(4)
            copy = self.draw_copy(data, engine)
            self.gather(device, copy)
            lost = engine.read()
            for block in copy.block_ids:
                pages = engine.pages(lost, copy.group, copy.row_ids, block)
                for page, _ in pages:
                    page[:] = 0
            engine.write(lost)
            self.scatter(device, copy)
            self.check_memory(engine, image)

    @_relaxed
    @given(arrangement=arrangements(), data=st.data())
    def test_clear_zeroes_the_pages_asked_for_and_nothing_else(
        self, arrangement: Arrangement, data: st.DataObject
    ) -> None:
        """Pages are zero, also those that a scatter before wrote; all else stays."""
        with self.opened(arrangement) as (device, engine):
            expected = engine.fill(7)
            copy = self.draw_copy(data, engine)
            group_id, block_ids = copy.group.group_id, copy.block_ids
            device.scatter(group_id, copy.row_ids, copy.slots, block_ids)
            fence = device.clear(group_id, copy.row_ids, block_ids)
            assert fence.call_when_over(lambda: None)
            assert fence.wait(TIMEOUT)
            for block in block_ids:
                for page, _ in engine.pages(expected, copy.group, copy.row_ids, block):
                    page[:] = 0
            self.check_memory(engine, expected)

    @pytest.mark.parametrize(
        ("block_ids", "first"),
        [([0, -1], 0), ([0, 8], 0), ([0, 1 << 70], 0), ([0, 1], -1), ([0, 1], 7)],
        ids=[
            "block below",
            "block behind",
            "block nowhere",
            "slot below",
            "slot behind",
        ],
    )
    def test_an_id_out_of_range_is_refused_before_a_byte_moves(
        self, block_ids: list[int], first: int
    ) -> None:
        """An id below or behind its pool raises, and both sides stay as they were."""
        with self.opened(PLAIN) as (device, engine):
            image = engine.fill(5)
            copy = self.plain_copy(engine, block_ids, first)
            pool = copy.slots.pool.copy()
            for move in (self.gather, self.scatter):
                with pytest.raises(DeviceError):
                    move(device, copy)
            np.testing.assert_array_equal(pool, copy.slots.pool)
            np.testing.assert_array_equal(image[0], engine.read()[0])

    def test_an_unknown_row_or_group_is_refused(self) -> None:
        """A row or group that the layout does not have raises ``DeviceError``."""
        with self.opened(PLAIN) as (device, engine):
            copy = self.plain_copy(engine, [1])
            with pytest.raises(DeviceError):
                self.gather(device, attrs.evolve(copy, row_ids=(RowId(3),)))
            with pytest.raises(DeviceError):
                device.gather(GroupId(1), copy.row_ids, copy.block_ids, copy.slots)

    def test_blocks_and_slots_that_do_not_match_are_refused(self) -> None:
        """Another number of slots than blocks, or of another size, is a caller's bug."""
        with self.opened(PLAIN) as (device, engine):
            copy = self.plain_copy(engine, [1, 2])
            short = attrs.evolve(copy, block_ids=copy.block_ids[:1])
            sized = attrs.evolve(copy.slots, block_bytes=copy.slots.block_bytes - 1)
            for wrong in (short, attrs.evolve(copy, slots=sized)):
                with pytest.raises(ValueError, match="slots"):
                    self.gather(device, wrong)
                with pytest.raises(ValueError, match="slots"):
                    self.scatter(device, wrong)

    def test_copies_from_several_threads_do_not_mix(self) -> None:
        """Threads that copy different blocks at once each get their own bytes."""
        with self.opened(PLAIN) as (device, engine):
            image = engine.fill(6)
            copies = [self.plain_copy(engine, [block]) for block in range(8)]

            def work(copy: Copy) -> None:
                for _ in range(20):
                    self.gather(device, copy)
                    self.scatter(device, copy)

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(work, copies))
            np.testing.assert_array_equal(image[0], engine.read()[0])
            for copy in copies:
                block = copy.block_ids[0]
                for page, at in engine.pages(image, copy.group, copy.row_ids, block):
                    np.testing.assert_array_equal(page, copy.slots.pool[0, at])

    def test_a_layer_without_tensor_is_refused(self) -> None:
        """Registering names the layer of the layout that has no tensor."""
        self.check_refused(lambda caches: caches.pop("group0.row1"), "group0.row1")

    def test_a_tensor_without_layer_is_refused(self) -> None:
        """Registering names the tensor that the layout does not know."""
        self.check_refused(
            lambda caches: caches.update(stray=caches["group0.row1"]), "stray"
        )

    def test_rows_on_the_same_bytes_are_refused(self) -> None:
        """Registering names a layer whose pages are also another row's."""
        self.check_refused(
            lambda caches: caches.update({"group0.row1": caches["group0.row0"]}),
            "group0.row1",
        )

    def test_a_page_that_does_not_fit_is_refused(self) -> None:
        """Registering names a layer whose blocks have other bytes than the layout."""

        def narrow(caches: dict[str, object]) -> None:
            tensor = caches["group0.row1"]
            assert isinstance(tensor, torch.Tensor)
            caches["group0.row1"] = tensor.view(-1, 32)[:8]

        self.check_refused(narrow, "group0.row1")

    def check_refused(
        self, spoil: Callable[[dict[str, object]], object], named: str
    ) -> None:
        """Check that a spoilt KV cache raises ``LayoutError`` naming the layer."""
        engine = Engine(PLAIN, self.make_memory)
        spoil(engine.kv_caches)
        device = self.make_device(PLAIN.num_blocks)
        with pytest.raises(LayoutError, match=named):
            device.register(engine.layout, engine.kv_caches)
        device.close()

    def test_register_twice_is_refused(self) -> None:
        """The KV cache is taken once."""
        with (
            self.opened(PLAIN) as (device, engine),
            pytest.raises(DeviceError, match="registered"),
        ):
            device.register(engine.layout, engine.kv_caches)

    def test_a_copy_before_register_is_refused(self) -> None:
        """Without a KV cache there is nothing to copy or to wait for."""
        device = self.make_device(PLAIN.num_blocks)
        copy = self.plain_copy(Engine(PLAIN, self.make_memory), [1])
        with pytest.raises(DeviceError, match="registered"):
            self.gather(device, copy)
        for verb in (device.lease, device.synchronize):
            with pytest.raises(DeviceError, match="registered"):
                verb()
        device.close()

    def test_memory_may_go_away_and_come_back(self) -> None:
        """
        Behind ``unregister`` nothing is copied, and behind ``register`` all is again.

        The engine's memory is let go of, not touched, and what is pinned stays so.
        """
        with self.opened(PLAIN) as (device, engine):
            image = engine.fill(5)
            copy = self.plain_copy(engine, [1, 3])
            self.gather(device, copy)
            for _ in range(2):
                device.unregister()
            for move in (self.gather, self.scatter):
                with pytest.raises(DeviceError, match="registered"):
                    move(device, copy)
            for verb in (device.lease, device.synchronize):
                with pytest.raises(DeviceError, match="registered"):
                    verb()
            engine.fill(6)
            device.register(engine.layout, engine.kv_caches)
            assert device.lease().wait(TIMEOUT)
            self.scatter(device, copy)
            for block in copy.block_ids:
                for now, before in zip(
                    engine.pages(engine.read(), copy.group, copy.row_ids, block),
                    engine.pages(image, copy.group, copy.row_ids, block),
                    strict=True,
                ):
                    np.testing.assert_array_equal(before[0], now[0])

    def test_a_lease_without_event_passes(self) -> None:
        """A fence behind an idle engine passes within its timeout and stays done."""
        with self.opened(PLAIN) as (device, _):
            fence = device.lease()
            assert fence.wait(TIMEOUT)
            assert fence.is_done()

    def test_an_event_that_was_never_recorded_is_refused(self) -> None:
        """An event without a record would pass at once and prove nothing."""
        with (
            self.opened(PLAIN) as (device, _),
            pytest.raises(EventNotRecordedError),
        ):
            device.lease(self.make_unrecorded_event())

    def test_close_is_idempotent_and_ends_every_verb(self) -> None:
        """After close, closing again does nothing and every other verb raises."""
        with self.opened(PLAIN) as (device, engine):
            copy = self.plain_copy(engine, [1])
            device.close()
            device.close()
            with pytest.raises(DeviceError, match="closed"):
                device.lease()
            for move in (self.gather, self.scatter):
                with pytest.raises(DeviceError, match="closed"):
                    move(device, copy)
            with pytest.raises(DeviceError, match="closed"):
                device.register(engine.layout, engine.kv_caches)
