# SPDX-License-Identifier: Apache-2.0
"""Layouts, hashes, an index and facts for the tests of the scheduler's decisions."""

from collections.abc import Sequence

from ucm.blocks import GroupId, KeyPacker, PackedKey, RowId, ShardId
from ucm.config import SaveDecoded
from ucm.errors import StoreUnavailableError
from ucm.fates import Fate, Told
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.reasons import Reason
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.decoded import SaveLimits
from ucm.scheduler.messages import Failure, SpanOrder, StepPlan, StepReport
from ucm.scheduler.requests import ScheduledRequest, StateOffer, StepFacts
from ucm.scheduler.spans import LOAD_SPANS
from ucm.uses import Uses

DIGEST = bytes(range(16))


Reach = int | GroupKind | None
"""Window tokens, or the kind of a group without: None for ``FULL``."""
STATE = GroupKind.STATE


def make_layout(*groups: tuple[int, Reach], hash_block_tokens: int = 4) -> KVLayout:
    """Return a layout of groups given as (block tokens, window tokens or kind)."""
    return KVLayout(
        groups=tuple(
            _group(at, block_tokens, reach)
            for at, (block_tokens, reach) in enumerate(groups)
        ),
        hash_block_tokens=hash_block_tokens,
        engine_tag="test",
    )


def _group(at: int, block_tokens: int, reach: Reach) -> GroupLayout:
    window = reach if isinstance(reach, int) else None
    kind = GroupKind.WINDOW if isinstance(reach, int) else reach or GroupKind.FULL
    return GroupLayout(
        group_id=GroupId(at),
        kind=kind,
        block_tokens=block_tokens,
        window_tokens=window,
        rows=(
            RowLayout(row_id=RowId(at), page_bytes=64, layer_names=(f"layer.{at}",)),
        ),
    )


def hashes_of(family: str, count: int) -> list[bytes]:
    """Return the hashes of a family of prompts that share every prefix."""
    return [f"{family}:{at:06}".rjust(12).encode() for at in range(count)]


class SetIndex:
    """A block index over a set of keys that counts what it is asked."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.calls = 0
        self.asked = 0
        self.touched: list[bytes] = []
        self.moments: dict[bytes, int] = {}
        self.is_up = True
        self.told: dict[bytes, Told] = {}
        self.told_calls = 0

    def put(self, group: int, hashes: Sequence[bytes], shards: int = 1) -> None:
        """Store blocks on the first shards."""
        for shard in range(shards):
            packer = KeyPacker(DIGEST, GroupId(group), ShardId(shard))
            self.keys.update(packer.pack(hashes))

    def drop(self, group: int, hashes: Sequence[bytes], shard: int = 0) -> None:
        """Evict blocks of one shard."""
        packer = KeyPacker(DIGEST, GroupId(group), ShardId(shard))
        self.keys.difference_update(packer.pack(hashes))

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are stored."""
        self._ask(len(keys))
        for at, key in enumerate(keys):
            if key not in self.keys:
                return at
        return len(keys)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether it is stored."""
        self._ask(len(keys))
        return [key in self.keys for key in keys]

    def fates(self, keys: Sequence[PackedKey]) -> list[Told]:
        """Return what the test has put down of each key; nothing is counted."""
        if not self.is_up:
            raise StoreUnavailableError("planned")
        self.told_calls += 1
        stored, never = Told(Fate.STORED), Told(Fate.NEVER)
        return [stored if k in self.keys else self.told.get(k, never) for k in keys]

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Keep the keys for the test to see."""
        self._ask(0)
        self.touched += keys
        moments = [0] * len(keys) if uses is None else uses.moments.tolist()
        self.moments.update(zip(keys, moments, strict=True))

    def _ask(self, count: int) -> None:
        if not self.is_up:
            raise StoreUnavailableError("planned")
        self.calls += 1
        self.asked += count


def make_adapter(
    layout: KVLayout,
    index: SetIndex,
    *,
    num_ranks: int = 1,
    shards: int = 1,
    span_blocks: int = 8,
    max_step_blocks: int = 1000,
    full_hits: bool = True,
    parks: bool = True,
    decoded: SaveDecoded = SaveDecoded.EACH_BLOCK,
    prompts: bool = True,
    shortest: int = 0,
    tickets: int = 1024,
    nbytes: int = 1 << 30,
    company: int = 0,
    company_seconds: float = 1e6,
    load_spans: int = LOAD_SPANS,
    late_states: bool = False,
    batches: int = 2,
) -> SchedulerAdapter:
    """Return an adapter with the same span size for every group."""
    return SchedulerAdapter(
        layout,
        index,
        keyspace_digest=DIGEST,
        num_ranks=num_ranks,
        shards=[ShardId(shard) for shard in range(shards)],
        span_blocks={group.group_id: span_blocks for group in layout.groups},
        max_step_blocks=max_step_blocks,
        full_hits=full_hits,
        parks=parks,
        limits=SaveLimits(
            decoded=decoded,
            prompts=prompts,
            shortest=shortest,
            tickets=tickets,
            nbytes=nbytes,
            company=company,
            company_seconds=company_seconds,
            load_spans=load_spans,
            late_states=late_states,
        ),
        batches=batches,
    )


def scheduled(
    request_id: str,
    hashes: Sequence[bytes],
    tables: Sequence[Sequence[int]],
    computed: int,
    tokens: int,
    *,
    new: Sequence[Sequence[int]] | None = None,
    is_new: bool = False,
    states: Sequence[StateOffer] = (),
    prompt: int = 0,
) -> ScheduledRequest:
    """Return the facts of one request; a new one has allocated its whole tables."""
    if new is None:
        new = tables if is_new else [[] for _ in tables]
    return ScheduledRequest(
        request_id=request_id,
        computed_tokens=computed,
        end_tokens=computed + tokens,
        prompt_tokens=prompt,
        hashes=hashes,
        tables=tables,
        new_block_ids=new,
        is_new=is_new,
        states=states,
    )


def facts(*requests: ScheduledRequest, preempted: Sequence[str] = ()) -> StepFacts:
    """Return the facts of a step."""
    return StepFacts(scheduled=requests, preempted=dict.fromkeys(preempted, 0))


def failure_of(
    order: SpanOrder, at: int | None = 0, reason: Reason = Reason.EVICTED
) -> Failure:
    """Return the failure of a load, blamed on one of its blocks or on none."""
    return Failure(
        transfer_id=order.transfer_id,
        request_id=order.request_id,
        generation=order.generation,
        group_id=order.group_id,
        bad_hash=b"" if at is None else order.split_hashes()[at],
        reason=reason,
    )


def saved(*orders: SpanOrder, rank: int = 0) -> StepReport:
    """Return the report of saves that are released and settled, all blocks new."""
    ids = tuple(order.transfer_id for order in orders)
    new = {order.transfer_id: len(order.block_ids) for order in orders}
    return StepReport(rank=rank, released=ids, settled_saves=ids, new_blocks=new)


def loaded(*orders: SpanOrder, rank: int = 0) -> StepReport:
    """Return the report of loads that went well."""
    return StepReport(rank=rank, loads_done=tuple(each.transfer_id for each in orders))


HASHES = hashes_of("a", 64)
ONE_FULL = make_layout((4, None))
HYBRID = make_layout((4, None), (8, 10))


def prefill(request_id: str, blocks: Sequence[int]) -> ScheduledRequest:
    """Return the facts of a request that computes whole blocks from the start."""
    count = len(blocks)
    return scheduled(request_id, HASHES[:count], [blocks], 0, 4 * count, is_new=True)


def load(
    adapter: SchedulerAdapter,
    request_id: str,
    blocks: Sequence[int],
    *,
    computed: int = 0,
) -> tuple[SpanOrder, ...]:
    """Let a request load whole blocks and return the orders."""
    adapter.blocks_allocated(
        request_id,
        [blocks],
        HASHES[: len(blocks)],
        computed_tokens=computed,
        external_tokens=4 * len(blocks) - computed,
    )
    return adapter.plan_step(StepFacts()).loads


def saved_blocks(plan: StepPlan) -> dict[int, list[int]]:
    """Return the saved blocks by group."""
    blocks: dict[int, list[int]] = {}
    for order in plan.saves:
        blocks.setdefault(order.group_id, []).extend(order.block_ids)
    return blocks
