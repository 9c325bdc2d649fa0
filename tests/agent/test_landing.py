# SPDX-License-Identifier: Apache-2.0
"""Landing: what seals a block that has come, and which blocks are not seen."""

import numpy as np
import pytest

from tests.stores.slab_kit import open_slab
from ucm.agent.landing import land
from ucm.backends.abc import Fetched, Verdict
from ucm.errors import BlockCorruptError
from ucm.reasons import Reason
from ucm.seals import block_checksum
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload

KEYS = make_keys(3)
SEALS = [block_checksum(key, payload(key)) for key in KEYS]
LIE = 7
"""No block's digest."""


@pytest.fixture
def slab(tmp_path):
    """Return a slab with room for all."""
    with open_slab(tmp_path / "slab", 8) as store:
        yield store


def land_filled(slab, answers):
    """Land blocks whose bytes are those of their keys; return what came of each."""
    lease = slab.reserve(KEYS, BLOCK_BYTES)
    for at, key in enumerate(lease.keys):
        lease.slots.block(at)[:] = np.frombuffer(payload(key), dtype=np.uint8)
    return land(lease, answers, lambda keys: None, lambda: (), slab.forget)


def done(seal, digest=None):
    """Return the answer of a tier that has brought a block."""
    return Fetched(Verdict.DONE, seal, digest)


@pytest.mark.parametrize("digests", [SEALS, [None] * 3, [SEALS[0], None, SEALS[2]]])
def test_blocks_are_seen_whoever_has_hashed_them(slab, digests):
    """R-53: where they were read, here, or some so and some so."""
    answers = [done(*each) for each in zip(SEALS, digests, strict=True)]
    assert [Reason.NONE] * 3 == land_filled(slab, answers)
    assert [payload(key) for key in KEYS] == load(slab, KEYS)


@pytest.mark.parametrize("digests", [[LIE, *SEALS[1:]], [None] * 3])
def test_what_is_not_what_travelled_is_not_seen(slab, digests):
    """R-53: where another has hashed the bytes, too."""
    seals = [SEALS[0] if digests[0] else LIE, *SEALS[1:]]
    answers = [done(*each) for each in zip(seals, digests, strict=True)]
    assert [Reason.CORRUPT, Reason.NONE, Reason.NONE] == land_filled(slab, answers)
    assert [False, True, True] == slab.contains(KEYS)
    assert [payload(key) for key in KEYS[1:]] == load(slab, KEYS[1:])


@pytest.mark.parametrize("is_told", [True, False])
def test_what_did_not_come_takes_nothing_from_the_others(slab, is_told):
    """R-51: each has the seal of its own bytes."""
    first, last = (done(each, each if is_told else None) for each in SEALS[::2])
    answers = [first, Fetched(Verdict.ABSENT), last]
    assert [Reason.NONE, Reason.ABSENT, Reason.NONE] == land_filled(slab, answers)
    assert [True, False, True] == slab.contains(KEYS)
    assert [payload(key) for key in KEYS[::2]] == load(slab, KEYS[::2])
    assert 0 == slab.stats().reserved_blocks


def test_digest_that_was_told_is_not_computed_again_and_shows_no_wrong_block(slab):
    """What was read by us is hashed once; a digest that lies seals a block that nobody can load."""
    assert [Reason.NONE] * 3 == land_filled(slab, [done(LIE, LIE)] * 3)
    with pytest.raises(BlockCorruptError, match=f"{LIE:016x}"):
        load(slab, KEYS)
