# SPDX-License-Identifier: Apache-2.0
"""
The scheduler's half of a connector: facts of the engine in, orders for workers out.

Everything is called on the scheduler's thread and answers at once; there is no clock,
no I/O of its own and no lock; ``tick`` says what time it is. Per engine step the calls
come in this order::

    match_prefix, blocks_allocated      any number, also for requests that never run
    plan_step                           once; tells of those in ``due`` and of new ones
    request_finished                    for each request that ended
    apply_report                        once per rank that has something to tell
    loads_finished, deferral_ended      after the engine was told the same

What must hold:

- Blocks are held from the plan that saves them until every rank has released them, or
  given up a copy that does not end. A plan that hands a held block to a new owner, or
  loads into one, fences the readers; what the engine overwrites itself it names apart.
- A state that the engine offers is saved by the plan of the same step, or never: soon
  after, its block is another's.
- A finished request is deferred only if its own life holds blocks, or leaves some that
  the next plans save; its deferral goes out with the last of them, never before. It has
  no open load then, or, where requests do not park, one that the engine waits for with no
  request; so none is ever waited for in both directions, which would crash the engine.
- What need not be looked at costs nothing: ``due`` says from how many tokens on a request
  is to be in a step's facts. It may be in them before.
- What the engine was promised is ordered, also when the worker's runtime has failed
  in between: it has to report the load as failed, or the request would wait for ever.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial

from ucm.blocks import GroupId, ShardId
from ucm.errors import LayoutError
from ucm.layout import KVLayout
from ucm.scheduler.budget import LoadQueue, cut_lost
from ucm.scheduler.decoded import SaveLimits
from ucm.scheduler.due import Due, patience_of
from ucm.scheduler.endings import Deferrals
from ucm.scheduler.foreign import Foreign
from ucm.scheduler.holds import HoldLedger
from ucm.scheduler.lives import Lives
from ucm.scheduler.loads import load_orders
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import BlockIndex, PrefixMatcher
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.misses import Misses
from ucm.scheduler.requests import NO_WISHES, Disposition, RequestEnd, StepFacts, Wishes
from ucm.scheduler.saves import SaveSelector
from ucm.scheduler.totals import Totals
from ucm.scheduler.touches import Touches
from ucm.scheduler.transfers import OpenTransfers

__all__ = ["SchedulerAdapter"]

_NOWHERE = bytes(16)
"""A key space without blocks, for loads that were promised before a doubt: they miss."""


class SchedulerAdapter:
    """
    Decides what is loaded, saved, fenced and deferred.

    Args:
        layout: The engine's groups.
        index: Which blocks are stored.
        keyspace_digest: Key space of all keys; empty until ``rekey`` tells, and until
            then nothing is found and nothing saved.
        num_ranks: Workers that each carry out every order and report on it.
        shards: Parts of which each stored block consists.
        span_blocks: By group, the most blocks of one ticket.
        max_step_blocks: About the most blocks saved, and loaded, in one step.
        full_hits: Whether a prompt may hit as a whole.
        saves: Whether this engine saves at all.
        parks: Whether requests wait until they are loaded; otherwise they run in the
            step that orders the load, and no load is put off to a later one.
        limits: When decoded blocks are saved, and what the workers' queues take.
        batches: Steps that the engine plans before it has the output of the first.
    """

    def __init__(
        self,
        layout: KVLayout,
        index: BlockIndex,
        *,
        keyspace_digest: bytes,
        num_ranks: int,
        shards: Sequence[ShardId],
        span_blocks: Mapping[GroupId, int],
        max_step_blocks: int,
        full_hits: bool,
        saves: bool = True,
        parks: bool = True,
        limits: SaveLimits = SaveLimits(),  # noqa: B008 - frozen
        batches: int = 2,
    ) -> None:
        self._layout = layout
        self._matcher = self.matcher = PrefixMatcher(
            layout, index, keyspace_digest, shards, full_hits=full_hits
        )
        self._ledger = self.holds = HoldLedger()
        self._deferrals = Deferrals()
        self._transfers = OpenTransfers(num_ranks, span_blocks, limits.load_spans)
        self.resize = self._transfers.resize
        """Cuts tickets to other sizes from now on."""
        self.misses = Misses(self._matcher, index, self._transfers)
        self._selector = SaveSelector(
            layout,
            self._matcher,
            self._transfers,
            self._ledger,
            self._deferrals,
            num_ranks=num_ranks,
            max_blocks=max_step_blocks,
            limits=limits,
        )
        denied = self._transfers.denied
        self._lives = self.lives = Lives(self._selector.lose, denied, parks=parks)
        self.tick = denied.tick
        """Takes note of the time, in seconds on the machine's monotonic clock."""
        self.due: Due = self._lives.due
        """When a step must tell of each request."""
        self.due.patience = patience_of(layout, waits=limits.may_wait)
        self.records = self._lives.records
        self.awaits_step = self._selector.awaits_step
        self._steps = itertools.count(1)
        self.foreign = Foreign(layout, self._lives, batches)
        self._touches = Touches(layout, self._matcher, index, waits=limits.may_wait)
        self._queued_loads = LoadQueue(layout, max_step_blocks, parks=parks)
        self._saves_at_all = saves
        self.bypass = False
        """Whether a worker's runtime has failed, so that nothing new is started."""
        self._epoch = self._cut_plans = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept for any request or ticket."""
        return not any(n for name, n in self.counts().items() if name != "denied_keys")

    @property
    def holds_blocks(self) -> bool:
        """Whether some save reads blocks, so that those allocated must be told of."""
        return self._ledger.num_holds > 0 or bool(self.foreign.bad)

    @property
    def totals(self) -> Totals:
        """What was counted since the start."""
        loaded, ledger = self._lives.loaded, self._ledger
        return Totals(
            self._transfers.saved_blocks,
            self._selector.dropped_blocks,
            *(loaded.blocks, loaded.tokens, dict(loaded.failed)),
            *(ledger.held_blocks, ledger.quarantined),
            *(self._transfers.strays, self._cut_plans),
        )

    def match_prefix(
        self,
        request_id: str,
        num_tokens: int,
        hashes: Sequence[bytes],
        computed_tokens: int,
        wishes: Wishes = NO_WISHES,
    ) -> PrefixMatch:
        """
        Return how many tokens beyond *computed_tokens* can be loaded.

        Has no side effect and may be asked any number of times.

        Args:
            request_id: Whose prefix.
            num_tokens: Tokens of the request.
            hashes: The engine's block hashes.
            computed_tokens: Tokens that the engine has in its own cache.
            wishes: What the request asks of the store.
        """
        match, asked = self._matcher, (num_tokens, hashes, computed_tokens)
        why = MatchReason.BYPASS if self.bypass else self._lives.declines(request_id)
        if why is not None:
            return match.declined(why, *asked)
        room, queue = NO_WISHES.most_loaded, self._queued_loads
        if queue.is_bounded:
            room = queue.room_tokens(request_id)
        limit = min(room, wishes.most_loaded)
        if limit >= num_tokens:  # as without a limit
            return match.match(*asked, self._transfers.denied)
        most = match.within(num_tokens, computed_tokens, limit)
        found = match.match(most, hashes, computed_tokens, self._transfers.denied)
        if most == num_tokens or not found.is_whole:
            return found
        why = MatchReason.NO_ROOM if limit == room else MatchReason.LIMITED
        cut = match.declined(why, *asked, found.tokens)
        return cut if cut.tokens < cut.wanted else found

    def blocks_allocated(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        hashes: Sequence[bytes],
        *,
        computed_tokens: int,
        external_tokens: int,
        wishes: Wishes = NO_WISHES,
        known_tokens: int = 0,
    ) -> None:
        """
        Order the load that the engine has decided on.

        Only *external_tokens* decides: an engine may have taken another cache's hit, and says 0
        again when a load has ended.

        Args:
            request_id: Whose blocks.
            tables: ``[groups][blocks]`` the request's block tables.
            hashes: The engine's block hashes.
            computed_tokens: Tokens that the engine has in its own cache.
            external_tokens: Tokens beyond these that it expects to be loaded.
            wishes: What the request asks of the store.
            known_tokens: That a former life had computed, if one was taken back just now.

        Raises:
            LayoutError: The tables have no block to load into: it would wait for ever.
        """
        if external_tokens == 0:
            return
        life = self._lives.begin(request_id, wishes, known_tokens)
        self._touches.add(life.stay.moment, hashes, computed_tokens + external_tokens)
        loaded = range(computed_tokens, computed_tokens + external_tokens)
        to = self._layout, self._transfers
        hit = load_orders(*to, life.key, tables, hashes, loaded)
        self._queued_loads.put(hit[0])
        self._lives.promised(life, hit, external_tokens)
        if not life.loads:
            raise LayoutError(
                f"request {request_id}: no block to load {external_tokens} tokens into"
            )

    def plan_step(self, facts: StepFacts | None) -> StepPlan:
        """
        Return the orders of one step; every block that its saves read is held then.

        Args:
            facts: Of the step; None: it computes, and nothing else is to be told of it.
        """
        step, digest = next(self._steps), self._matcher.keyspace_digest or _NOWHERE
        if self.foreign.doubts or self.foreign.bad:
            self.foreign.plan_begins(step, facts)
        if facts is None or facts.is_of_nobody:
            ledger, is_quiet = self._ledger, self._selector.begins_quietly(step)
            is_quiet = is_quiet and not (self._queued_loads or self._touches)
            if is_quiet and (not facts or not ledger.readers_in(facts, self._layout)):
                return StepPlan(step=step, epoch=self._epoch, keyspace_digest=digest)
            facts = facts or StepFacts(is_idle=False)
        if facts.preempted:
            self._selector.preempted(self._lives, facts.preempted, step)
        loads, unfinished = self._queued_loads.take()
        enter, layout = self._lives.enter, self._layout
        lives = [enter(each, layout, self._transfers) for each in facts.scheduled]
        is_foreign = bool(self.foreign.doubts or self.foreign.bad)
        for request, life in zip(facts.scheduled, lives, strict=True):
            computed = request.computed_tokens
            is_foreign |= computed > min(request.own_tokens, life.good_tokens)
            if request.is_new and computed and not life.external:
                self._touches.add(life.stay.moment, request.hashes, computed)
        if is_foreign:
            self.foreign.look(step, facts, lives, loads)
        self._touches.mark(step, at_once=facts.is_idle)
        # Before the saves: these read what this step writes, after it was written.
        readers = self._ledger.readers_in(facts, layout, loads)
        self._selector.written = cache(partial(facts.written_blocks, layout, loads))
        select = self._selector.orders if self._saves_now else self._selector.nothing
        saves = select(facts, lives, step)
        if self.foreign.bad:
            self.foreign.look_again(facts, lives)
        if saves:
            self.records.ordered(saves)
        self._lives.looked_at(zip(facts.scheduled, lives, strict=True))
        deferred = self._deferrals.take() if self._deferrals.new else ()
        self._cut_plans += bool(unfinished or self._deferrals.new)
        return StepPlan(
            step=step,
            epoch=self._epoch,
            keyspace_digest=digest,
            loads=loads,
            unfinished=unfinished,
            saves=saves,
            fences=readers.fenced,
            overwritten=readers.overwritten,
            lost=cut_lost(readers.lost) if readers.lost else {},
            deferred=deferred,
            is_idle=facts.is_idle,
        )

    def apply_report(self, report: StepReport) -> None:
        """
        Take note of what one rank reports; unknown tickets are counted and passed over.

        Raises:
            LedgerError: The rank released a hold twice, or one that it gave up.
        """
        for transfer_id in filter(self._knows_hold, report.released):
            self._ledger.release(transfer_id, report.rank)
        for transfer_id in filter(self._knows_hold, report.quarantined):
            self._ledger.quarantine(transfer_id, report.rank)
        if report.failures:
            for failure in report.failures:
                self._transfers.load_failed(failure)
            self._lives.loads_failed(report.failures)
        if done := report.loads_done:
            end = self._transfers.end_load
            self._lives.loads_ended([each for each in done if end(each, report.rank)])
        if report.settled_saves or report.unstored_saves:
            self.records.saved(self._transfers.end_saves(report))
        if not report.healthy:
            self.bypass = True
            self._selector.drop_endings()

    def loads_finished(self, request_ids: Collection[str]) -> None:
        """Take note that the engine was told that the requests' loads have ended."""
        self._lives.loads_ended(self._transfers.end_loads_of(request_ids))

    def request_finished(
        self, request_id: str, end: RequestEnd | None = None
    ) -> Disposition:
        """
        Return whether the engine may free the blocks of a request that ended.

        Blocks that a load still fills are kept by the engine itself until it hears of its end.

        Args:
            request_id: Which.
            end: What there is of it; None: nothing more of it is saved.
        """
        if (life := self._lives.finish(request_id)) is None:
            is_deferred = request_id in self._deferrals
        else:
            is_left = self._selector.take_over(life, end, saves=self._saves_now)
            is_deferred = is_left or self._ledger.holds_of(life.key) > 0
            if is_deferred:
                self._deferrals.add(life.key, is_due=not is_left)
        self.records.ended(request_id, is_deferred=is_deferred)
        return Disposition.DEFER if is_deferred else Disposition.FREE_NOW

    def deferral_ended(self, request_ids: Iterable[str]) -> None:
        """Take note that the engine has freed the blocks of deferred requests."""
        self._deferrals.ended(request_ids)
        self.records.freed(request_ids)

    def doubt(self, epoch: int) -> None:
        """Find and save nothing for now, but keep holds; *epoch* goes to the ranks."""
        self._epoch = epoch
        self._touches.clear()
        self._lives.stop_saving()
        self._selector.drop_endings()
        self._matcher.rekey(b"")

    def rekey(self, keyspace_digest: bytes) -> None:
        """Find and save again, under the same key space as before or another."""
        self._transfers.rekeyed(keyspace_digest)
        self._matcher.rekey(keyspace_digest)
        self._lives.due.clear()

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "lives": len(self._lives),
            "records": len(self.records),
            "queued_loads": len(self._queued_loads),
            "touches": len(self._touches),
            "doubts": len(self.foreign.doubts),
            **self._selector.counts(),
            "new_deferrals": len(self._deferrals.new),
            "deferred": len(self._deferrals),
            "holds": self._ledger.num_holds,
            "held_blocks": self._ledger.held_blocks,
            **self._transfers.counts(),
        }

    @property
    def _saves_now(self) -> bool:
        is_keyed = bool(self._matcher.keyspace_digest)
        return self._saves_at_all and is_keyed and not self.bypass

    def _knows_hold(self, transfer_id: int) -> bool:
        self._transfers.strays += not (known := self._ledger.is_held(transfer_id))
        return known
