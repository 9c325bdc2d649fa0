# SPDX-License-Identifier: Apache-2.0
"""Reservations of a slab that are granted piece by piece."""

import contextlib

import numpy as np
import pytest

from tests.stores.index_kit import OWNER, Index
from ucm.stores.slab import _reserving
from ucm.stores.slab._audit import audit
from ucm.testing.store_blocks import make_keys, uses_at

pytestmark = pytest.mark.usefixtures("by_python")

PIECE = 4


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return an index of 24 slots, with pieces of four keys."""
    monkeypatch.setattr(_reserving, "_PIECE", PIECE)
    made = Index(tmp_path / "lock", 24)
    yield made
    made.index._lock.close()


class TestPieces:
    def test_keys_are_looked_up_once_and_again_in_their_piece(self, made, monkeypatch):
        """All are looked up at first, and then only those that are about to be granted:
        how much is looked at under the lock does not grow with the square of them."""
        find, asked = made.index.chains.find, []

        class Asked:
            """Chains that remember how many keys they were asked for."""

            find = staticmethod(lambda batch: asked.append(len(batch)) or find(batch))

            def __getattr__(self, name):
                return getattr(chains, name)

        chains = made.index.chains
        monkeypatch.setattr(made.index, "chains", Asked())
        assert 3 * PIECE == made.save(make_keys(3 * PIECE))
        assert [3 * PIECE, PIECE, PIECE] == asked

    def test_key_that_another_saves_meanwhile_is_left_to_it(self, made, monkeypatch):
        """Between two pieces others come: what they have saved by then is neither saved
        again nor evicted for the rest."""
        index, held, keys = made.index, made.index._lock.held, make_keys(24)
        assert 16 == made.save(make_keys(16, first=50))
        holds = []

        @contextlib.contextmanager
        def hold():
            holds.append(1)
            if len(holds) == 2:
                assert 1 == made.save(keys[5:6], uses_at([1]))  # the oldest of all
            with held():
                yield

        monkeypatch.setattr(index._lock, "held", hold)
        grant = index.reserve(index.batch(keys[:12]), 1, OWNER)
        index.publish(grant, np.zeros(len(grant.slots), dtype=np.uint64), OWNER)
        assert [at for at in range(12) if at != 5] == grant.positions.tolist()
        assert [True] * 12 == made.has(keys[:12])
        assert [] == audit(index)
