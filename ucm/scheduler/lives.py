# SPDX-License-Identifier: Apache-2.0
"""
What is remembered of each request.

A *life* is one stay of a request in the engine's memory. A request id is used for many
lives: after a preemption its blocks start afresh, and an engine may use an id again.
Each life has a generation of its own, so that nothing reported for one counts for
another. States and arrows of a life::

    (none) --load ordered--> waiting --scheduled--> running --preempted--> (ended)
    (none) --scheduled--------------------------------^  |
    waiting, running --load ordered--> (ended), next life
    running --scheduled as new--> (ended), next life
    waiting, running --request finished--> (ended)

While a load that fills blocks of the life is open, nothing of it is saved: when the load
fails, all that was computed on top of it is garbage, on every rank, and so once it is over.

A life is looked at when a block of it is to be saved, and says then from how many tokens
on it is to be looked at again. In between it costs nothing. Blocks behind the prompt need
not be saved as they become whole (``Decoded``): they are all between the life's cursor
and what is computed, and nothing else is kept of them.

The table of a ``STATE`` group tells nothing of what to save: its states go on being
overwritten. So the engine offers each in the step that computes it: then or never.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ucm.blocks import GroupId
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.budget import MAX_ID_CHARS
from ucm.scheduler.decoded import NEVER_DUE, Decoded
from ucm.scheduler.denials import Denials
from ucm.scheduler.due import Due
from ucm.scheduler.loads import FailedLoads, Hit
from ucm.scheduler.matches import MatchReason
from ucm.scheduler.messages import Failure
from ucm.scheduler.records import Record, Records
from ucm.scheduler.requests import (
    NO_LIMIT,
    NULL_BLOCK,
    RequestEnd,
    ScheduledRequest,
    Wishes,
)
from ucm.scheduler.shares import Run, Stay, joined, run_of, there
from ucm.scheduler.totals import LoadTotals
from ucm.scheduler.transfers import OpenTransfers

__all__ = ["Life", "Lives"]

_EARLIEST_NS = 1 << 31
"""No life has an earlier moment: stamps of its blocks stay above 0."""


class Life(msgspec.Struct, kw_only=True, eq=False):
    """
    One life of a request.

    Args:
        key: Request id and generation, by which holds are found.
        stay: The same, and when its blocks count as used.
        record: Of its request.
        was_scheduled: It has run; its blocks are its own.
        may_load: False after a load failed and named no block.
        may_save: False after the store was reset: its blocks are of the time before.
        good_tokens: It stood on blocks that did not come, behind so many tokens, and has not run since.
        most_saved: Blocks are saved within so many tokens only.
        loads: Open loads on which the content of its blocks depends.
        loading: Tokens and blocks of its own that are on their way; none once they came or failed.
        external: ``[groups]`` block indexes that came from a load; empty without one.
            Only those that a hit needs hold anything, and these are stored.
        starts_at_computed: A load failed; what lies before what is computed anew is left alone.
        prompt_tokens: What was prompt, or there already, at the first look.
        cursors: ``[groups]`` first block not taken; None before the first look.
        pending: ``[groups]`` runs of blocks taken for which no plan had room.
        queued: Blocks taken that wait for company, by group.
        due: From how many tokens on it is to be looked at.
        is_over: Its blocks are not its own any more.
    """

    key: tuple[str, int]
    stay: Stay
    record: Record
    was_scheduled: bool = False
    may_load: bool = True
    may_save: bool = True
    good_tokens: int = NO_LIMIT
    most_saved: int = NO_LIMIT
    loads: set[int] = set()
    loading: tuple[int, int] = (0, 0)
    external: tuple[range, ...] = ()
    starts_at_computed: bool = False
    prompt_tokens: int = 0
    cursors: list[int] | None = None
    pending: tuple[list[range], ...] = ()
    queued: list[tuple[GroupId, Run]] = []
    due: int = 0
    is_over: bool = False

    def load_failed(self, *, names_block: bool) -> None:
        """
        Forget what was loaded; the engine computes it anew.

        Args:
            names_block: Another match is shorter; else this life loads nothing any more.
        """
        self.may_load &= names_block
        self.may_save &= not self.is_over  # nobody computes it anew
        self.loading = 0, 0
        self.external = ()
        self.starts_at_computed = True
        self.cursors, self.pending, self.queued = None, (), []

    def advance(
        self,
        layout: KVLayout,
        request: ScheduledRequest,
        decoded: Decoded,
        stored: Callable[[GroupLayout, Sequence[bytes]], list[bool]],
    ) -> None:
        """
        Queue the blocks that became complete, are to be saved and need not wait.

        Each is looked at once per life. At the first look the prefix that was there is
        compared with the store, which evicts on its own. Not so those of ``STATE`` groups.

        Args:
            layout: Groups, in the order of the request's tables.
            request: The facts of this step.
            decoded: Says what waits.
            stored: Tells of blocks of a group whether they are stored.
        """
        if first_look := self.cursors is None:
            tokens = request.prompt_tokens, request.computed_tokens
            first = decoded.first(layout.groups, self.record.prompt_tokens, *tokens)
            self.cursors, self.prompt_tokens = first
            self.pending = tuple(map(list, ((),) * len(layout.groups)))
        hashed = len(request.hashes) * layout.hash_block_tokens
        whole = min(request.end_tokens, hashed, self.most_saved)
        self.due = NEVER_DUE
        for at, group in enumerate(layout.groups):
            if group.kind is GroupKind.STATE:
                continue
            start = self.cursors[at]
            complete = max(start, whole // group.block_tokens)
            stop, due = decoded.cut(group, self.prompt_tokens, start, complete)
            if due <= self.most_saved:
                self.due = min(self.due, due)
            if stop <= start:
                continue
            self.cursors[at] = stop
            computed = min(request.computed_tokens // group.block_tokens, stop)
            if first_look and self.starts_at_computed:
                start = max(start, computed)
            runs = there(request.tables[at], range(start, stop))
            if self.external:
                runs = self._unloaded(at, runs)
            if first_look and computed > start:
                old = [i for run in runs for i in run if i < computed]
                hashes = [request.hashes[layout.hash_index(group, i)] for i in old]
                found = zip(old, stored(group, hashes), strict=True)
                lacking = [range(i, i + 1) for i, is_stored in found if not is_stored]
                new = [range(max(run.start, computed), run.stop) for run in runs]
                runs = joined((*lacking, *filter(None, new)))
            self.pending[at].extend(runs)

    def rest(
        self, layout: KVLayout, end: RequestEnd, decoded: Decoded
    ) -> list[tuple[GroupId, Run]]:
        """Return by group, of one looked at, the whole blocks at its end that no plan has saved."""
        hashed = len(end.hashes) * layout.hash_block_tokens
        tokens = min(end.accepted_tokens, hashed, self.most_saved)
        if not decoded.saves_all(tokens, self.prompt_tokens):
            tokens = self.prompt_tokens
        rest = []
        for at, cursor in enumerate((self.cursors or ()) if end.tables else ()):
            group, table = layout.groups[at], end.tables[at]
            if group.kind is GroupKind.STATE:
                continue
            complete = min(tokens // group.block_tokens, len(table))
            runs = there(table, range(cursor, complete))
            if self.external:
                runs = self._unloaded(at, runs)
            if self.queued or self.pending[at]:
                mine = [run.at for of, run in self.queued if of == group.group_id]
                mine += self.pending[at]
                left = [run[: max(0, complete - run.start)] for run in mine]
                old = [part for run in left for part in there(table, run)]
                runs = joined((*old, *runs))
            for run in runs:
                whole = run_of(layout, group, run, table, end.hashes)
                rest.append((group.group_id, whole))
        return rest

    def waiting_blocks(self, layout: KVLayout, tokens: int, decoded: Decoded) -> int:
        """Return how many complete blocks of it are not saved, after so many tokens."""
        waiting = sum(len(run) for runs in self.pending for run in runs)
        waiting += sum(len(run.hashes) for _, run in self.queued)
        for group, cursor in zip(layout.groups, self.cursors or (), strict=False):
            # Of a prompt that is being computed, nobody knows how far it came.
            is_known = cursor >= self.prompt_tokens // group.block_tokens
            is_saved = decoded.saves_all(tokens, self.prompt_tokens)
            if group.kind is GroupKind.FULL and is_known and is_saved:
                waiting += max(0, tokens // group.block_tokens - cursor)
        return waiting

    def _unloaded(self, at: int, runs: list[range]) -> list[range]:
        """Return what of these blocks of the *at*-th group was not loaded."""
        loaded = self.external[at]
        before = [range(run.start, min(run.stop, loaded.start)) for run in runs]
        behind = [range(max(run.start, loaded.stop), run.stop) for run in runs]
        return list(filter(None, (*before, *behind)))

    def offered(
        self, layout: KVLayout, at: int, request: ScheduledRequest, *, is_late: bool
    ) -> list[Run]:
        """
        Return the blocks of the *at*-th group that the engine offers in this step, but not these.

        Those that end within a block, came from a load or are not completed. That with the state
        with which a step began within a block, and went past its end but for drafts: vLLM 0.32 takes it for the end's.
        Nor behind drafts, where the state at the end *is_late*.
        """
        group, begun = layout.groups[at], request.computed_tokens
        loaded = self.external[at] if self.external else range(0)
        known = min(request.end_tokens, len(request.hashes) * layout.hash_block_tokens)
        whole = min(known, self.most_saved) // group.block_tokens
        blocks, reached = {}, request.end_tokens if is_late else known
        for each in request.states:
            end, size = each.boundary_tokens, group.block_tokens
            index, is_passed = end // size - 1, end - size < begun < end < reached
            if each.group_id != group.group_id or index in loaded or is_passed:
                continue
            if index in range(whole) and not end % size and each.block_id != NULL_BLOCK:
                block_hash = request.hashes[layout.hash_index(group, index)]
                blocks[index] = Run(index, (each.block_id,), (block_hash,))
        return [blocks[index] for index in sorted(blocks)]


class Lives:
    """
    The present life of each request that the engine runs or loads for.

    Used on the scheduler's thread only.

    Args:
        on_lost: Told of each life that the next one replaces, and its known tokens.
        clock: Knows the time.
        parks: Whether requests wait until they are loaded.
    """

    def __init__(
        self, on_lost: Callable[[Life, int], None], clock: Denials, *, parks: bool
    ) -> None:
        self._on_lost, self._clock, self._parks = on_lost, clock, parks
        self.records = Records()
        """What becomes of the requests."""
        self._lives: dict[str, Life] = {}
        self.get = self._lives.get
        """Returns the present life of a request, if there is one."""
        self._finished: list[Life] = []  # their loads are not over
        self._loading: list[Life] = []  # none that loads is missing here
        self._generations = itertools.count(1)
        self.due, self.loaded = Due(), LoadTotals()

    def __len__(self) -> int:
        return len(self._lives) + len(self._finished)

    def declines(self, request_id: str) -> MatchReason | None:
        """Return why nothing is looked up for a request, if so."""
        if (life := self._lives.get(request_id)) is not None and not life.may_load:
            return MatchReason.LOAD_FAILED
        return MatchReason.LONG_ID if len(request_id) > MAX_ID_CHARS else None

    def begin(self, request_id: str, wishes: Wishes, known_tokens: int = 0) -> Life:
        """Start the next life of a request, just now; a present one ends, preempted."""
        if request_id in self._lives and (former := self.end(request_id)):
            former.record.preemptions += former.was_scheduled
            self._on_lost(former, known_tokens)
        moment = max(_EARLIEST_NS, int((self._clock.now + wishes.retain_seconds) * 1e9))
        key = request_id, next(self._generations)
        life = self._lives[request_id] = Life(
            key=key,
            stay=Stay(*key, moment, wishes.tenant),
            record=self.records.begun(key),
            may_save=len(request_id) <= MAX_ID_CHARS,
            most_saved=wishes.most_saved,
        )
        return life

    def promised(self, life: Life, hit: Hit, tokens: int) -> None:
        """Take note of what the engine was promised, and by which tickets it comes."""
        life.record.load_ordered(tokens, self._clock.now)
        orders, life.external = hit[0], tuple(hit[1])
        life.loading = tokens, sum([len(order.block_ids) for order in orders])
        self.waits(life, [order.transfer_id for order in orders])

    def waits(self, life: Life, loads: Iterable[int]) -> None:
        """Let a life wait for these loads as well."""
        life.loads.update(loads)
        self._loading.append(life)

    def end(self, request_id: str) -> Life | None:
        """End the present life of a request and return it."""
        self.due.pop(request_id, None)
        if (life := self._lives.pop(request_id, None)) is not None:
            life.is_over = True
            life.record.load_over(self._clock.now)  # amid it a client may go away
        return life

    def finish(self, request_id: str) -> Life | None:
        """End and return a life; unless its own load parked it, it goes on to hear of loads."""
        if (life := self.end(request_id)) is not None:
            waits = not life.was_scheduled or (self._parks and life.loading[0])
            life.may_save &= not (life.loads and waits) and life.good_tokens == NO_LIMIT
            self._finished += [life] if life.loads and life.may_save else []
        return life

    def preempt(self, request_id: str) -> Life | None:
        """End a life whose blocks were taken away, and return it."""
        life = self._lives.get(request_id)
        # One that has not run is the next already: a reset preempts and resumes in one step.
        if life is None or not life.was_scheduled:
            return None
        life.record.preemptions += 1
        return self.end(request_id)

    def enter(
        self, request: ScheduledRequest, layout: KVLayout, transfers: OpenTransfers
    ) -> Life:
        """Return the life in which a request runs, with the loads that it waits for."""
        life = self._lives.get(request.request_id)
        if life is None or (request.is_new and life.was_scheduled):
            if request.computed_tokens:  # a session keeps its blocks: none is lost
                self.end(request.request_id)
            life = self.begin(request.request_id, request.wishes)
        life.record.prompt_tokens = life.record.prompt_tokens or request.prompt_tokens
        if not life.was_scheduled:
            life.was_scheduled = True
            reads = request.computed_tokens and transfers.filling
            for at, group in enumerate(layout.groups if reads else ()):
                # An engine that loads while it computes shares these at once.
                self.waits(life, transfers.loads_into(request.prefix_blocks(group, at)))
        return life

    def looked_at(self, looks: Iterable[tuple[ScheduledRequest, Life]]) -> None:
        """Take note of when these are to be looked at again."""
        patience, told = self.due.patience, []
        for request, life in looks:
            # One that ends before anybody went through its blocks leaves nothing to be saved.
            late = patience if life.cursors is None else 0
            told.append((request.request_id, life.due - late, request.end_tokens))
        self.due.put(told)

    def stop_saving(self) -> None:
        """Save nothing more of the present lives."""
        for life in self._lives.values():
            life.may_save = False

    def loads_ended(self, transfer_ids: Iterable[int]) -> None:
        """Let no life wait for these loads any more."""
        if not (ended := set(transfer_ids)):
            return
        for life in self.loading():
            life.loads -= ended
            if not life.loads and life.loading[0]:
                (tokens, blocks), life.loading = life.loading, (0, 0)
                life.record.load_over(self._clock.now, tokens=tokens)
                self.loaded.tokens += tokens
                self.loaded.blocks += blocks
        self._finished = [life for life in self._finished if life.loads]

    def loads_failed(self, failures: Sequence[Failure]) -> None:
        """Tell the lives for which these loads were ordered, and all that wait for them."""
        failed = FailedLoads(failures)
        for life in (*self._lives.values(), *self._finished):
            for failure in failed.told_to(life.key, life.loads):
                if life.loading[0]:
                    self.loaded.failed[failure.reason] += 1
                    life.record.load_over(self._clock.now, failure=failure.reason)
                life.load_failed(names_block=bool(failure.bad_hash))
                if not life.is_over:
                    self.due.at_once(life.stay.request_id)

    def loading(self) -> list[Life]:
        """Return the lives that wait for loads."""
        some = [each for each in self._loading if each.loads]
        self._loading = [each for each in some if self.get(each.key[0]) is each]
        return self._loading + self._finished
