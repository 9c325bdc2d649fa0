# SPDX-License-Identifier: Apache-2.0
"""An index that others change all the time, and uses at the ends of time."""

import contextlib
import threading

import numpy as np
import pytest

from tests.stores.slab_kit import SLOT_BYTES, open_slab
from ucm.config import StoreConfig
from ucm.errors import StoreUnavailableError
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import (
    NEVER,
    Limits,
    Word,
)
from ucm.testing.store_blocks import (
    BLOCK_BYTES,
    make_keys,
    save,
    uses_at,
)

pytestmark = pytest.mark.usefixtures("either_way")


class TestCrowd:
    """R-28: others change the index all the time, as eight ranks under load do."""

    @pytest.fixture
    def crowd(self, make_index, monkeypatch):
        """Make an index whose lock others have, who begin one change after another."""
        made = make_index(8)
        made.save(make_keys(4))
        index = made.index
        index.words[Word.VERSION] |= 1

        @contextlib.contextmanager
        def pass_on():
            index.words[Word.VERSION] += 2
            raise StoreUnavailableError("held by another process")
            yield

        monkeypatch.setattr(index._lock, "held", pass_on)
        return made

    def test_hint_is_given_amid_changes_that_never_pause(self, crowd):
        """What is stored is found, by one key and by many."""
        keys, index = make_keys(6), crowd.index
        found = index.glance(index.batch(keys)).committed
        assert [True] * 4 + [False] * 2 == found.tolist()
        assert [0, -1] == [index.slot_of(keys[0]), index.slot_of(keys[5])]

    def test_what_is_read_is_seen_at_one_moment(self, crowd):
        """A record that is being written must not pass for one that is damaged."""
        with pytest.raises(StoreUnavailableError):
            crowd.index.look_up(crowd.index.batch(make_keys(1)))

    def test_change_that_does_not_end_is_no_crowd(self, crowd, monkeypatch):
        """Of a process that was stopped within a change one hears, and soon."""
        index = crowd.index

        @contextlib.contextmanager
        def refuse():
            raise StoreUnavailableError("held by another process")
            yield

        monkeypatch.setattr(index._lock, "held", refuse)
        with pytest.raises(StoreUnavailableError):
            index.glance(index.batch(make_keys(1)))

    def test_scheduler_opens_and_closes_while_the_locks_are_busy(self, tmp_path):
        """Who opens waits for as long as opening may take; who closes loses nothing."""
        config = StoreConfig(path=str(tmp_path / "s"), capacity=5 * SLOT_BYTES)
        with open_slab(tmp_path / "s", 5) as worker:
            locks = [worker._slab.arena.lock, worker._slab._class.lock]
            for lock in locks:
                with contextlib.ExitStack() as held:
                    held.enter_context(lock.held())
                    timer = threading.Timer(0.05, held.pop_all().close)
                    timer.start()
                    store = SlabStore.open_configured(
                        config, block_bytes=BLOCK_BYTES, index_only=True
                    )
                    timer.join()
                with locks[1].held():
                    store.close()
            assert not worker._slab._class.owners.are_others()

    def test_who_leaves_waits_for_nobody_who_stands_in_the_door(self, tmp_path):
        """A process that is stopped as it joins keeps no other from its end, nor its slots."""
        path, timeouts = tmp_path / "s", {"open_timeout": 0.1, "lock_timeout": 0.01}
        with open_slab(path, 5) as other:
            store = open_slab(path, 5, **timeouts)
            store.reserve(make_keys(5), BLOCK_BYTES)
            with other._slab._door.held():
                store.close()
            assert not other._slab._class.owners.are_others()
            assert 5 == save(other, make_keys(5, first=10))


class TestMoments:
    def test_block_kept_for_ever_does_not_end_the_clock(self, make_index):
        """However far ahead blocks count as used, that is a moment, and not never."""
        made, keys = make_index(8), make_keys(8)
        index = made.index
        index.limits = Limits(retained=1.0, of_tenant=1.0)
        for key in keys:
            made.save([key])
            slots = np.array([index.slot_of(key)])
            index.touch(slots, index.stamps_of(uses_at([2**63 - 1]), 1))
            assert index.moment() + 2**50 < index.stamps[slots[0]] < NEVER

    def test_earliest_use_of_all_is_before_the_others(self, make_index):
        """No use is so early that it counts as one that is still to come."""
        made, keys = make_index(1), make_keys(2)
        assert 1 == made.save(keys, uses_at([-(2**63), 5]))
        assert [False, True] == made.has(keys)

    def test_slot_that_another_block_got_meanwhile_can_still_go(self, make_index):
        """A use of what was evicted while it was looked up does not keep for ever what
        has come in its place."""
        made = make_index(1)
        index, (old, new) = made.index, make_keys(2)
        made.save([old])
        slots = np.array([index.slot_of(old)])
        index.forget(index.batch([old]))
        curb = index.within_budget

        def come(*about):
            made.save([new])
            return curb(*about)

        index.within_budget = come
        index.touch(slots, index.stamps_of(None, 1))
        assert [True] == made.has([new])
        assert index.stamps[0] < NEVER
