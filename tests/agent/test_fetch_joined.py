# SPDX-License-Identifier: Apache-2.0
"""Fetch: who joins what others have begun, and have given up since, is not left behind."""

import anyio

from tests.agent.unruly import TIMEOUT_S, Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(12)


class Picky(Unruly):
    """Never ends a get of the first block."""

    async def get(self, keys, targets):
        """Get, or hang."""
        if KEYS[0] in keys:
            await anyio.sleep_forever()
        return await super().get(keys, targets)


async def give_up_amid(core, keys, seconds) -> None:
    """Want blocks, and want them no more after a while."""
    want = want_of(keys)
    with anyio.move_on_after(seconds):
        await core.fetch(want)
    core.drop(want)


class TestJoined:
    def test_block_that_was_passed_over_is_fetched_for_who_wants_it_next(
        self, tmp_path
    ) -> None:
        """R-53: a batch whose turn came when nobody wanted it any more is no flight that one
        may join, though another batch of those that began with it still hangs."""
        backend = Picky()
        backend.does.delay = 0.25

        async def fetch(slab):
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                await give_up_amid(core, KEYS, 0.4)  # its second batch comes at 0.5
                await anyio.sleep(0.2)
                want = want_of(KEYS[8:])
                began = anyio.current_time()
                await core.fetch(want)
                return want, anyio.current_time() - began, core

        with open_slab(tmp_path / "slab", 400) as slab:
            want, seconds, core = run_virtual(lambda: fetch(slab))
        assert (4, Reason.NONE) == (want.found, want.reason)
        assert seconds < TIMEOUT_S / 2
        counts = core.fetcher.counts
        assert (12 + 4, 0, 4 + 4) == (counts.begun, counts.joined, counts.fetched)

    def test_part_of_a_batch_that_nobody_wants_in_its_turn_is_not_joined(
        self, tmp_path
    ) -> None:
        """R-53: of a batch of which some blocks are wanted in its turn, and others no more, only
        the former are on their way: who wants the others then begins anew."""
        backend = Picky()
        backend.does.delay = 0.25

        async def fetch(slab):
            await lay(backend, KEYS)
            async with (
                open_core(slab, backend) as core,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(give_up_amid, core, KEYS, 0.4)
                await anyio.sleep(0.1)
                tasks.start_soon(core.fetch, want_of(KEYS[8:10]))
                await anyio.sleep(0.5)  # its third batch comes at 0.5
                want = want_of(KEYS[10:])
                began = anyio.current_time()
                await core.fetch(want)
                return want, anyio.current_time() - began, core.fetcher.counts

        with open_slab(tmp_path / "slab", 400) as slab:
            want, seconds, counts = run_virtual(lambda: fetch(slab))
        assert (2, Reason.NONE) == (want.found, want.reason)
        assert seconds < TIMEOUT_S / 2
        assert (12 + 2, 2) == (counts.begun, counts.joined)

    def test_block_that_a_tier_failed_is_not_tried_on_for_nobody(
        self, tmp_path
    ) -> None:
        """R-53: what one tier did not bring, and nobody waits for, has ended: who wants it
        while others of that flight are on their way has the next tier asked."""
        first, second = Unruly(), Picky()
        first.does.fails_get, first.does.delay = True, 0.25

        async def fetch(slab):
            await lay(first, KEYS[:8])
            await lay(second, KEYS[:8])
            async with open_core(slab, first, second) as core:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(give_up_amid, core, KEYS[:8], 0.4)
                    await anyio.sleep(0.1)
                    tasks.start_soon(core.fetch, want_of(KEYS[:4]))
                    await anyio.sleep(0.5)  # the first tier has failed, at 0.5
                    want = want_of(KEYS[4:8])
                    began = anyio.current_time()
                    await core.fetch(want)
                    tasks.cancel_scope.cancel()
                return want, anyio.current_time() - began

        with open_slab(tmp_path / "slab", 400) as slab:
            want, seconds = run_virtual(lambda: fetch(slab))
        assert (4, Reason.NONE) == (want.found, want.reason)
        assert seconds < TIMEOUT_S / 2
