# SPDX-License-Identifier: Apache-2.0
"""Spill of blocks whose slots are given to others meanwhile, or that are damaged."""

import attrs
import pytest

from tests.agent.unruly import (
    Unruly,
    guarded,
    inline,
    lay,
    open_core,
    run_virtual,
)
from tests.stores.slab_kit import RawSlab, open_slab
from ucm.agent.spill import SpillCounts, Spiller
from ucm.backends.abc import Verdict
from ucm.backends.envelope import HEADER_BYTES
from ucm.reasons import Reason
from ucm.stores.abc import Change
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, payload, save

KEYS = make_keys(30)


def shown(backend: Unruly) -> dict:
    """Return what a tier has, without headers."""
    return {key: value[HEADER_BYTES:] for key, value in backend.shelf.values.items()}


def spilled(store, backend: Unruly, num_blocks: int = 1) -> SpillCounts:
    """Spill the first blocks by one call; return what became of them."""

    async def spill():
        spiller = Spiller(store, guarded(backend), inline, 10)
        for key in KEYS[:num_blocks]:
            spiller.offer([Change(key, BLOCK_BYTES)])
        await spiller._spill(spiller._take())
        return spiller.counts

    return run_virtual(spill)


@attrs.define(eq=False)
class Recycles:
    """Overwrites a slot for another block at a chosen moment."""

    store: object
    raw: RawSlab

    def __call__(self) -> None:
        """Forget the first block and put others where it was."""
        self.store.forget(KEYS[:1])
        save(self.store, KEYS[1:9])


class Between(WrapperStore):
    """Has something happen between the verification of a block and its checksum."""

    def __init__(self, inner, happen) -> None:
        super().__init__(inner)
        self._happen = happen

    def read(self, keys):
        """Return a lease that verifies first, and lets go then."""
        lease = self.inner.read(keys)
        verify = lease.verify

        def verify_then(start, stop):
            verify(start, stop)
            self._happen()

        lease.verify = verify_then
        return lease


class Late(WrapperStore):
    """Has something happen between the look for a block and its verification."""

    def __init__(self, inner, happen) -> None:
        super().__init__(inner)
        self._happen = happen

    def read(self, keys):
        """Return a lease that is late."""
        lease = self.inner.read(keys)
        self._happen()
        return lease


class TestRecycled:
    def test_slot_recycled_before_the_seal_is_not_put(self, tmp_path) -> None:
        """X-04: bytes whose checksum was taken when they were another block's reach no
        tier."""
        with open_slab(tmp_path / "slab", 8) as slab:
            backend = Unruly()
            save(slab, KEYS[:1])
            between = Between(slab, Recycles(slab, RawSlab(tmp_path / "slab")))

            assert {Reason.EVICTED: 1} == spilled(between, backend).dropped
            assert {} == shown(backend)

    def test_slot_recycled_before_it_is_verified_is_not_damaged(self, tmp_path) -> None:
        """R-55: nobody is told of damage where a slot was given to others meanwhile."""
        with open_slab(tmp_path / "slab", 8) as slab:
            save(slab, KEYS[:1])
            late = Late(slab, Recycles(slab, RawSlab(tmp_path / "slab")))

            assert {Reason.EVICTED: 1} == spilled(late, Unruly()).dropped

    def test_slot_recycled_under_the_put_is_taken_back(self, tmp_path) -> None:
        """X-04: a block whose slot was given away while it was put is deleted again."""
        with open_slab(tmp_path / "slab", 8) as slab:
            recycle = Recycles(slab, RawSlab(tmp_path / "slab"))

            class Slow(Unruly):
                async def put(self, blocks):
                    recycle()
                    return await super().put(blocks)

            backend = Slow()
            save(slab, KEYS[:1])

            assert {Reason.RECYCLED: 1} == spilled(slab, backend).dropped
            assert {} == shown(backend)

    def test_slot_recycled_under_a_put_that_verifies_is_not_damaged(
        self, tmp_path
    ) -> None:
        """X-04, R-55: the tier saw other bytes, stored none, and is asked to delete none."""
        with open_slab(tmp_path / "slab", 8) as slab:
            recycle = Recycles(slab, RawSlab(tmp_path / "slab"))

            class Slow(Unruly):
                async def put(self, blocks):
                    recycle()
                    return await super().put(blocks)

                async def delete(self, keys):
                    self.asked.append("delete")
                    return await super().delete(keys)

            backend = Slow(verifies=True)
            save(slab, KEYS[:1])

            assert {Reason.RECYCLED: 1} == spilled(slab, backend).dropped
            assert {} == shown(backend)
            assert "delete" not in backend.asked

    def test_block_that_another_machine_has_put_stays_where_nothing_was_stored(
        self, tmp_path
    ) -> None:
        """X-02: who is told that a tier is full has no block there to take back."""
        with open_slab(tmp_path / "slab", 8) as slab:
            recycle = Recycles(slab, RawSlab(tmp_path / "slab"))

            class Full(Unruly):
                async def put(self, blocks):
                    recycle()
                    await lay(self, KEYS[:1])
                    return [Verdict.FULL] * len(blocks)

            backend = Full()
            save(slab, KEYS[:1])

            assert {Reason.RECYCLED: 1} == spilled(slab, backend).dropped
            assert {KEYS[0]: payload(KEYS[0])} == shown(backend)

    def test_block_is_read_once_by_a_tier_that_verifies(self, tmp_path) -> None:
        """R-55: who moves the bytes compares them on their way, and nobody reads them before."""
        reads = []
        with open_slab(tmp_path / "slab", 8) as slab:
            save(slab, KEYS[:2])
            watched = Between(slab, lambda: reads.append("verified"))

            assert 2 == spilled(watched, Unruly(verifies=True), 2).spilled
            assert [] == reads
            assert 2 == spilled(watched, Unruly(), 2).spilled
            assert ["verified"] == reads

    @pytest.mark.parametrize("verifies", [False, True])
    def test_damaged_block_is_not_put(self, tmp_path, verifies) -> None:
        """R-55: what does not verify in the slab reaches no tier, whoever compares it."""
        with open_slab(tmp_path / "slab", 8) as slab:
            backend = Unruly(verifies=verifies)
            save(slab, KEYS[:2])
            RawSlab(tmp_path / "slab").put(KEYS[0], b"x" * BLOCK_BYTES)

            async def spill():
                async with open_core(slab, backend) as core:
                    await core.drain()
                    return core.spillers[0].counts

            assert {Reason.CORRUPT: 1} == run_virtual(spill).dropped
            assert {KEYS[1]} == set(shown(backend))

    def test_bad_blocks_of_a_batch_cost_no_other(self, tmp_path) -> None:
        """R-55: of blocks that are looked at together each damaged or lost one is told apart."""
        with open_slab(tmp_path / "slab", 8) as slab:
            backend = Unruly()
            save(slab, KEYS[:8])
            RawSlab(tmp_path / "slab").put(KEYS[2], b"x" * BLOCK_BYTES)
            slab.forget(KEYS[5:6])

            async def spill():
                spiller = Spiller(slab, guarded(backend), inline, 10)
                for key in KEYS[:8]:
                    spiller.offer([Change(key, BLOCK_BYTES)])
                while not spiller.is_idle:
                    await spiller._spill(spiller._take())
                return spiller.counts

            counts = run_virtual(spill)
            assert {Reason.CORRUPT: 1, Reason.EVICTED: 1} == counts.dropped
            assert 6 == counts.spilled
            kept = {key: payload(key) for at, key in enumerate(KEYS[:8]) if at % 3 != 2}
            assert kept == shown(backend)

    def test_only_the_recycled_block_of_a_batch_is_taken_back(self, tmp_path) -> None:
        """X-04: those beside it in the call stay in the tier."""
        with open_slab(tmp_path / "slab", 8) as slab:

            class Slow(Unruly):
                async def put(self, blocks):
                    slab.forget(KEYS[1:2])
                    save(slab, KEYS[9:15])
                    return await super().put(blocks)

            backend = Slow()
            save(slab, KEYS[:3])

            assert {Reason.RECYCLED: 1} == spilled(slab, backend, 3).dropped
            assert {KEYS[0], KEYS[2]} == set(shown(backend))
