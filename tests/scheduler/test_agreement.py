# SPDX-License-Identifier: Apache-2.0
"""Before the key space is known, and engines that save nothing."""

from tests.scheduler.model import (
    DIGEST,
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    prefill,
    scheduled,
)
from ucm.blocks import GroupId, ShardId
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.matches import MatchReason, PrefixMatch


def make(index: SetIndex, *, digest: bytes = b"", saves: bool = True):
    """Return an adapter that may not know its key space yet."""
    return SchedulerAdapter(
        ONE_FULL,
        index,
        keyspace_digest=digest,
        num_ranks=1,
        shards=[ShardId(0)],
        span_blocks={GroupId(0): 8},
        max_step_blocks=64,
        full_hits=True,
        saves=saves,
    )


class TestAgreement:
    def test_nothing_is_found_before_the_key_space_is_known(self) -> None:
        """Blocks that are there are not looked up under a key space of nobody's."""
        index = SetIndex()
        index.put(0, HASHES[:2])
        adapter = make(index)
        unknown = PrefixMatch(0, MatchReason.UNKEYED)
        assert unknown == adapter.match_prefix("r", 9, HASHES[:2], 0)
        adapter.rekey(DIGEST)
        found = PrefixMatch(8, MatchReason.HIT)
        assert found == adapter.match_prefix("r", 9, HASHES[:2], 0)

    def test_what_was_computed_before_is_saved_afterwards(self) -> None:
        """A request that runs already when the ranks agree is saved from its beginning,
        in tickets of the size that fits all ranks."""
        adapter = make(SetIndex())
        plan = adapter.plan_step(facts(prefill("r", [1, 2])))
        assert (bytes(16), ()) == (plan.keyspace_digest, plan.saves)
        adapter.resize({GroupId(0): 1})
        adapter.rekey(DIGEST)
        again = facts(scheduled("r", HASHES[:3], [[1, 2, 3]], 8, 4))
        plan = adapter.plan_step(again)
        assert DIGEST == plan.keyspace_digest
        assert [(1,), (2,), (3,)] == [order.block_ids for order in plan.saves]

    def test_engine_that_saves_nothing_holds_nothing(self) -> None:
        """A consumer orders no save, whatever it computes, and keeps no block."""
        adapter = make(SetIndex(), digest=DIGEST, saves=False)
        assert adapter.plan_step(facts(prefill("r", [1, 2]))).is_empty
        assert 0 == adapter.counts()["holds"]
