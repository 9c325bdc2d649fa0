# SPDX-License-Identifier: Apache-2.0
"""What a tier takes: all, or what has come again; and what is said of the rest."""

import pytest

from tests.agent.unruly import Unruly, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.admission import Admission, Admitter, admission_of
from ucm.errors import ConfigError
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys, save

KEYS = make_keys(12)
AGAIN = Admission.AGAIN


class TestAdmitter:
    def test_everything_is_taken_unless_told_otherwise(self) -> None:
        """R-56: by default nothing is kept from a tier, and nothing is remembered."""
        admitter = Admitter(admission_of({}, "tiers.0"))
        assert admitter.admits(KEYS[0])
        assert not admitter.refused(KEYS[0])

    def test_block_is_taken_when_it_comes_again(self) -> None:
        """R-56: stored once it is refused, and taken after it was evicted and stored anew;
        what is listed twice has not come twice."""
        admitter = Admitter(AGAIN)
        assert [False, False] == [admitter.admits(KEYS[0]) for _ in range(2)]
        admitter.removed(KEYS[0])
        assert admitter.refused(KEYS[0])
        assert admitter.admits(KEYS[0])
        assert not admitter.refused(KEYS[0])
        assert not admitter.admits(KEYS[1])

    def test_memory_is_bounded(self) -> None:
        """R-56: of more blocks than are remembered the oldest are new again."""
        admitter = Admitter(AGAIN, most_keys=4)
        for key in KEYS[:5]:
            assert not admitter.admits(key)
            admitter.removed(key)
        assert [False, True] == [admitter.refused(key) for key in KEYS[:2]]
        assert [False, True] == [admitter.admits(KEYS[at]) for at in (0, 4)]

    def test_unknown_rule_is_refused_by_name(self) -> None:
        """X-09: with the key, and the words that there are."""
        with pytest.raises(ConfigError, match="again") as caught:
            admission_of({"admission": "twice"}, "tiers.1")
        assert "tiers.1.admission" == caught.value.key


class TestCore:
    def test_seen_once_is_kept_from_one_tier_and_said_so(self, tmp_path) -> None:
        """R-56: the tier that takes what comes again has nothing of a first time, the other
        all; it is counted, a want that may use that tier alone hears the reason, one that may
        use the other too, which took the block and lost it, does not; and the second time it
        is spilled."""
        spares, takes = Unruly(), Unruly(medium="other")

        async def run(slab):
            async with open_core(
                slab, spares, takes, rules=[AGAIN, Admission.ALL]
            ) as core:
                save(slab, KEYS[:4])
                await core.drain()
                first = len(spares.shelf.values), len(takes.shelf.values)
                counts = core.spillers[0].counts
                told = counts.offered, counts.dropped[Reason.ADMISSION]
                slab.forget(KEYS[:4])
                await core.drain()
                takes.shelf.values.clear()
                wants = want_of(KEYS[:4]), want_of(KEYS[:4])
                wants[0].only = [(spares.capabilities.medium, "")]
                for want in wants:
                    await core.fetch(want)
                    core.drop(want)
                save(slab, KEYS[:4])
                await core.drain()
                reasons = [want.reason for want in wants]
                return first, told, reasons, len(spares.shelf.values)

        with open_slab(tmp_path / "slab", 32) as slab:
            expected = (0, 4), (4, 4), [Reason.ADMISSION, Reason.ABSENT], 4
            assert expected == run_virtual(lambda: run(slab))
