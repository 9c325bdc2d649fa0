# SPDX-License-Identifier: Apache-2.0
"""
What the engine tells of its requests, and what is remembered of each.

A *life* is one stay of a request in the engine's memory. A request id is used for many
lives: after a preemption its blocks start afresh, and an engine may use an id again.
Each life has a generation of its own, so that nothing reported for one counts for
another. States and arrows of a life::

    (none) --load ordered--> waiting --scheduled--> running --preempted--> (ended)
    (none) --scheduled--------------------------------^  |
    waiting, running --load ordered--> (ended), next life
    running --scheduled as new--> (ended), next life
    waiting, running --request finished--> (ended)

While a load that fills blocks of the life is open, nothing of it is saved: when the
load fails, all that was computed on top of it is garbage, on every rank.

The table of a ``STATE`` group tells nothing of what to save: its blocks hold states that
go on being overwritten, and each state is gone soon after it was a prefix's. So the
engine offers a state in the step that computes it. It is saved then or never.
"""

import enum
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.budget import MAX_ID_CHARS, block_nbytes
from ucm.scheduler.messages import Failure, SpanOrder
from ucm.scheduler.totals import LoadTotals
from ucm.scheduler.transfers import BlockRef

__all__ = [
    "NULL_BLOCK",
    "Disposition",
    "Life",
    "Lives",
    "ScheduledRequest",
    "StateOffer",
    "StepFacts",
]

NULL_BLOCK: Final = 0
"""The block id that stands for no block in a table."""


class Disposition(enum.Enum):
    """What the engine is to do with the blocks of a finished request."""

    FREE_NOW = "free_now"
    DEFER = "defer"
    """Keep them until every rank has reported the request."""


@attrs.frozen
class StateOffer:
    """
    A block of a ``STATE`` group that holds a prefix's state after the step.

    Args:
        group_id: Which group.
        block_id: Slot in the engine's pool; the request's table need not name it.
        boundary_tokens: Tokens of the prefix; one that ends within a block is of no
            use, because no hit ends there.
    """

    group_id: int
    block_id: int
    boundary_tokens: int


@attrs.frozen(kw_only=True)
class ScheduledRequest:
    """
    One request that runs in this step.

    Tables are read only in steps in which the request is new or a block of it becomes
    complete, so they may be resolved on access.

    Args:
        request_id: The engine's name for it.
        computed_tokens: Tokens whose KV is there before the step.
        scheduled_tokens: Tokens that the step computes.
        hashes: The engine's block hashes, for known tokens only.
        tables: ``[groups][blocks]`` the full current block tables.
        new_block_ids: ``[groups]`` blocks allocated in this step.
        is_new: It runs for the first time, or again after a preemption.
        states: All states of the request that the step completes.
    """

    request_id: str
    computed_tokens: int
    scheduled_tokens: int
    hashes: Sequence[bytes]
    tables: Sequence[Sequence[int]]
    new_block_ids: Sequence[Sequence[int]]
    is_new: bool
    states: Sequence[StateOffer] = ()

    def prefix_blocks(self, group: GroupLayout, at: int) -> Sequence[int]:
        """Return the blocks of the *at*-th group that the step only reads."""
        return self.tables[at][: self.computed_tokens // group.block_tokens]


@attrs.frozen(kw_only=True)
class StepFacts:
    """
    What happens in one engine step.

    Args:
        scheduled: Who runs.
        preempted: Whose blocks were taken away.
        overwritten: Blocks that the engine clears or copies onto by itself, beside the
            forward pass.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted: frozenset[str] = frozenset()
    overwritten: frozenset[int] = frozenset()

    def written_blocks(
        self, layout: KVLayout, loads: Iterable[SpanOrder] = ()
    ) -> set[int]:
        """Return the blocks that loads, and the forward pass for new owners, write."""
        written = {block_id for order in loads for block_id in order.block_ids}
        for request in self.scheduled:
            for at, group in enumerate(layout.groups):
                new = set(request.new_block_ids[at])
                if request.is_new and new:
                    new.difference_update(request.prefix_blocks(group, at))
                written |= new
        return written


@attrs.define(kw_only=True)
class Life:
    """
    One life of a request.

    Args:
        request_id: Whose.
        generation: Which.
        was_scheduled: It has run; its blocks are its own.
        may_load: False after a load failed and named no block.
        may_save: False after the store was reset: its blocks are of the time before.
        loads: Open loads on which the content of its blocks depends.
        loading: Tokens and blocks of its own that are on their way; none once they
            have arrived or failed.
        external: ``[groups]`` block indexes that came from a load; empty without one.
            Only those that a hit needs hold anything, and these are stored.
        starts_at_computed: A load failed; what lies before the first block that is
            computed anew is left alone.
        block_nbytes: What a block of it costs at most in a message.
        cursors: ``[groups]`` first block not looked at; None before the first look.
        pending: ``[groups]`` complete blocks that wait to be saved.
    """

    request_id: str
    generation: int
    was_scheduled: bool = False
    may_load: bool = True
    may_save: bool = True
    loads: set[int] = attrs.Factory(set)
    loading: tuple[int, int] = (0, 0)
    external: tuple[range, ...] = ()
    starts_at_computed: bool = False
    block_nbytes: int = attrs.field(init=False)
    cursors: list[int] | None = None
    pending: tuple[deque[int], ...] = ()

    def __attrs_post_init__(self) -> None:
        self.block_nbytes = block_nbytes(self.request_id)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and generation, by which holds are found."""
        return self.request_id, self.generation

    @property
    def num_pending(self) -> int:
        """Complete blocks that wait to be saved."""
        return sum(map(len, self.pending))

    def promised(
        self, orders: Sequence[SpanOrder], tokens: int, external: Iterable[range]
    ) -> None:
        """Take note of what the engine was promised, and by which tickets it comes."""
        self.external = tuple(external)
        self.loads.update(order.transfer_id for order in orders)
        self.loading = tokens, sum(len(order.block_ids) for order in orders)

    def load_failed(self, *, names_block: bool) -> None:
        """
        Forget what was loaded; the engine computes it anew.

        Args:
            names_block: The block to blame is known, so that another match is shorter.
                Otherwise this life loads nothing any more.
        """
        self.may_load &= names_block
        self.loading = 0, 0
        self.external = ()
        self.starts_at_computed = True
        self.cursors = None
        self.pending = ()

    def advance(
        self,
        layout: KVLayout,
        request: ScheduledRequest,
        stored: Callable[[GroupLayout, Sequence[bytes]], list[bool]],
    ) -> None:
        """
        Queue the blocks that became complete and are worth saving.

        Each block is looked at once per life. At the first look the prefix that was
        there already is compared with the store, because the engine's own cache and
        the store evict on their own. Of ``STATE`` groups nothing is queued.

        Args:
            layout: Groups, in the order of the request's tables.
            request: The facts of this step.
            stored: Tells of blocks of a group whether they are stored.
        """
        first_look = self.cursors is None
        if self.cursors is None:
            self.cursors = [0] * len(layout.groups)
            self.pending = tuple(deque() for _ in layout.groups)
        for at, group in enumerate(layout.groups):
            complete = _complete_blocks(layout, group, request)
            start = self.cursors[at]
            if complete <= start or group.kind is GroupKind.STATE:
                continue
            self.cursors[at] = complete
            computed = min(request.computed_tokens // group.block_tokens, complete)
            if first_look and self.starts_at_computed:
                start = max(start, computed)
            table = request.tables[at]
            loaded = self.external[at] if self.external else range(0)
            blocks = [
                i
                for i in range(start, complete)
                if table[i] != NULL_BLOCK and i not in loaded
            ]
            if first_look and computed > start:
                old = blocks[: bisect_left(blocks, computed)]
                hashes = [request.hashes[layout.hash_index(group, i)] for i in old]
                found = stored(group, hashes)
                blocks[: len(old)] = [
                    i for i, is_stored in zip(old, found, strict=True) if not is_stored
                ]
            self.pending[at].extend(blocks)

    def offered(
        self, layout: KVLayout, at: int, request: ScheduledRequest
    ) -> list[BlockRef]:
        """
        Return the blocks of the *at*-th group that the engine offers in this step.

        Without those that end within a block, those that came from a load, and those
        that the step does not complete.
        """
        group = layout.groups[at]
        loaded = self.external[at] if self.external else range(0)
        complete = _complete_blocks(layout, group, request)
        blocks = {}
        for offer in request.states:
            index, rest = divmod(offer.boundary_tokens, group.block_tokens)
            index -= 1
            if offer.group_id != group.group_id or rest or index in loaded:
                continue
            if 0 <= index < complete and offer.block_id != NULL_BLOCK:
                block_hash = request.hashes[layout.hash_index(group, index)]
                blocks[index] = BlockRef(index, offer.block_id, block_hash)
        return [blocks[index] for index in sorted(blocks)]


class Lives:
    """
    The present life of each request that the engine runs or loads for.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_generations", "_lives", "dropped_blocks", "loaded")

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}
        self._generations = itertools.count(1)
        self.dropped_blocks = 0
        """Complete blocks that were never saved: their request ended before their
        turn, or the engine took them back."""
        self.loaded = LoadTotals()

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, request_id: str) -> Life | None:
        """Return the present life of a request."""
        return self._lives.get(request_id)

    def begin(self, request_id: str) -> Life:
        """Start the next life of a request; a present one ends."""
        self.end(request_id)
        life = Life(
            request_id=request_id,
            generation=next(self._generations),
            may_save=len(request_id) <= MAX_ID_CHARS,
        )
        self._lives[request_id] = life
        return life

    def end(self, request_id: str) -> Life | None:
        """End the present life of a request and return it."""
        life = self._lives.pop(request_id, None)
        if life is not None:
            self.dropped_blocks += life.num_pending
        return life

    def preempt(self, request_id: str) -> None:
        """
        End a life whose blocks were taken away.

        A life that has not run yet is the next one already: an engine that resets its
        cache preempts and resumes in one step.
        """
        life = self._lives.get(request_id)
        if life is not None and life.was_scheduled:
            self.end(request_id)

    def of_scheduled(self, request: ScheduledRequest) -> Life:
        """Return the life in which a request runs, a new one where it needs one."""
        life = self._lives.get(request.request_id)
        if life is None or (request.is_new and life.was_scheduled):
            life = self.begin(request.request_id)
        return life

    def stop_saving(self) -> None:
        """Save nothing more of the present lives."""
        for life in self._lives.values():
            life.may_save = False

    def loads_ended(self, transfer_ids: Iterable[int]) -> None:
        """Let no life wait for these loads any more."""
        ended = set(transfer_ids)
        if ended:
            for life in self._lives.values():
                life.loads -= ended
                if not life.loads and life.loading[0]:
                    tokens, blocks = life.loading
                    life.loading = 0, 0
                    self.loaded.tokens += tokens
                    self.loaded.blocks += blocks

    def load_failed(self, failure: Failure) -> None:
        """Tell the life for which a load was ordered, and all that wait for it."""
        key = failure.request_id, failure.generation
        for life in self._lives.values():
            if failure.transfer_id in life.loads or life.key == key:
                if life.loading[0]:
                    self.loaded.failed[failure.reason] += 1
                life.load_failed(names_block=bool(failure.bad_hash))

    def loading(self) -> list[Life]:
        """Return the lives that wait for loads."""
        return [life for life in self._lives.values() if life.loads]


def _complete_blocks(
    layout: KVLayout, group: GroupLayout, request: ScheduledRequest
) -> int:
    """Return how many blocks are full after the step and have a hash."""
    end_tokens = request.computed_tokens + request.scheduled_tokens
    hashed_tokens = len(request.hashes) * layout.hash_block_tokens
    return min(end_tokens, hashed_tokens) // group.block_tokens
