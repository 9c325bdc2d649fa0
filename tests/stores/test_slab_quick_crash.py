# SPDX-License-Identifier: Apache-2.0
"""A death at every single store of native code to a slab, one after the other."""

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.native_kit import build
from tests.stores.slab_kit import die, open_slab
from tests.stores.test_slab_crash import (
    NEW,
    OLD,
    SHOWN,
    Death,
    evicting_save,
    lonely_save,
)
from ucm import native
from ucm.testing.store_blocks import BLOCK_BYTES, load, payload, save, uses_at

DIED = -99
"""What a call returns that ended amid its stores."""
_DYING = Path(__file__).parents[1] / "kit" / "dying.h"


class Mortal:
    """Native code that counts its stores to shared memory, and may die before any."""

    def __init__(self, home: Path) -> None:
        self.library = build(home, "-include", str(_DYING))
        code = ctypes.CDLL(str(home / "_native.so"))
        self._stores = ctypes.c_long.in_dll(code, "test_stores")

    def dies(self, left: int, call: str, action: Callable[[], None]) -> bool:
        """Do something with so many stores in calls of a name; return whether it died."""
        whole = getattr(self.library, call)

        def brief(*args: object) -> int:
            nonlocal left
            self._stores.value = left
            code = whole(*args)
            left, self._stores.value = self._stores.value, 0
            if code == DIED:
                raise Death
            return code

        setattr(self.library, call, brief)
        try:
            action()
        except Death:
            return True
        finally:
            setattr(self.library, call, whole)
        return False


@pytest.fixture(scope="module")
def mortal(tmp_path_factory) -> Mortal:
    """Return native code that can die."""
    return Mortal(tmp_path_factory.mktemp("mortal"))


@pytest.mark.parametrize("call", ["slab_reserve", "slab_publish"])
@pytest.mark.parametrize("action", [evicting_save, lonely_save])
def test_death_at_any_store_leaves_a_whole_slab(
    tmp_path, monkeypatch, mortal, action, call
):
    """S4-31, X-01, R-28: what was to be visible is so whole or not at all, what was
    there before is right, nothing stays reserved, and nothing is rebuilt."""
    monkeypatch.setattr(native, "LIBRARY", mortal.library)
    outcomes = []
    for left in itertools.count(1):
        path = tmp_path / str(left)
        witness, store = open_slab(path, 5), open_slab(path, 5)
        for each in (witness, store):
            monkeypatch.setattr(each._slab.index, "rebuild", None)
        save(store, OLD, BLOCK_BYTES, uses_at([30, 20, 10]))
        has_died = mortal.dies(left, call, partial(action, store))
        die(store)
        visible = witness.contains(NEW)
        outcomes.append(any(visible))
        assert visible in ([False] * 4, SHOWN[action])
        there = [key for key in OLD if witness.contains([key])[0]]
        assert OLD[: len(there)] == there
        assert [payload(key) for key in there] == load(witness, there)
        shown = [key for key, is_there in zip(NEW, visible, strict=True) if is_there]
        assert [payload(key) for key in shown] == load(witness, shown)
        assert [] == witness.audit()
        with witness.reserve(NEW, BLOCK_BYTES) as lease:
            assert 4 - len(shown) == len(lease.keys)
        assert [] == witness.audit()
        witness.close()
        if not has_died:
            break
    assert left > 15
    # In the end it does not die. Who dies while it publishes has shown all, or nothing.
    assert [True] == outcomes[-1:]
    assert ({False, True} if call == "slab_publish" else {False}) == set(outcomes[:-1])
