# SPDX-License-Identifier: Apache-2.0
"""Fetch: a tier that takes its time to say what it has does not cost what another one has."""

import anyio
import pytest

from tests.agent.unruly import TIMEOUT_S, Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.admission import Admission
from ucm.agent.hits import Hits
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(12)


class Far(Unruly):
    """Takes its time to look, and none to get."""

    def __init__(self, look_s: float, **can: object) -> None:
        super().__init__(**can)
        self._look_s = look_s

    async def exists(self, keys):
        """Wait, then look."""
        await anyio.sleep(self._look_s)
        return await super().exists(keys)


def fetched(tmp_path, near, far, seconds, **terms):
    """Fetch twelve blocks of which a tier has eight, and the next one four; return what came, and when."""

    async def run(slab):
        await lay(near, KEYS[:8])
        await lay(far, KEYS[8:])
        async with open_core(slab, near, far) as core:
            want = want_of(KEYS, seconds, **terms)
            began = anyio.current_time()
            await core.fetch(want)
            seconds_of = anyio.current_time() - began
            core.drop(want)
            await anyio.sleep(2 * TIMEOUT_S)
            assert (0, {}) == (core.fetcher.num_open, core.fetcher._budget.held)
            return want, seconds_of, core

    with open_slab(tmp_path / "slab", 120) as slab:
        return run_virtual(lambda: run(slab))


def test_tier_that_is_slow_to_look_does_not_cost_what_another_has(tmp_path) -> None:
    """R-53: the blocks of the first tier come, though the next one says what it has when nobody waits any
    more; all of them were waited for to the deadline, and none came."""
    want, seconds, _ = fetched(tmp_path, Unruly(), Far(1.2), seconds=1.0)
    assert (8, Reason.UNAVAILABLE) == (want.found, want.reason)
    assert 0.5 == pytest.approx(seconds, abs=0.01)


def test_tier_that_answers_in_half_of_the_time_is_waited_for(tmp_path) -> None:
    """R-53: what it has as well comes with the rest."""
    want, _, _ = fetched(tmp_path, Unruly(), Far(0.4), seconds=1.0)
    assert (12, Reason.NONE) == (want.found, want.reason)


def test_tier_that_hangs_is_found_out_though_nobody_waits(tmp_path) -> None:
    """R-51, R-53: a question that is not waited for has its end, and is held against the tier."""
    far = Unruly()
    far.does.hangs = True

    async def run(slab):
        await lay(near := Unruly(), KEYS)
        rules = [Admission.AGAIN] * 2  # nothing is spilled
        async with open_core(slab, near, far, rules=rules) as core:
            for key in KEYS[:3]:
                await core.fetch(want_of([key, bytes(len(key))], 1.0))
            await anyio.sleep(2 * TIMEOUT_S)
            return core.fetcher._tiers[1].is_open

    with open_slab(tmp_path / "slab", 120) as slab:
        assert run_virtual(lambda: run(slab))


def test_tier_is_waited_for_where_nothing_else_is_there(tmp_path) -> None:
    """R-53: there is nothing to be lost by it."""

    async def run(slab):
        await lay(far := Far(0.8), KEYS)
        async with open_core(slab, Unruly(), far) as core:
            want = want_of(KEYS, 1.0)
            await core.fetch(want)
            return want.found, want.reason

    with open_slab(tmp_path / "slab", 120) as slab:
        assert (12, Reason.NONE) == run_virtual(lambda: run(slab))


def test_tier_is_waited_for_where_all_or_nothing_is_of_use(tmp_path) -> None:
    """R-53: a part of a hit that needs all of its blocks is not fetched instead of it."""
    hits = Hits([1] * 12, [0] * 12, 12)
    want, _, _ = fetched(tmp_path, Unruly(), Far(0.4), seconds=1.0, hits=hits)
    assert (1, 12, Reason.NONE) == (want.reach, want.found, want.reason)
