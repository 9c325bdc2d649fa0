# SPDX-License-Identifier: Apache-2.0
"""Blocks that are deleted for a thread that must not wait."""

from collections.abc import Sequence

import pytest

from tests.clocks import RefusingThreads
from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.fates import Fate
from ucm.stores import forgetter
from ucm.stores.forgetter import Forgetter
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save
from ucm.threads import SYSTEM


class Gate(WrapperStore):
    """A store that deletes nothing before it is let, and keeps who is asked for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(MemoryStore(num_blocks, BLOCK_BYTES))
        self.is_open = SYSTEM.event()
        self.asked: list[int] = []
        self.refuses_first = False

    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """Wait, then forward."""
        self.is_open.wait(60)
        self.asked.append(len(keys))
        if self.refuses_first and len(self.asked) == 1:
            raise StoreUnavailableError("planned")
        return super().forget(keys, fate)


class TestForgetter:
    def test_many_keys_are_deleted_a_few_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-28: the store's lock is held for some keys at once; a part that is refused
        costs the others nothing."""
        monkeypatch.setattr(forgetter, "_KEYS_AT_ONCE", 2)
        keys = make_keys(6)
        store = Gate(8)
        store.refuses_first = True
        save(store, keys)
        forgetting = Forgetter(store, SYSTEM)
        assert forgetting.put(keys[:5])
        store.is_open.set()
        assert forgetting.close()
        assert [2, 2, 1] == store.asked
        assert [True, True, False, False, False, True] == store.contains(keys)

    def test_nobody_waits_for_the_store_and_what_waits_has_a_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the store hangs keys are taken up to the bound, and then refused; what
        was deleted makes room again."""
        monkeypatch.setattr(forgetter, "MAX_WAITING_KEYS", 3)
        store = Gate(8)
        forgetting = Forgetter(store, SYSTEM)
        keys = make_keys(4)
        assert [True, False, True] == [
            forgetting.put(some) for some in (keys[:2], keys[2:], keys[2:3])
        ]
        store.is_open.set()
        assert forgetting.close()
        assert forgetting.put(keys[:3])
        assert forgetting.close()
        assert [2, 1, 3] == store.asked

    def test_keys_for_which_there_was_no_thread_keep_no_others_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R-25: where no more may wait, nobody had asked for a thread again."""
        monkeypatch.setattr(forgetter, "MAX_WAITING_KEYS", 4)
        store, keys = MemoryStore(8, BLOCK_BYTES), make_keys(5)
        save(store, keys)
        late = Forgetter(store, RefusingThreads("ucm-forgetter", 1))
        assert [True, False] == [late.put(keys[:4]), late.put(keys[4:])]
        assert late.close()
        assert [False] * 4 + [True] == store.contains(keys)

    def test_tiers_are_told_behind_the_store(self) -> None:
        """R-53: of all keys at once, also of those that the store refused to delete: what it
        had no more may be in tiers."""
        keys, told = make_keys(4), []
        store = Gate(8)
        store.refuses_first = True
        save(store, keys[:2])

        def tell(some: Sequence[PackedKey]) -> None:
            told.append((list(some), len(store.asked)))

        forgetting = Forgetter(store, SYSTEM, tell)
        forgetting.put(keys[:3])
        forgetting.put(keys[3:])
        assert [] == told
        store.is_open.set()
        assert forgetting.close()
        assert [(keys[:3], 1), (keys[3:], 2)] == told

    def test_thread_that_hangs_is_told_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its store must stay open; one that had nothing to do has no thread."""
        monkeypatch.setattr(forgetter, "_CLOSE_TIMEOUT_S", 0.0)
        store = Gate(8)
        forgetting = Forgetter(store, SYSTEM)
        assert forgetting.close()
        forgetting.put(make_keys(1))
        assert not forgetting.close()
        store.is_open.set()
