# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of tiers that are not its own: those of whichever agent it meets."""

import pytest
from vllm.distributed.kv_events import BlockRemoved

from tests.integration.vllm.test_kv_events import World, stored


class TestOtherTiers:
    @pytest.mark.parametrize("tiers", [[], ["disk"]])
    def test_what_the_last_agents_tiers_had_is_gone_from_these(self, tiers) -> None:
        """R-57: where the next agent has other tiers, blocks of the last one's are told to be gone
        from those, and not from what has their number by now."""
        world = World()
        world.teller.joined(["redis"])
        world.tell(stored(1, medium=1), number=2, begins=True, listed=True)
        world.teller.take()
        world.teller.joined(tiers)
        there = [stored(1, medium=1)] if tiers else []
        world.tell(*there, number=3, begins=True, listed=True)
        gone, *new = world.teller.take()
        assert (BlockRemoved, "redis") == (type(gone), gone.ownership)
        assert tiers == [event.ownership for event in new]
