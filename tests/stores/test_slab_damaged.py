# SPDX-License-Identifier: Apache-2.0
"""A slab over whose index somebody has written: its users go on, and say what is wrong."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.stores.slab_kit import SLOT_BYTES, die, index_path, open_slab
from ucm.errors import BlockCorruptError, ConfigError, StoreUnavailableError, UCMError
from ucm.stores.slab import SlabStore
from ucm.stores.slab._layout import IndexLayout, Word
from ucm.stores.slab._survey import SlabSurvey
from ucm.stores.slab._verify import Seen, verify
from ucm.testing.store_blocks import load, make_keys, payload, save
from ucm.uses import Uses

pytestmark = pytest.mark.usefixtures("either_way")

NUM_SLOTS = 300
KEYS = make_keys(NUM_SLOTS)
HUGE = 2**63 - 1


def arrays_of(path: Path, num_slots: int = NUM_SLOTS) -> dict[str, np.ndarray]:
    """Map each array of an index, to write to."""
    memory = np.memmap(index_path(path), np.uint8, "r+")
    return {
        name: memory[at : at + dtype.itemsize * length].view(dtype)
        for name, (at, dtype, length) in IndexLayout(num_slots).place().items()
    }


def verbs_of(store: SlabStore) -> Iterator[Callable[[], object]]:
    """Tell each verb, of few keys and of many."""
    for keys in (KEYS[:5], KEYS[100:160]):
        for verb in (store.match, store.contains, store.touch, store.fates):
            yield lambda verb=verb, keys=keys: verb(keys)
        yield lambda keys=keys: load(store, keys)
        yield lambda keys=keys: store.forget(keys[:3])
        yield lambda keys=keys: save(store, keys)
    yield from (store.stats, store.audit, store.keyspaces, lambda: store.changes(None))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_garbage_anywhere_costs_answers_and_nothing_else(seed, tmp_path):
    """Whatever stands in an index, each verb ends, with an answer or an error of ours."""
    chance = random.Random(seed)
    with open_slab(tmp_path / "s", NUM_SLOTS) as store:
        save(store, KEYS)
        arrays = arrays_of(tmp_path / "s")
        for name in chance.sample([*arrays], chance.choice([1, 1, 3])):
            raw = arrays[name].view(np.uint8)
            start = 8 * (name == "header")  # but for what says that it is an index
            size = arrays[name].itemsize
            number = chance.choice(
                [chance.randbytes(size), b"\xff" * size, bytes(size)]
            )
            number = chance.choice(
                [number, number[1:] + b"\x7f", b"\x2c" + bytes(size - 1)]
            )
            raw[start:] = np.frombuffer(number * (len(raw) // size), np.uint8)[start:]
        if seed % 2:
            arrays["header"][Word.VERSION] |= 1  # as a death leaves it
        verbs = [*verbs_of(store)]
        for verb in chance.sample(verbs, len(verbs)):
            with contextlib.suppress(UCMError):
                verb()


def test_chain_without_end_is_made_anew_behind_a_death(tmp_path):
    """Who finds a chain that leads into itself where it puts a death right makes all anew."""
    with open_slab(tmp_path / "s", NUM_SLOTS) as store:
        save(store, KEYS)
        arrays = arrays_of(tmp_path / "s")
        arrays["nexts"][:] = np.arange(NUM_SLOTS)
        arrays["header"][Word.VERSION] |= 1
        assert len(KEYS) == store.match(KEYS)
        assert [payload(key) for key in KEYS] == load(store, KEYS)
        assert [] == store.audit()


def test_damage_that_cannot_be_put_right_is_told_with_what_to_do(tmp_path):
    """Numbers that are too large for their place are an error that names the index."""
    with open_slab(tmp_path / "s") as store:
        arrays_of(tmp_path / "s", 8)["header"][[Word.VERSION, Word.CHANGES]] = HUGE
        with pytest.raises(
            StoreUnavailableError, match=r"index-4096.0 is damaged .*remove"
        ):
            store.match(KEYS[:2])
        die(store)


def test_damaged_slab_is_refused_or_opened(tmp_path):
    """Who comes to an index that cannot be put right is told so by an error of ours."""
    with open_slab(tmp_path / "s") as store:
        die(store)
    arrays_of(tmp_path / "s", 8)["header"][[Word.VERSION, Word.CHANGES]] = HUGE
    with pytest.raises((ConfigError, StoreUnavailableError), match="is damaged"):
        open_slab(tmp_path / "s")


@pytest.mark.parametrize("owner", [-(2**63), -1, 8193, HUGE])
def test_extent_of_no_class_costs_its_slots_alone(owner, tmp_path):
    """Who needs room passes over extents of which the arena says nonsense."""
    with (
        open_slab(tmp_path / "s", NUM_SLOTS) as store,
        open_slab(tmp_path / "s", NUM_SLOTS, block_bytes=2 * SLOT_BYTES) as other,
    ):
        save(store, KEYS)
        arena = np.memmap(tmp_path / "s" / "arena", np.int64, "r+")
        arena[-1 + np.flatnonzero(arena == SLOT_BYTES)[-1]] = owner
        assert 1 == save(other, KEYS[:1], 2 * SLOT_BYTES)


@pytest.mark.parametrize("count", [2, 8])
def test_error_of_a_caller_is_no_damage(count, tmp_path):
    """Who asks for what there is none of is told so, and not to remove the slab; the lease goes on."""
    uses = Uses(np.zeros(count, np.int64), np.zeros(count, np.uint32))
    with open_slab(tmp_path / "s") as store:
        with pytest.raises(ValueError, match=f"{count} uses of 5 blocks"):
            store.reserve(KEYS[:5], SLOT_BYTES, uses)
        with store.reserve(KEYS[:5], SLOT_BYTES) as lease:
            lease.seal(0, 5)
            for at in (5, -1):
                with pytest.raises(ValueError, match=f"{at}. of 5 blocks"):
                    lease.commit([at])
            assert 5 == lease.commit()


@pytest.mark.parametrize("nbytes", [0, SLOT_BYTES + 1, 1 << 31, 1 << 40, 2**64 - 1])
@pytest.mark.parametrize("count", [1, 8])
def test_size_that_is_none_is_a_damaged_block(nbytes, count, tmp_path):
    """Blocks whose records say more than a slot holds are corrupt, and nothing beyond is read."""
    with open_slab(tmp_path / "s") as store:
        save(store, KEYS[:8])
        arrays_of(tmp_path / "s", 8)["records"]["nbytes"] = nbytes
        with store.read(KEYS[:count]) as lease:
            assert 1 <= lease.slots.block_bytes <= SLOT_BYTES
            with pytest.raises(BlockCorruptError):
                lease.verify(0, count)


def test_verification_waits_for_no_size_that_is_none(tmp_path):
    """Damaged records are told at the pace of their slots, not of what they say."""
    with open_slab(tmp_path / "s") as store:
        save(store, KEYS[:8])
        arrays_of(tmp_path / "s", 8)["records"]["nbytes"] = HUGE
        seen, waits = Seen(), []
        with SlabSurvey(tmp_path / "s") as survey:
            assert 8 == len([*verify(survey, seen, 1.0, waits.append)])
        assert 8 * SLOT_BYTES == seen.nbytes
        assert max(waits) <= 8 * SLOT_BYTES
