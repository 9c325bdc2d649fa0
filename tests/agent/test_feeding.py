# SPDX-License-Identifier: Apache-2.0
"""A ledger has what is in the slab and in tiers, from the first to the last."""

import asyncio
from contextlib import asynccontextmanager

import anyio

from tests.agent.unruly import Unruly, inline, run_virtual
from tests.stores.slab_kit import open_slab
from ucm.agent.feeding import feed_slab, feed_tiers
from ucm.agent.ledger import Ledger
from ucm.backends.disk import DiskBackend
from ucm.backends.watched import WatchedBackend
from ucm.errors import StoreUnavailableError
from ucm.stores.abc import Change, Changes, Cursor
from ucm.testing.backend_contract import seal
from ucm.testing.store_blocks import make_keys, save

KEYS = make_keys(40)


def sealed(keys):
    """Return blocks to be put."""
    return [seal(key) for key in keys]


def there(ledger: Ledger, medium: int) -> set[int]:
    """Return the numbers of the keys that a ledger knows to be somewhere."""
    return {at for at, key in enumerate(KEYS) if ledger.has(medium, key)}


@asynccontextmanager
async def fed(store):
    """Feed a ledger with a slab."""
    ledger = Ledger(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed_slab, ledger, store, inline)
        yield ledger
        tasks.cancel_scope.cancel()


class TestSlab:
    def test_slab_is_listed_and_followed(self, tmp_path) -> None:
        """R-57: what was there before, what is saved, and what makes room for it."""

        async def run():
            with open_slab(tmp_path / "slab", 16) as slab:
                save(slab, KEYS[:4])
                async with fed(slab) as ledger:
                    await anyio.sleep(1)
                    assert {0, 1, 2, 3} == there(ledger, 0)
                    for at in range(4, 40, 4):
                        save(slab, KEYS[at : at + 4])
                    await anyio.sleep(1)
                    has = slab.contains(KEYS)
                    return there(ledger, 0), {at for at in range(40) if has[at]}

        told, stored = run_virtual(run)
        assert 0 < len(stored) < 40
        assert stored == told

    def test_what_a_listing_leaves_out_is_gone(self) -> None:
        """R-57: after a death in the slab, or when the agent was too slow, it lists anew; a
        slab that does not answer for a moment is asked again."""
        answers = [
            Changes(
                tuple(Change(key, 9) for key in KEYS[:3]),
                Cursor(1, 0, 9),
                True,
                False,
            ),
            StoreUnavailableError("busy"),
            Changes((Change(KEYS[1], 0),), Cursor(1, 1, 9), False, True),
            Changes((Change(KEYS[2], 9),), Cursor(2, 0, 5), True, False),
            Changes((Change(KEYS[5], 9),), Cursor(2, 0, 9), False, True),
        ]

        class Store:
            def changes(self, cursor):
                if not answers:
                    return Changes((), cursor, False, True)
                if isinstance(answer := answers.pop(0), Exception):
                    raise answer
                return answer

        async def run():
            async with fed(Store()) as ledger:
                await anyio.sleep(1)
                return there(ledger, 0), ledger.num_changes

        assert ({2, 5}, 6) == run_virtual(run)

    def test_nobody_is_told_before_all_was_listed(self) -> None:
        """R-57: who begins to follow an agent that has just begun is not told that nothing
        is there, however long the slab's first listing takes."""
        answers = [
            StoreUnavailableError("busy"),
            Changes((Change(KEYS[0], 9),), Cursor(1, 0, 1), True, False),
            Changes((Change(KEYS[1], 9),), Cursor(1, 0, 2), False, True),
        ]

        class Store:
            def changes(self, cursor):
                answer = answers.pop(0) if answers else Changes((), cursor, False, True)
                if isinstance(answer, Exception):
                    raise answer
                return answer

        async def run():
            async with fed(Store()) as ledger:
                batch = await ledger.read(KEYS[0][:17], alone=False).next()
                return [entry.key for entry in batch.entries], batch.listed

        assert (KEYS[:2], True) == run_virtual(run)


class TestTiers:
    def test_tiers_are_numbered_behind_the_slab(self, tmp_path) -> None:
        """R-57: each tier tells under its number, and what it has already as well."""

        async def run():
            ledger = Ledger(3)
            settings = {"path": str(tmp_path), "capacity": 4 << 20, "threads": 2}
            disk = await DiskBackend.open_configured(settings, "tiers.1")
            await disk.put(sealed(KEYS[:1]))
            tiers = [WatchedBackend(Unruly()), WatchedBackend(disk)]
            await feed_tiers(ledger, tiers)
            assert [False, True] == [tier.is_told for tier in tiers]
            await tiers[0].put(sealed(KEYS[1:3]))
            await tiers[0].delete(KEYS[1:2])
            await tiers[1].put(sealed(KEYS[3:4]))
            await disk.aclose()
            return [there(ledger, medium) for medium in range(3)]

        assert [set(), {2}, {0, 3}] == asyncio.run(run())

    def test_others_have_their_turn_while_what_is_there_is_told(
        self, monkeypatch
    ) -> None:
        """R-54: a drive of a million blocks held the agent up for seconds as the first engine
        followed it; what goes meanwhile is not there, and nobody is told before all is."""
        monkeypatch.setattr("ucm.agent.calls._IN_TURN", 8)

        class Listed(Unruly):
            def watch(self, tell):
                self.tell = tell
                return KEYS

        async def run():
            ledger, tier = Ledger(2), Listed()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed_tiers, ledger, [WatchedBackend(tier)])
                await anyio.lowlevel.checkpoint()
                assert (set(range(8)), False) == (there(ledger, 1), ledger.is_whole)
                for key in (KEYS[0], KEYS[39], KEYS[38]):
                    tier.tell(key, False)
                tier.tell(KEYS[38], True)
            assert ledger.is_whole
            return there(ledger, 1)

        assert set(range(1, 39)) == asyncio.run(run())
