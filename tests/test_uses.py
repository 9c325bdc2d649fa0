# SPDX-License-Identifier: Apache-2.0
"""The order in which a store makes room, from the scheduler's orders to its slots."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.kit import Told
from tests.rig import null_log
from tests.scheduler.model import hashes_of, make_layout, scheduled
from ucm.blocks import ShardId
from ucm.config import SaveDecoded, UCMConfig
from ucm.devices.events import DoneFence
from ucm.errors import StoreFullError
from ucm.intake import Intake
from ucm.layout import KVLayout
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.recorder import Recorder
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.decoded import SaveLimits
from ucm.scheduler.messages import StepPlan, StepReport, decode_plan, encode
from ucm.scheduler.requests import StepFacts
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.threads import SYSTEM

DIGEST = bytes(range(16))
BLOCK_BYTES = 64
SHARDS = (ShardId(0), ShardId(1))
ONE = make_layout((4, None))
TWO = make_layout((4, None), (8, None))
CAPACITY = 64


class Engine:
    """A scheduler, and two ranks that save into one store what it orders."""

    def __init__(self, layout: KVLayout, store: Store, span_blocks: int = 7) -> None:
        self.layout, self.store = layout, store
        self.adapter = SchedulerAdapter(
            layout,
            store,
            keyspace_digest=DIGEST,
            num_ranks=len(SHARDS),
            shards=SHARDS,
            span_blocks={group.group_id: span_blocks for group in layout.groups},
            max_step_blocks=1000,
            full_hits=True,
            limits=SaveLimits(decoded=SaveDecoded.EACH_BLOCK),
        )
        self.intakes = [_intake(layout, shard) for shard in SHARDS]
        self.lives = 0
        self.now = 1.0

    def hit(self, family: str, blocks: int) -> int:
        """Return how many tokens of a prompt are found."""
        hashes = hashes_of(family, blocks)
        return self.adapter.match_prefix("new", 4 * blocks, hashes, 0).tokens

    def run(
        self, family: str, blocks: int, *, chunk: int = 1000, cached: int = 0
    ) -> int:
        """Compute a prompt of which the engine has some itself; return the hit."""
        self.now += 1.0
        self.adapter.tick(self.now)
        self.lives += 1
        name, hashes = f"r{self.lives}", hashes_of(family, blocks)
        tables = [[*range(1, blocks + 1)] for _ in self.layout.groups]
        match = self.adapter.match_prefix(name, 4 * blocks, hashes, 4 * cached).tokens
        self.adapter.blocks_allocated(
            name,
            tables,
            hashes,
            computed_tokens=4 * cached,
            external_tokens=match,
        )
        plan = self.adapter.plan_step(StepFacts())
        done = tuple(order.transfer_id for order in plan.loads)
        for rank in range(len(SHARDS)):
            self.adapter.apply_report(StepReport(rank=rank, loads_done=done))
        self.adapter.loads_finished({name})
        for start in range(4 * cached + match, 4 * blocks, chunk):
            tokens = min(chunk, 4 * blocks - start)
            is_new = start == 4 * cached + match
            request = scheduled(name, hashes, tables, start, tokens, is_new=is_new)
            self._save(self.adapter.plan_step(StepFacts(scheduled=(request,))))
        self.adapter.request_finished(name)
        assert self.adapter.is_idle, self.adapter.counts()
        return match

    def _save(self, plan: StepPlan) -> None:
        plan = decode_plan(encode(plan))
        for rank, intake in reversed([*enumerate(self.intakes)]):
            intake.submit(plan.keyspace_digest, plan.saves, DoneFence(), None)
            intake.take_in()
            for ticket in intake.open.values():
                self._store(ticket.span)
            intake.open.clear()
            ids = tuple(order.transfer_id for order in plan.saves)
            self.adapter.apply_report(
                StepReport(rank=rank, released=ids, settled_saves=ids)
            )

    def _store(self, span) -> None:
        try:
            lease = self.store.reserve(span.keys, BLOCK_BYTES, span.uses)
        except StoreFullError:
            return
        with lease:
            lease.seal(0, len(lease.keys))
            lease.commit()


def _intake(layout: KVLayout, shard: ShardId) -> Intake:
    return Intake(
        layout,
        shard,
        DumpQueue(max_tickets=999, max_nbytes=1 << 30, threads=SYSTEM),
        Recorder(Counters(), Mailbox(SYSTEM), null_log()),
        Told(),
        timeout=UCMConfig().timeout,
        log=null_log(),
        threads=SYSTEM,
        on_failure=pytest.fail,
    )


@pytest.fixture(params=["memory", "slab"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Return a store of a few slots."""
    if request.param == "memory":
        made: Store = MemoryStore(CAPACITY, BLOCK_BYTES)
    else:
        made = SlabStore(
            path=str(tmp_path / "slab"),
            capacity_bytes=CAPACITY * 4096,
            block_bytes=BLOCK_BYTES,
        )
    yield made
    made.close()


class TestRoom:
    @pytest.mark.parametrize("layout", [ONE, TWO], ids=["one", "two"])
    @pytest.mark.parametrize("chunk", [1000, 12], ids=["whole", "chunks"])
    def test_prompt_beyond_the_capacity_keeps_its_head(
        self, store: Store, layout: KVLayout, chunk: int
    ) -> None:
        """R-29: of a prompt of 1.25 times the capacity, saved three times in spans, by
        two ranks and in groups of different sizes, as much of the head hits each time
        as there are slots for."""
        engine = Engine(layout, store)
        parts = len(SHARDS) * sum(4 / group.block_tokens for group in layout.groups)
        blocks = math.ceil(1.25 * CAPACITY / parts)
        fits = int(CAPACITY / parts)
        hits = [engine.run("a", blocks, chunk=chunk) // 4 for _ in range(4)]
        assert 0 == hits[0]
        assert fits - 2 <= min(hits[1:]) <= max(hits[1:]) <= fits

    def test_end_of_a_prefix_goes_first_whoever_saved_it(self, store: Store) -> None:
        """R-29: what a shared prefix needs goes last, though the ends behind it were
        saved later, and both parts of a block go at once."""
        engine = Engine(ONE, store)
        engine.run("a", 24)
        engine.run("a", 28)  # hits 24, and saves 4 more
        engine.run("b", 8)  # needs 16 slots, and 8 are free
        assert [24 * 4, 8 * 4] == [engine.hit("a", 28), engine.hit("b", 8)]
        assert CAPACITY == store.stats().committed_blocks

    def test_prefix_of_the_engines_own_cache_outlives_others(
        self, store: Store
    ) -> None:
        """R-30: a prompt that the engine has in its own cache each time, and so never
        asks for, is there when it has it no more."""
        engine = Engine(ONE, store)
        engine.run("hot", 12)
        for family in "abcdefgh":
            engine.run(family, 12)
            engine.run("hot", 13, cached=12)
        assert 12 * 4 <= engine.hit("hot", 12) + 4
