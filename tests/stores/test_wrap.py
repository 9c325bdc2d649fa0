# SPDX-License-Identifier: Apache-2.0
"""A wrapper forwards everything: by its shape, and by the contract."""

import inspect
from pathlib import Path

import pytest

from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.testing.faults import FaultPlan, FaultStore
from ucm.testing.store_blocks import BLOCK_BYTES
from ucm.testing.store_contract import StoreContract

VERBS = {
    name: member
    for name, member in inspect.getmembers(Store)
    if not name.startswith("_") and (callable(member) or isinstance(member, property))
}


class InnerBypass:
    """Reaches under the wrapper as the memory store's own tests do."""

    def get_raw(self, store, key):
        """Read the inner pool's row."""
        inner = store.inner
        entry = inner._entries.get(key)
        return inner._pool[entry.slot, : entry.nbytes].tobytes() if entry else None

    def put_raw(self, store, key, data):
        """Write the inner pool's row."""
        inner = store.inner
        inner._pool[inner._entries[key].slot][: len(data)] = list(data)


class TestWrapperStore(InnerBypass, StoreContract):
    """The contract, through a wrapper that changes nothing."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a wrapped store."""
        return WrapperStore(MemoryStore(num_blocks, BLOCK_BYTES))


class TestFaultStore(InnerBypass, StoreContract):
    """The contract, through a wrapper that waits for faults that never come."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a store around which nothing is planned."""
        return FaultStore(MemoryStore(num_blocks, BLOCK_BYTES), FaultPlan())


class Spy:
    """Stands in for a store and notes what it is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        if isinstance(VERBS[name], property):
            return ("answer", name, ())
        return lambda *args: self.asked.append((name, args)) or ("answer", name, args)


class TestShape:
    @pytest.mark.parametrize("name", VERBS)
    def test_wrapper_overrides_each_public_member(self, name):
        """A verb that a new version of ``Store`` adds breaks this, not a user."""
        assert name in vars(WrapperStore)
        theirs, ours = VERBS[name], vars(WrapperStore)[name]
        assert isinstance(theirs, property) == isinstance(ours, property)
        if callable(theirs):
            assert inspect.signature(theirs) == inspect.signature(ours)

    @pytest.mark.parametrize("name", VERBS)
    def test_wrapper_forwards_arguments_and_answer(self, name):
        """Each verb reaches the inner store once, unchanged, and so does its answer."""
        spy = Spy()
        wrapper = WrapperStore(spy)
        if isinstance(VERBS[name], property):
            assert ("answer", name, ()) == getattr(wrapper, name)
            return
        verb = getattr(wrapper, name)
        args = tuple(object() for _ in inspect.signature(verb).parameters)
        answer = verb(*args)
        assert [(name, args)] == spy.asked
        assert answer in (None, ("answer", name, args))
        if inspect.signature(VERBS[name]).return_annotation is not None:
            assert answer is not None
