# SPDX-License-Identifier: Apache-2.0
"""What came from a tier becomes visible where its checksum holds, and is hashed once."""

from tests.stores.slab_kit import open_slab
from ucm.agent.landing import land
from ucm.backends.abc import Fetched, Verdict, block_checksum
from ucm.reasons import Reason
from ucm.stores.slab import _leases
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload


def test_bytes_that_a_tier_compared_are_not_hashed_again(tmp_path, monkeypatch):
    """Each block lands by itself: compared by the tier, compared here, damaged, or absent."""
    keys, hashed = make_keys(5), []
    digests = _leases.digests_of

    def digests_of(slots, positions, seeds):
        hashed.extend(positions)
        return digests(slots, positions, seeds)

    monkeypatch.setattr(_leases, "digests_of", digests_of)
    with open_slab(tmp_path / "s") as store:
        lease = store.reserve(keys, BLOCK_BYTES)
        for at, key in enumerate(keys):
            lease.slots.block(at).data[:] = payload(key)
        sums = [block_checksum(key, payload(key)) for key in keys]
        answers = [
            Fetched(Verdict.DONE, sums[0], is_checked=True),
            Fetched(Verdict.DONE, sums[1]),
            Fetched(Verdict.DONE, sums[2] ^ 1),
            Fetched(Verdict.ABSENT),
            Fetched(Verdict.DONE, sums[4], is_checked=True),
        ]
        reasons, there = land(store, lease, answers, keys[:1])
        assert [1, 2] == hashed
        wrong = [Reason.NONE, Reason.NONE, Reason.CORRUPT, Reason.ABSENT, Reason.NONE]
        assert wrong == reasons
        assert [True] == there
        landed = [keys[at] for at in (0, 1, 4)]
        assert [payload(key) for key in landed] == load(store, landed)
        assert [True, True, False, False, True] == store.contains(keys)
