# SPDX-License-Identifier: Apache-2.0
"""
Which blocks a step saves.

Complete blocks of ``FULL`` and ``WINDOW`` groups queue up in the request's life and are
taken as far as a step and its message have room. A state that the engine offers is taken at once, or
dropped: there is no queue for what is overwritten next. What a request leaves when it ends
is taken over, and saved by the next plans as far as the workers' queues have room.

All that a step saves of one group goes into as few tickets as hold it, whosever it is.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ucm.blocks import GroupId
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.budget import MAX_HOLDS, Draft
from ucm.scheduler.company import Company
from ucm.scheduler.decoded import NEVER_DUE, Decoded, SaveLimits
from ucm.scheduler.endings import Deferrals, Ending, Endings, Left
from ucm.scheduler.holds import HoldLedger
from ucm.scheduler.lives import Life, Lives
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.requests import (
    NO_WISHES,
    NULL_BLOCK,
    RequestEnd,
    ScheduledRequest,
    StepFacts,
)
from ucm.scheduler.shares import Run, run_of
from ucm.scheduler.transfers import OpenTransfers
from ucm.scheduler.unsaved import LOAD_FAILED, NOT_TAKEN, Why

__all__ = ["SaveSelector"]

_HURRY_STEPS = 64


class SaveSelector:
    """
    Orders saves of blocks that are not stored and that nobody saves already.

    Used on the scheduler's thread only.

    Args:
        layout: Groups, in the order of the requests' tables.
        matcher: Knows which blocks are stored.
        transfers: Knows which are being saved, and which count as missing.
        ledger: Where the blocks of each save are held.
        deferrals: Told when nothing more is saved of a request that ended.
        num_ranks: Workers that each carry out every order.
        max_blocks: The most blocks of one step.
        limits: How much may be saved, and when.
    """

    def __init__(
        self,
        layout: KVLayout,
        matcher: PrefixMatcher,
        transfers: OpenTransfers,
        ledger: HoldLedger,
        deferrals: Deferrals,
        *,
        num_ranks: int,
        max_blocks: int,
        limits: SaveLimits,
    ) -> None:
        self._layout = layout
        self._matcher = matcher
        self._transfers = transfers
        self._ledger = ledger
        self._deferrals = deferrals
        self._ranks = range(num_ranks)
        self._max_blocks = max_blocks
        self._nbytes = {each.group_id: each.block_bytes for each in layout.groups}
        self._limits = limits
        self._decoded = Decoded(
            limits.decoded, transfers.limits, limits.prompts, limits.shortest
        )
        self._hurries_until = 0
        self._endings = Endings(limits.seconds)
        self._company = Company(limits.company, limits.company_seconds)
        self._draft = Draft(0)
        self.written: Callable[[], Collection[int]] = tuple
        """Returns the blocks that the step writes, some of which may have had a state."""
        self._goes = True
        """Whether this plan takes whatever there is."""
        self.dropped_blocks = 0
        """Whole blocks that nobody took in time, or that the engine took back before."""

    def counts(self) -> dict[str, int]:
        """Return how many ended requests are not saved yet, and of how many blocks wait."""
        return {"endings": len(self._endings), "waiting": len(self._company)}

    def awaits_step(self) -> bool:
        """Return whether blocks wait for a step, even if nobody runs any more."""
        return bool(self._endings or self._company)

    def preempted(self, lives: Lives, tokens: Mapping[str, int], step: int) -> None:
        """
        End lives whose blocks the engine took back, and let the others hurry.

        It is short of memory, so that for some steps decoded blocks are saved at once.

        Args:
            lives: The present ones; all are looked at when the hurry begins.
            tokens: By request that was preempted, how many were computed.
            step: Number of the plan.
        """
        for request_id, computed in tokens.items():
            if (life := lives.preempt(request_id)) is not None:
                self.lose(life, computed)
        if not self._decoded.hurries:
            lives.due.clear()
        self._decoded.hurries = True
        self._hurries_until = step + _HURRY_STEPS

    def lose(self, life: Life, tokens: int) -> None:
        """Count what a life leaves that is not saved, if so many tokens are known."""
        tokens = min(tokens, life.most_saved)
        lost = life.waiting_blocks(self._layout, tokens, self._decoded)
        self.dropped_blocks += lost
        life.record.dropped_blocks += lost

    def take_over(self, life: Life, end: RequestEnd | None, *, saves: bool) -> bool:
        """
        Take what a life leaves to be saved; the engine has to keep its blocks then.

        Args:
            life: It has ended.
            end: What there is of its request; None: nothing that could be saved.
            saves: Whether anything is saved at present.

        Returns:
            Whether ``orders`` will tell when to defer it.
        """
        decoded, is_all = self._decoded, end is not None and end.wishes is NO_WISHES
        if end is not None and saves and not (is_all and decoded.takes_all):
            self._transfers.unsaved.passed_over(self._layout, end, self._now, decoded)
        if end is None or not (saves and life.may_save):
            self.lose(life, 0 if end is None else end.accepted_tokens)
            return False
        if life.loads and not decoded.is_short(end.accepted_tokens, end.prompt_tokens):
            look = end.as_look(life.stay.request_id)  # there was none while it loaded
            life.advance(self._layout, look, decoded, self._stored)
        left: list[tuple[GroupId, Run]] = []
        for group_id, run in life.rest(self._layout, end, self._decoded):
            mine = self._transfers.claim(group_id, run, is_saved=False)
            left += zip(itertools.repeat(group_id), mine, strict=False)
        if left:
            self._endings.add(Ending(life, left))
            # The engine keeps all blocks of the request until the last of them is saved.
            for nbytes, table in zip(self._nbytes.values(), end.tables, strict=True):
                self._company.add(len(table) * nbytes)
        return bool(left)

    def drop_endings(self) -> None:
        """Save nothing more of those that ended, nor let a step wait for others."""
        self._drop(self._endings.drop_all())
        self._company.leave_all()

    def begins_quietly(self, step: int) -> bool:
        """Return whether no save or deferral has a part in a plan that tells of no request."""
        goes = self._company.goes(step, self._transfers.denied.now)
        return not (goes or self._decoded.hurries or self._deferrals.new)

    def orders(
        self, facts: StepFacts, lives: Sequence[Life], step: int
    ) -> tuple[SpanOrder, ...]:
        """
        Order what is to be saved, as far as the step has room, and hold it.

        Args:
            facts: Of the step.
            lives: Of those who are looked at.
            step: Number of the plan.
        """
        self._decoded.hurries = step < self._hurries_until
        room = min(self._max_blocks, MAX_HOLDS - self._ledger.num_holds)
        self._draft = draft = Draft(room)
        hurries = facts.is_idle or self._decoded.hurries
        self._goes = self._company.goes(step, self._transfers.denied.now) or hurries
        if self._goes:
            self._take_those_who_wait()
        for request, life in zip(facts.scheduled, lives, strict=True):
            before = self.dropped_blocks
            self._select(life, request)
            life.record.dropped_blocks += self.dropped_blocks - before
        if not draft.runs:
            return ()
        orders = tuple(
            order
            for group_id, shares in draft.shares()
            for order in self._transfers.open_saves(
                self._layout.group(group_id), shares
            )
        )
        for order in orders:
            self._hold(order)
        return orders

    def _take_those_who_wait(self) -> None:
        """Take what is left of those that ended, and what waited, as far as there is room."""
        if self._endings:
            self._drop(self._endings.drop_late(self._now))
            take = functools.partial(self._take_left, is_over=True)
            ended = self._endings.take(self._now, take)
            self._deferrals.due([ending.life.key for ending in ended])
        self._company.leave(functools.partial(self._take_left, is_over=False))
        if not (self._endings or self._company):
            self._company.is_gone()

    def nothing(
        self, facts: StepFacts, lives: Sequence[Life], step: int
    ) -> tuple[SpanOrder, ...]:
        """Save nothing, and do not look at anybody again before that changes."""
        self.drop_endings()
        for life in lives:
            life.due = NEVER_DUE
        return ()

    def _hold(self, order: SpanOrder) -> None:
        nbytes = self._nbytes[GroupId(order.group_id)]
        self._ledger.take(
            order.transfer_id,
            [owner[:2] for owner in order.owners],
            order.block_ids,
            self._ranks,
            nbytes=len(order.block_ids) * nbytes,
            now=self._transfers.denied.now,
        )

    def _drop(self, endings: Iterable[Ending]) -> None:
        for ending in endings:
            life = ending.life
            for group_id, run in ending.left:
                why = NOT_TAKEN if life.may_save else LOAD_FAILED
                self._not_taken(group_id, run.hashes, why)
                life.record.dropped_blocks += len(run.hashes)
            self._deferrals.due([life.key])

    def _not_taken(
        self, group_id: GroupId, hashes: Sequence[bytes], why: Why = NOT_TAKEN
    ) -> None:
        self.dropped_blocks += len(hashes)
        self._transfers.unsaved.put(group_id, hashes, why, self._now)

    @property
    def _now(self) -> float:
        return self._transfers.denied.now

    def _take_left(self, lives: Iterable[Left], *, is_over: bool) -> None:
        """Take blocks out of the lists of lives, as far as there is room."""
        draft, transfers = self._draft, self._transfers
        for stay, left in lives:
            while left:
                group_id, run = left[0]
                num_blocks, room = len(run.block_ids), draft.room_of(stay)
                if is_over:
                    room = min(room, self._queue_room(group_id))
                if room <= 0:
                    return
                some = run if num_blocks <= room else run.part(0, room)
                limit = transfers.limits[group_id]
                for mine in transfers.claim(group_id, some):
                    draft.put(stay, group_id, mine, limit)
                    if is_over:
                        size = self._nbytes[group_id]
                        draft.ended_tickets += -(-len(mine.block_ids) // limit)
                        draft.ended_nbytes += len(mine.block_ids) * size
                if num_blocks > room:
                    left[0] = group_id, run.part(room, num_blocks)
                    return
                del left[0]

    def _queue_room(self, group_id: GroupId) -> int:
        """
        Return how many blocks of endings fit into what the workers let wait.

        Of a step's tickets each counts as if nobody shared it. A worker in whose queue
        nothing waits takes one block at least.
        """
        draft, ledger, limits = self._draft, self._ledger, self._limits
        tickets = limits.tickets - ledger.num_holds - draft.ended_tickets
        nbytes = limits.nbytes - ledger.held_nbytes - draft.ended_nbytes
        most = tickets * self._transfers.limits[group_id]
        room = min(most, nbytes // self._nbytes[group_id])
        return max(room, not (draft.ended_nbytes or ledger.num_holds))

    def _select(self, life: Life, request: ScheduledRequest) -> None:
        """
        Take blocks of a scheduled request, group by group, and say when to look again.

        Args:
            life: In which it runs. Of one that waits for loads nothing is taken: its
                blocks are garbage if they fail.
            request: The facts of this step.
        """
        if life.loads or not life.may_save:
            life.due = 0 if life.loads else NEVER_DUE
            for at in range(len(self._layout.groups)):
                self._take_offered(life, request, at, 0)  # counted as dropped
            return
        # What was stored once was worth it.
        is_new = not life.starts_at_computed
        tokens = request.end_tokens, request.prompt_tokens
        if is_new and self._decoded.shortest and self._decoded.is_short(*tokens):
            life.due = self._decoded.shortest
            return
        life.advance(self._layout, request, self._decoded, self._stored)
        for at, group in enumerate(self._layout.groups):
            if group.kind is GroupKind.STATE:
                room = self._draft.room_of(life.stay)
                self._take_offered(life, request, at, room)
            elif life.pending[at] and not self._waits(life, request, at):
                self._take_pending(life, request, at)
        if any(life.pending):
            life.due = 0

    def _waits(self, life: Life, request: ScheduledRequest, at: int) -> bool:
        """Let pending blocks wait for company, if they are few and stay where they are."""
        group, pending = self._layout.groups[at], life.pending[at]
        if group.kind is not GroupKind.FULL:
            return False
        size = self._nbytes[group.group_id]
        if self._goes or sum(map(len, pending)) * size >= self._company.most:
            self._take_left([(life.stay, life.queued)], is_over=False)  # comes before
            return False
        for blocks in pending:
            table, hashes = request.tables[at], request.hashes
            run = run_of(self._layout, group, blocks, table, hashes)
            self._company.put(life, group.group_id, run, len(blocks) * size)
        pending.clear()
        return True

    def _take_pending(self, life: Life, request: ScheduledRequest, at: int) -> None:
        """Take blocks that were not taken yet, as far as there is room."""
        group, pending = self._layout.groups[at], life.pending[at]
        table, hashes = request.tables[at], request.hashes
        while pending and (room := self._draft.room_of(life.stay)):
            some, rest = pending[0][:room], pending[0][room:]
            pending[:1] = [rest] if rest else []
            run = run_of(self._layout, group, some, table, hashes)
            self._put(life, group.group_id, run)

    def _put(self, life: Life, group_id: GroupId, run: Run) -> None:
        """Let the plan save what nobody saves; a block whose place was taken is dropped."""
        self.dropped_blocks += (num_gone := run.block_ids.count(NULL_BLOCK))
        gone = (block_id == NULL_BLOCK for block_id in run.block_ids)
        limit = self._transfers.limits[group_id]
        for some in run.without(gone) if num_gone else (run,):
            for mine in self._transfers.claim(group_id, some):
                self._draft.put(life.stay, group_id, mine, limit)

    def _take_offered(
        self, life: Life, request: ScheduledRequest, at: int, room: int
    ) -> None:
        if not request.states:
            return
        group = self._layout.groups[at]
        group_id, is_late = group.group_id, self._limits.late_states
        offered = [
            run
            for run in life.offered(self._layout, at, request, is_late=is_late)
            if self._transfers.claim(group_id, run, is_saved=False)
            and self._decoded.saves_up_to(
                (run.start + 1) * group.block_tokens, request.prompt_tokens
            )
        ]
        stored = self._stored(group, [run.hashes[0] for run in offered])
        wanted = [
            run for run, is_stored in zip(offered, stored, strict=True) if not is_stored
        ]
        mine = [run for run in wanted if self._is_there(request, at, run)][:room]
        self._not_taken(group_id, [run.hashes[0] for run in wanted if run not in mine])
        for run in mine:
            self._put(life, group_id, run)

    def _is_there(self, request: ScheduledRequest, at: int, run: Run) -> bool:
        """
        Return whether the block of an offered state has it behind the step.

        vLLM 0.32 offers states as an output says that drafts were accepted, and takes back those
        that these went past as it plans: whoever needs a block, or a copy, may have been given it.
        """
        if run.block_ids[0] in request.tables[at][run.start : run.start + 1]:
            return True
        return run.block_ids[0] not in self.written()

    def _stored(self, group: GroupLayout, hashes: Sequence[bytes]) -> list[bool]:
        return self._matcher.stored(group, hashes, self._transfers.denied)
