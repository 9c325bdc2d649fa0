# SPDX-License-Identifier: Apache-2.0
"""The slab does what the memory store does, step by step."""

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stores.slab_kit import die, open_slab
from ucm.errors import BlockNotFoundError, StoreFullError
from ucm.stores.abc import Store, WriteLease
from ucm.stores.memory import MemoryStore
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    fill,
    load,
    make_keys,
    payload,
    uses_at,
)
from ucm.uses import Uses

EVERY = make_keys(9)
NUM_BLOCKS = 4
some_moment = st.none() | st.integers(0, 9)
some_keys = st.lists(st.sampled_from(EVERY), min_size=1, max_size=5, unique=True)


def reserve(store: Store, keys: list, uses: Uses | None) -> WriteLease | None:
    """Return a filled lease, None if the store is full."""
    try:
        lease = store.reserve(keys, BLOCK_BYTES, uses)
    except StoreFullError:
        return None
    fill(lease)
    return lease


def read(store: Store, keys: list) -> list[bytes] | bytes:
    """Return the blocks, or the key that is missing."""
    try:
        return load(store, keys)
    except BlockNotFoundError as exc:
        return exc.key


class SlabAgainstMemory(RuleBasedStateMachine):
    """Both stores get the same calls and must answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory(prefix="ucm-test-", dir="/dev/shm")
        self.path = Path(self.home.name) / "s"
        self.model = MemoryStore(NUM_BLOCKS, BLOCK_BYTES)
        self.slab = open_slab(self.path, NUM_BLOCKS)
        self.other = open_slab(self.path, NUM_BLOCKS)
        self.leases: list[tuple[WriteLease, WriteLease]] = []
        self.later = time.monotonic_ns() + 3600 * 10**9
        self.num_uses = 0

    def uses(self, keys: list, moment: int | None) -> Uses | None:
        """Return uses of a prefix: no two blocks are ever used at one moment."""
        if moment is None:
            return None
        self.num_uses += len(keys)
        start = (self.later if moment > 7 else 0) + moment * 10**6 + self.num_uses
        return uses_at([start - at for at in range(len(keys))])

    @rule(keys=some_keys, moment=some_moment)
    def reserve(self, keys: list, moment: int | None) -> None:
        """Hold a lease for later."""
        uses = self.uses(keys, moment)
        ours, theirs = reserve(self.model, keys, uses), reserve(self.slab, keys, uses)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.keys == theirs.keys
            assert ours.positions == theirs.positions
            self.leases.append((ours, theirs))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), commits=st.booleans(), without=st.sets(st.integers(0, 4)))
    def end(self, data: st.DataObject, commits: bool, without: set) -> None:
        """Commit one of the leases, perhaps not all of it, or discard it."""
        number = data.draw(st.integers(0, len(self.leases) - 1))
        ours, theirs = self.leases.pop(number)
        if commits:
            left = [at for at in without if at < len(ours.keys)]
            assert ours.commit(left) == theirs.commit(left)
        else:
            ours.discard()
            theirs.discard()

    @rule(keys=some_keys, moment=some_moment)
    def save(self, keys: list, moment: int | None) -> None:
        """Reserve and commit at once."""
        before = len(self.leases)
        self.reserve(keys, moment)
        if len(self.leases) > before:
            for lease in self.leases.pop():
                lease.commit()

    @rule(keys=some_keys)
    def read(self, keys: list) -> None:
        """Read all or learn which is missing."""
        assert read(self.model, keys) == read(self.slab, keys)

    @rule(keys=some_keys, moment=some_moment)
    def touch(self, keys: list, moment: int | None) -> None:
        """Use blocks, through the other opener."""
        uses = self.uses(keys, moment)
        self.model.touch(keys, uses)
        self.other.touch(keys, uses)

    @rule(keys=some_keys)
    def forget(self, keys: list) -> None:
        """Forget blocks."""
        assert self.model.forget(keys) == self.slab.forget(keys)

    @rule(keys=some_keys, moment=some_moment)
    def evict_from_elsewhere(self, keys: list, moment: int | None) -> None:
        """Save through the other opener."""
        self.slab, self.other = self.other, self.slab
        self.save(keys, moment)

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        """End all users, in order or not, and begin again; leases are gone."""
        for store in (self.slab, self.other):
            if killed:
                die(store)
            else:
                store.close()
        self.slab = open_slab(self.path, NUM_BLOCKS)
        self.other = open_slab(self.path, NUM_BLOCKS)
        while self.leases:
            self.leases.pop()[0].discard()

    @invariant()
    def agree(self) -> None:
        """Both show the same blocks, bytes and counts; the slab is sound."""
        assert self.model.contains(EVERY) == self.slab.contains(EVERY)
        assert self.model.match(EVERY) == self.other.match(EVERY)
        ours, theirs = self.model.stats(), self.slab.stats()
        assert ours.committed_blocks == theirs.committed_blocks
        assert ours.reserved_blocks == theirs.reserved_blocks
        assert self.slab.audit() == []

    def teardown(self) -> None:
        """Read every block that is left."""
        for key, there in zip(EVERY, self.slab.contains(EVERY), strict=True):
            if there:
                assert [payload(key)] == load(self.slab, [key])
        self.slab.close()
        self.other.close()
        self.home.cleanup()


@pytest.mark.slow
class TestSlabAgainstMemory(SlabAgainstMemory.TestCase):
    """Whatever is called in whatever order, the slab answers as the model (S2-05)."""

    settings = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
