# SPDX-License-Identifier: Apache-2.0
"""The backlog of a tier: bounded, and shared by tenants."""

import random
from collections import Counter
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from tests.agent.unruly import Unruly, guarded, inline, open_core, run_virtual
from tests.stores.slab_kit import open_slab
from ucm.agent.backlog import Backlog
from ucm.agent.spill import Spiller
from ucm.reasons import Reason
from ucm.stores.abc import Change
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, save
from ucm.uses import Uses

KEYS = make_keys(40)


def all_of(backlog: Backlog) -> list:
    """Return what waits, in the order in which it goes if all of a tenant's goes at once."""
    return list(backlog.first(len(KEYS)))


class TestRoom:
    def test_tenant_with_most_makes_room(self) -> None:
        """R-55: a flood of one tenant keeps no block of another out, up to half of the room; what
        goes is its last, whose prompts have the others before it."""
        backlog = Backlog(6)
        assert [None] * 6 == [backlog.add(key, 1, 1) for key in KEYS[:6]]
        assert KEYS[6] == backlog.add(KEYS[6], 1, 1)
        dropped = [backlog.add(key, 1, 2) for key in KEYS[10:15]]
        assert [KEYS[5], KEYS[4], KEYS[3], KEYS[13], KEYS[14]] == dropped
        assert [*KEYS[:3], *KEYS[10:13]] == all_of(backlog)

    def test_tenants_with_as_much_do_not_push_each_other_out(self) -> None:
        """R-55: who would have as much as any other has the one dropped that it brings."""
        backlog = Backlog(5)
        for key, tenant in zip(KEYS[:5], (1, 1, 1, 2, 2), strict=True):
            backlog.add(key, 1, tenant)
        for key, tenant in zip(KEYS[5:9], (2, 1, 2, 1), strict=True):
            assert key == backlog.add(key, 1, tenant)

    def test_tenant_alone_has_all_the_room(self) -> None:
        """R-55: nothing is set aside, and what others had given back is there again."""
        backlog = Backlog(4)
        for tenant in (1, 2, 3):
            assert [None] * 4 == [backlog.add(key, 1, tenant) for key in KEYS[:4]]
            assert [True] * 4 == [backlog.discard(key) for key in KEYS[:4]]
            assert not backlog.discard(KEYS[0])

    def test_tenant_with_most_is_known_behind_a_call_of_many(self) -> None:
        """R-55: several blocks of whoever had most go at a time; another one has most then."""
        backlog = Backlog(6)
        for key, tenant in zip(KEYS[:6], (1, 1, 1, 1, 2, 2), strict=True):
            backlog.add(key, 1, tenant)
        backlog.take(KEYS[:3])
        assert [None] * 3 == [backlog.add(KEYS[at], 1, at) for at in (6, 7, 8)]
        assert KEYS[5] == backlog.add(KEYS[9], 1, 9)


class TestTurns:
    def test_tenants_go_in_turn(self) -> None:
        """R-55: what one tenant saves does not wait until all is spilled that another has saved before;
        each has a call of its own, and what is left of one is the next one's."""
        backlog = Backlog(40)
        for key in KEYS[:8]:
            backlog.add(key, 1, 1)
        for key in KEYS[8:11]:
            backlog.add(key, 1, 2)
        calls = []
        while backlog:
            calls.append(list(backlog.first(4)))
            backlog.take(calls[-1])
        assert [KEYS[:4], [*KEYS[8:11], KEYS[4]], KEYS[5:8]] == calls


def steps_of(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield what to do, with which block, and whose it is."""
    dice = random.Random(seed)
    for _ in range(200):
        verb = dice.choice(["add", "add", "add", "add", "discard", "take"])
        yield verb, dice.randrange(len(KEYS)), dice.choice([0, 0, 0, 1, 2])


@pytest.mark.parametrize("seed", range(8))
def test_backlog_is_its_model(seed) -> None:
    """R-55: whatever comes and goes, there is no more than fits, each tenant's in its order, what is dropped
    is of who has most, and nothing is kept of who has nothing."""
    backlog, model = Backlog(5), {}
    for verb, at, tenant in steps_of(seed):
        key = KEYS[at]
        assert (key in model) == (key in all_of(backlog))
        has = Counter(model.values())
        if verb == "add" and key not in model:
            model[key] = tenant
            last_of = {of: each for each, of in model.items()}
            dropped = backlog.add(key, at, tenant)
            assert (len(model) > 5) == (dropped is not None)
            if dropped is not None:
                has[tenant] += 1
                whose = model.pop(dropped)
                assert has[whose] == max(has.values())
                assert dropped == last_of[whose]
        elif verb == "discard":
            assert (model.pop(key, None) is not None) == backlog.discard(key)
        elif verb == "take":
            first = backlog.first(2)
            assert min(2, len(model)) == len(first)
            for each, nbytes in first.items():
                assert KEYS[nbytes] == each
                del model[each]
            backlog.take(first)
        assert len(model) == len(backlog)
        for whose in set(model.values()):
            own = [each for each in all_of(backlog) if model[each] == whose]
            assert [each for each, of in model.items() if of == whose] == own
        assert set(model.values()) == set(backlog._rows)
        assert sorted(Counter(model.values()).items()) == sorted(
            (of, count) for count, having in backlog._having.items() for of in having
        )


def uses_of(tenant: int, count: int) -> Uses:
    """Return that a tenant uses so many blocks now."""
    moments = np.full(count, 10**15, dtype=np.int64)
    return Uses(moments, np.full(count, tenant, dtype=np.uint32))


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 32 blocks."""
    with open_slab(tmp_path / "slab", 32) as store:
        yield store


class TestSpill:
    def test_flood_of_one_tenant_keeps_no_other_from_a_tier(self, slab) -> None:
        """R-55: of what waits for a slow tier the tenant that saves most has its own dropped; others' blocks
        are all spilled, behind one call for the flood. Of that the last were dropped."""
        tier = Unruly(in_flight=1)
        tier.does.delay = 0.5
        flood, others = KEYS[:24], KEYS[24:28]

        async def run():
            async with open_core(slab, tier, most_waiting=12) as core:
                for more in (flood[:12], flood[12:]):
                    save(slab, more, uses=uses_of(7, len(more)))
                    await anyio.sleep(0.2)
                assert 12 == core.spillers[0].num_waiting
                save(slab, others, uses=uses_of(8, len(others)))
                await core.drain()
                return core.spillers[0].counts

        counts = run_virtual(run)
        assert [*flood[:8], *others, *flood[8:12]] == list(tier.shelf.values)
        assert (28, {Reason.QUEUE_BYTES: 28 - counts.spilled}) == (
            *(counts.offered, counts.dropped),
        )

    def test_block_that_is_dropped_for_another_is_counted_once(self, slab) -> None:
        """R-55: what makes room has its end, and is dropped no second time when the slab loses it."""
        spiller = Spiller(slab, guarded(Unruly()), inline, 4)
        for key in KEYS[:4]:
            spiller.offer([Change(key, BLOCK_BYTES, 1)])
        spiller.offer([Change(KEYS[4], BLOCK_BYTES, 2)])
        for key in KEYS[:5]:
            spiller.withdraw([key])
        assert {Reason.QUEUE_BYTES: 1, Reason.EVICTED: 4} == spiller.counts.dropped
        assert 5 == spiller.counts.offered
        assert spiller.is_idle
