# SPDX-License-Identifier: Apache-2.0
"""
What the engine tells of its requests.

Of a step only those are told at which somebody looks: requests that are new, reach the
number of tokens from which ``Due`` asks to look again, or offer a state.
"""

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import msgspec

from ucm.layout import GroupLayout, KVLayout
from ucm.scheduler.messages import SpanOrder

__all__ = [
    "NO_LIMIT",
    "NO_WISHES",
    "NULL_BLOCK",
    "Disposition",
    "RequestEnd",
    "ScheduledRequest",
    "StateOffer",
    "StepFacts",
    "Wishes",
]

NULL_BLOCK: Final = 0
"""The block id that stands for no block in a table."""
NO_LIMIT: Final = sys.maxsize
"""More tokens than any request has."""


class Disposition(enum.Enum):
    """What the engine is to do with the blocks of a finished request."""

    FREE_NOW = "free_now"
    DEFER = "defer"
    """Keep them until every rank has reported the request."""


@attrs.frozen(kw_only=True)
class Wishes:
    """
    What a request asks of the store, beside its tokens.

    Args:
        tenant: Whose share of the store its blocks take; 0: nobody's.
        retain_seconds: By how much later than now its blocks count as used; below 0,
            by how much earlier.
        most_saved: Only blocks within so many of its tokens are saved; 0: nothing.
        most_loaded: So many tokens are loaded at most, beyond those that are computed.
        tiers: Media and localities of the tiers from which it may be fetched, each empty
            for any; None: from all.
        priority: Of its fetches: the lowest has its slots first.
        forgets: Whether its prompt is deleted from the store when it ends.
    """

    tenant: int = 0
    retain_seconds: float = 0.0
    most_saved: int = NO_LIMIT
    most_loaded: int = NO_LIMIT
    tiers: tuple[tuple[str, str], ...] | None = None
    priority: int = 0
    forgets: bool = False


NO_WISHES: Final = Wishes()


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


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """
    One request that runs in this step.

    Tables are read only in steps in which the request is new or a block of it becomes
    complete, so they may be resolved on access.

    Args:
        request_id: The engine's name for it.
        computed_tokens: Tokens whose KV is there before the step.
        end_tokens: Tokens whose KV is there after it.
        prompt_tokens: How many of its tokens are its prompt.
        hashes: The engine's block hashes, for known tokens only.
        tables: ``[groups][blocks]`` the full current block tables.
        new_block_ids: ``[groups]`` blocks allocated in this step, if it is new.
        is_new: It runs for the first time, or again after a preemption.
        own_tokens: If it is new, how many the engine had itself or we loaded. What is
            computed beyond them another connector loads in this step.
        states: All states of the request that the step completes.
        wishes: What it asks of the store.
    """

    request_id: str
    computed_tokens: int
    end_tokens: int
    prompt_tokens: int
    hashes: Sequence[bytes]
    tables: Sequence[Sequence[int]]
    new_block_ids: Sequence[Sequence[int]] = ()
    is_new: bool
    own_tokens: int = NO_LIMIT
    states: Sequence[StateOffer] = ()
    wishes: Wishes = NO_WISHES

    def prefix_blocks(self, group: GroupLayout, at: int) -> Sequence[int]:
        """Return the blocks of the *at*-th group that the step only reads."""
        return self.tables[at][: self.computed_tokens // group.block_tokens]


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """
    What there is of a request that ends.

    Args:
        computed_tokens: Tokens whose KV is there once the steps that were planned have
            run, guesses that a step may yet reject included.
        known_tokens: Tokens that are its own. The last one was only sampled: what its
            place holds may be a guess that was rejected.
        prompt_tokens: How many of these are its prompt.
        hashes: The engine's block hashes.
        tables: ``[groups][blocks]`` its block tables.
        wishes: What it asks of the store.
    """

    computed_tokens: int
    known_tokens: int
    prompt_tokens: int
    hashes: Sequence[bytes]
    tables: Sequence[Sequence[int]]
    wishes: Wishes = NO_WISHES

    @property
    def accepted_tokens(self) -> int:
        """Tokens whose KV is there and theirs."""
        accepted = max(self.known_tokens - 1, self.prompt_tokens)
        return min(self.computed_tokens, accepted)

    def as_look(self, request_id: str) -> ScheduledRequest:
        """Return the facts of a look at it now that all of it is computed."""
        return ScheduledRequest(
            request_id=request_id,
            computed_tokens=self.accepted_tokens,
            end_tokens=self.accepted_tokens,
            prompt_tokens=self.prompt_tokens,
            hashes=self.hashes,
            tables=self.tables,
            is_new=False,
        )


@attrs.frozen(kw_only=True)
class StepFacts:
    """
    What happens in one engine step.

    Args:
        scheduled: Of those who run, whoever is to be looked at.
        preempted: Whose blocks were taken away, and how many tokens had been computed,
            as far as that is known.
        allocated: Blocks that those who go on were given for this step, and those into which
            another connector loads for who does not run.
        overwritten: Blocks that the engine clears or copies onto by itself, beside the
            forward pass.
        is_idle: Nobody runs.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted: Mapping[str, int] = attrs.Factory(dict)
    allocated: Sequence[int] = ()
    overwritten: frozenset[int] = frozenset()
    is_idle: bool = attrs.field()

    @is_idle.default
    def _is_nobody_told(self) -> bool:
        return not self.scheduled

    @property
    def is_of_nobody(self) -> bool:
        """Whether some run, and nothing is to be told of any of them."""
        return not (self.scheduled or self.preempted or self.is_idle)

    def written_blocks(
        self, layout: KVLayout, loads: Iterable[SpanOrder] = ()
    ) -> set[int]:
        """Return what loads, ours or others', the engine by itself, and the forward pass for new owners write."""
        written = {block_id for order in loads for block_id in order.block_ids}
        written.update(self.allocated, self.overwritten)
        for request in self.scheduled:
            own = min(request.computed_tokens, request.own_tokens)
            for at, group in enumerate(layout.groups if request.new_block_ids else ()):
                new = set(request.new_block_ids[at])
                shared = own // group.block_tokens
                if request.is_new and shared and new:
                    new.difference_update(request.tables[at][:shared])
                written |= new
        return written
