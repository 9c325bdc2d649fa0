# SPDX-License-Identifier: Apache-2.0
"""An index that is looked into and changed by native calls is the one that Python leaves."""

import ctypes
import random
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from tests.native_kit import build
from tests.stores.index_kit import OWNER, Apart, Index
from tests.stores.slab_kit import open_slab
from ucm import native
from ucm.blocks import PackedKey
from ucm.errors import LeaseExpiredError, StoreFullError
from ucm.fates import Fate
from ucm.stores.slab import _quick, _used
from ucm.stores.slab._audit import audit
from ucm.stores.slab._chains import KeyBatch
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import GROUP, Grant, Limits, Word
from ucm.stores.slab._quick import Wishes
from ucm.stores.slab._reserving import Reservation
from ucm.testing.store_blocks import (
    make_keys,
    save,
    uses_at,
)
from ucm.uses import Uses

NUM_SLOTS = 3 * GROUP - 40
KEYS = make_keys(2 * NUM_SLOTS)
_TOLD = {
    *("states", "payers", "stamps", "shares", "tally", "heads", "nexts", "records"),
    *("change_kinds", "changes"),
}
"""Arrays of the index that say something when no change is under way, but for bounds."""
_OTHER = ctypes.CFUNCTYPE(
    ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
)(lambda *_: 7)
_WORDS = [*range(Word.JOURNAL), Word.NUM_CURBED, Word.NUM_OVER_SHARE, Word.CHANGES]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> native.Native:
    """Return native code, of which nothing is skipped."""
    return build(tmp_path_factory.mktemp("native"))


class Clock:
    """Stands for the module ``time``: it is one moment until it is told otherwise."""

    now = 0

    def monotonic_ns(self) -> int:
        """Return the moment."""
        return self.now


@pytest.fixture
def make_pair(tmp_path, library, monkeypatch) -> Callable[[int], tuple[Index, Index]]:
    """Return what makes an index that native code changes, and one that Python does."""

    def make(num_slots: int) -> tuple[Index, Index]:
        made = []
        for name, each in (("native", library), ("python", None)):
            monkeypatch.setattr(native, "LIBRARY", each)
            made.append(Index(tmp_path / name, num_slots))
            made[-1].index.header[Word.SEED] = made[-1].index.seed = 7
        assert made[0].index.quick
        assert not made[1].index.quick
        return made[0], made[1]

    return make


def told(made: Index) -> dict[str, object]:
    """Return all that an index says."""
    index, layout = made.index, made.index.layout
    found: dict[str, object] = {"words": index.header[_WORDS].tolist()}
    for name, (offset, dtype, length) in layout.place().items():
        if name in _TOLD:
            found[name] = made.data[offset : offset + dtype.itemsize * length]
    return found


def reserve(made: Index, keys, uses) -> Grant | None:
    """Reserve slots; None if there are none."""
    try:
        return made.index.reserve(made.index.batch(keys), 4096, OWNER, uses)
    except StoreFullError:
        return None


def facts(grant: Grant | None) -> object:
    """Return what was granted, to be compared."""
    if grant is None:
        return None
    arrays = grant.positions, grant.slots, grant.moments
    told = [each.tolist() for each in arrays]
    return told, grant.num_stored, grant.generation if len(grant.slots) else 0


def act(made: Index, what: str, keys, uses, given: list[Grant]) -> object:
    """Do something to an index; return what came of it."""
    index = made.index
    batch = index.batch(keys)
    if what == "look":
        seen = index.look_up(batch)
        there = seen.records[seen.committed]
        return seen.committed.tolist(), seen.slots.tolist(), there.tobytes()
    if what == "touch":
        found = index.chains.find(batch)
        index.touch(found[found >= 0], index.stamps_of(None, int((found >= 0).sum())))
        return found.tolist()
    if what == "forget":
        return index.forget(batch)
    if what == "discard" and given:
        return index.discard(given.pop(0), OWNER)
    if what == "publish" and given:
        grant = given.pop()
        return index.publish(grant, np.arange(len(grant.slots), dtype=np.uint64), OWNER)
    grant = reserve(made, keys, uses)
    if grant is not None and len(grant.slots):
        given.append(grant)
    if what == "save" and grant is not None and len(grant.slots):
        index.publish(given.pop(), np.ones(len(grant.slots), np.uint64), OWNER)
    return facts(grant)


def draw_uses(chance: random.Random, count: int, now: int) -> Uses | None:
    """Return when keys count as used: now, in any order, or later; for some or nobody."""
    kind = chance.choice(["now", "now", "prefix", "mixed", "soon", "later", "tenant"])
    if kind == "now":
        return None
    apart = chance.choice([1, 99_991])  # or among those of the last saves; never as one
    moments = [now - apart * each for each in range(count)]
    if kind == "mixed":
        chance.shuffle(moments)
    if kind in {"soon", "later"}:
        ahead = 10**8 if kind == "soon" else 10**12
        moments = [each + ahead for each in moments]
    return uses_at(moments, tenant=chance.choice([5, 6]) if kind == "tenant" else 0)


ACTS = ["save"] * 4 + ["reserve", "publish", "discard", "look", "touch", "forget"]


def crowd(index: SlotIndex) -> None:
    """Have few hashes, which many keys share."""
    batch_of = index.batch

    def few(keys) -> KeyBatch:
        batch = batch_of(keys)
        return attrs.evolve(batch, hashes=batch.hashes % np.uint64(50))

    index.batch = few


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_native_code_leaves_is_what_python_leaves(
    seed, is_crowded, make_pair, monkeypatch
):
    """R-28: for any history of saves, looks, uses and removals both tell the same of each
    key, leave the same in all arrays that say something, and agree with themselves."""
    chance, clock = random.Random(seed), Clock()
    monkeypatch.setattr(_used, "time", clock)
    pair = make_pair(NUM_SLOTS)
    grants: tuple[list[Grant], list[Grant]] = [], []
    for made in pair:
        made.index.limits = Limits(retained=0.25, of_tenant=0.5)
        made.index.latest_of = lambda count: clock.now + count
        if is_crowded:
            crowd(made.index)
    for step in range(1, 60):
        clock.now = step * 10**6
        what, count = chance.choice(ACTS), chance.choice([0, 1, 1, 2, 12, 60, 150, 300])
        keys = KEYS[(start := chance.randrange(len(KEYS))) : start + count]
        uses = draw_uses(chance, len(keys), clock.now)
        found = [
            act(made, what, keys, uses, given)
            for made, given in zip(pair, grants, strict=True)
        ]
        assert found[0] == found[1]
        assert told(pair[0]) == told(pair[1])
    if not is_crowded:  # an audit computes hashes itself
        assert [] == audit(pair[0].index) == audit(pair[1].index)


def test_oldest_that_are_all_over_the_slab_are_left_to_python(make_pair, monkeypatch):
    """What lies in more groups than native code looks at goes all the same."""
    num_groups = 40
    pair, clock = make_pair(num_groups * GROUP), Clock()
    monkeypatch.setattr(_used, "time", clock)
    keys, more = make_keys(num_groups * GROUP), make_keys(num_groups, first=10**6)
    for made in pair:
        made.index.latest_of = lambda count: clock.now + count
        for at in range(0, len(keys), 1024):
            clock.now += 10**6
            made.save(keys[at : at + 1024])
        clock.now += 10**6
        slots = np.arange(num_groups * GROUP)
        later = slots[slots % GROUP != 7]
        made.index.touch(later, np.full(len(later), clock.now))
        clock.now += 10**10
        assert num_groups == made.save(more)
        assert not any(made.has(keys[7::GROUP]))
        clock.now = 0
    assert told(pair[0]) == told(pair[1])


def test_native_code_does_what_is_common_itself(make_pair, monkeypatch):
    """What the last test compares is not Python twice: new keys, free slots, and the
    oldest of others in many groups are no matter for it."""
    made, _ = make_pair(NUM_SLOTS)
    monkeypatch.setattr(Reservation, "_grant_some", None)
    monkeypatch.setattr(Reservation, "_find", None)
    monkeypatch.setattr(SlotIndex, "_still_ours", None)
    for start in range(0, len(KEYS), 600):
        keys = KEYS[start : start + 600]
        assert len(keys) == made.save(keys)
        assert 0 == len(reserve(made, keys[:3], None).slots)
        assert 2 == made.save([*make_keys(2, first=10**6 + start), *keys[:9]])
    assert made.index.words[Word.NUM_EVICTED] > NUM_SLOTS / 2


def test_kept_by_position(make_pair):
    """Of a save that names what is stored already, nothing of that goes for it."""
    made, _ = make_pair(8)
    made.save(KEYS[:8])
    assert 2 == made.save([*KEYS[:6], *KEYS[8:10]])
    assert [True] * 6 + [False] * 2 + [True] * 2 == made.has(KEYS[:10])


@pytest.mark.parametrize(
    ("moments", "granted"), [([15, 100], [1]), ([45] * 6, [0, 1, 2, 3])]
)
def test_no_block_goes_for_one_that_was_used_before_it(make_pair, moments, granted):
    """Whoever was used last comes first, and gets what is older than it; so by both."""
    for made in make_pair(8):
        made.save(KEYS[:8], uses_at([80, 70, 60, 50, 40, 30, 20, 10]))
        keys = KEYS[8 : 8 + len(moments)]
        assert granted == reserve(made, keys, uses_at(moments)).positions.tolist()


def test_block_that_another_process_used_a_moment_later_gives_way(
    make_pair, monkeypatch
):
    """Clocks of two processors differ by less than a second; a save finds room."""
    made, _ = make_pair(4)
    monkeypatch.setattr(Reservation, "_grant_some", None)
    now = made.index.moment()
    made.save(KEYS[:4], uses_at([now + 10**8] * 4))
    assert 2 == made.save(KEYS[4:6])
    assert 2 == sum(made.has(KEYS[:4]))


def test_slot_that_was_touched_while_it_went_is_not_taken(make_pair):
    """Whoever writes to it keeps it, however old the use looks that came too late."""
    made, _ = make_pair(4)
    made.save(KEYS[:3])
    grant = reserve(made, KEYS[3:4], None)
    made.index.oldest.lower(grant.slots, np.array([1]))
    made.index.stamps[grant.slots] = 1
    assert 2 == made.save(KEYS[4:6])
    assert [True, False, False] == made.has(KEYS[:3])
    made.index.publish(grant, np.zeros(1, dtype=np.uint64), OWNER)
    assert [True] * 3 == made.has(KEYS[3:6])


@pytest.mark.parametrize("count", [1, 3])
def test_lease_whose_slots_are_another_ones_publishes_nothing(make_pair, count):
    """S4-31: neither what was taken back and given away, nor what somebody else reserved."""
    made, _ = make_pair(count)
    index, sums = made.index, np.zeros(count, dtype=np.uint64)
    lost = reserve(made, KEYS[:count], None)
    with index.locked():
        index.reclaim([OWNER])
    present = reserve(made, KEYS[count : 2 * count], None)
    assert lost.slots.tolist() == present.slots.tolist()
    with pytest.raises(LeaseExpiredError):
        index.publish(lost, sums, OWNER)
    with pytest.raises(LeaseExpiredError):
        index.publish(present, sums, OWNER + 1)
    index.publish(present, sums, OWNER)
    assert [True] * count == made.has(KEYS[count : 2 * count])


@pytest.mark.parametrize("count", [1, 4])
def test_what_native_code_evicts_is_remembered(tmp_path, library, monkeypatch, count):
    """R-71: a miss of it can be explained."""
    monkeypatch.setattr(native, "LIBRARY", library)
    with open_slab(tmp_path / "s", 4) as store:
        for start in range(0, 8, count):
            save(store, KEYS[start : start + count])
        assert [Fate.EVICTED] * 4 == [each.fate for each in store.fates(KEYS[:4])]
        assert [Fate.STORED] * 4 == [each.fate for each in store.fates(KEYS[4:8])]


class TestHashes:
    def test_keys_of_any_length_have_the_hash_of_xxhash(self, make_pair):
        """What one process has saved another one finds, whichever way it goes."""
        keys = [PackedKey(bytes(range(size))) for size in range(86)]
        one, other = make_pair(100)
        assert one.index.quick.hashes_of is not None
        for some in (keys, keys[:1], keys[5:6] * 3, []):
            first, second = one.index.batch(some), other.index.batch(some)
            assert first.hashes.tolist() == second.hashes.tolist()
            assert first.fields == second.fields

    @pytest.mark.parametrize("error", [ImportError, OSError, ValueError, None])
    def test_another_build_of_xxhash_is_not_asked(self, make_pair, monkeypatch, error):
        """Where the function is missing, or says something else, Python hashes."""

        def find():
            if error is not None:
                raise error
            return _OTHER

        _quick._find_digest.cache_clear()
        monkeypatch.setattr(_quick, "find_whole", find)
        one, other = make_pair(100)
        _quick._find_digest.cache_clear()
        assert one.index.quick.hashes_of is None
        assert 4 == one.save(KEYS[:4]) == other.save(KEYS[:4])
        assert [True] * 4 == one.has(KEYS[:4])


class TestGarbage:
    """Memory that somebody else has written to."""

    @pytest.mark.parametrize("seed", range(40))
    def test_no_number_in_memory_leads_out_of_it(self, seed, make_pair, library):
        """Whatever stands in the index, calls write within it and come to an end."""
        made, _ = make_pair(NUM_SLOTS)
        made.save(KEYS[:NUM_SLOTS])
        chance, apart = np.random.default_rng(seed), Apart(made, library)
        for name in chance.permutation(sorted(apart.arrays))[: seed % 5 + 1]:
            array = apart.arrays[name].view(np.uint8)
            array[:] = chance.integers(0, 256, len(array), dtype=np.uint8)
            if seed % 2 and apart.arrays[name].dtype.kind in "iu":
                # Numbers that are only a little too large, or too small.
                near = chance.integers(-300, NUM_SLOTS + 300, len(apart.arrays[name]))
                apart.arrays[name][:] = near.astype(apart.arrays[name].dtype)
        quick = apart.quick
        batch = made.index.batch(KEYS[NUM_SLOTS - 5 : NUM_SLOTS + 200])
        for _ in range(3):
            quick.find(batch)
            quick.look(batch)
            wishes = Wishes(4096, OWNER, None, 10**12, 10**9)
            grant = quick.reserve(batch, wishes, None)
            if grant is not None and len(grant.slots):
                assert set(grant.slots.tolist()) <= set(range(NUM_SLOTS))
                sums = np.zeros(len(grant.slots), dtype=np.uint64)
                quick.publish(grant.slots, grant.moments, sums, grant.generation, OWNER)
        assert apart.is_whole()

    def test_fewer_moments_than_keys_are_refused(self, make_pair):
        """A host that says too little is told so, and nothing else is granted."""
        made, other = make_pair(NUM_SLOTS)
        for each in (made, other):
            with pytest.raises(ValueError, match="2 uses of 4"):
                each.save(KEYS[:4], uses_at([1, 1]))
        sums = np.zeros(1, dtype=np.uint64)
        with pytest.raises(ValueError, match="2 moments and 1 checksums"):
            made.index.quick.publish(np.arange(2), np.arange(2), sums, 0, OWNER)

    @pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 2**40])
    def test_slots_that_are_none_are_not_published(self, make_pair, slot):
        """A lease whose slots are none is not ours."""
        made, _ = make_pair(NUM_SLOTS)
        numbers = np.array([slot])
        sums = np.zeros(1, dtype=np.uint64)
        assert not made.index.quick.publish(numbers, numbers.copy(), sums, 0, OWNER)
