# SPDX-License-Identifier: Apache-2.0
"""The small engine's requests, and what the blocks of each kind of group hold."""

import attrs

from tests.scheduler.model import hashes_of
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.requests import StateOffer, StepFacts


@attrs.define
class Request:
    """What the engine knows of a request."""

    request_id: str
    family: str
    num_tokens: int
    state: str = "waiting"
    life: int = 0
    computed: int = 0
    tables: list[list[int]] = attrs.Factory(list)
    unseen: list[list[int]] = attrs.Factory(list)
    is_new: bool = True
    generation: int = 0
    failed: bool = False
    num_prompt: int = attrs.field()

    @num_prompt.default
    def _whole(self) -> int:
        return self.num_tokens


def first_needed(group: GroupLayout, computed: int) -> int:
    """Return the first block that the next token reads."""
    if group.kind is GroupKind.STATE:
        return max(0, computed - 1) // group.block_tokens
    if group.window_tokens is None:
        return 0
    return max(0, computed - group.window_tokens + 1) // group.block_tokens


def missing_blocks(group: GroupLayout, have: int, tokens: int) -> list[bool]:
    """Return for each block behind those there are whether it is one to allocate."""
    count = max(0, -(-tokens // group.block_tokens) - have)
    if group.kind is GroupKind.STATE:
        return [at == count - 1 for at in range(count)]
    return [True] * count


def names_before(
    layout: KVLayout, group: GroupLayout, family: str, computed: int
) -> dict[int, bytes]:
    """Return by index what the blocks hold that the next token reads."""
    first, stop = first_needed(group, computed), computed // group.block_tokens
    if group.kind is GroupKind.STATE:
        return {first: _state_name(layout, group, family, computed)} if computed else {}
    return {i: _name(layout, group, family, i) for i in range(first, stop)}


def names_after(
    layout: KVLayout, group: GroupLayout, family: str, computed: int, end: int
) -> dict[int, bytes | None]:
    """Return by index what the blocks hold that a step fills, None if only in part."""
    size = group.block_tokens
    if group.kind is GroupKind.STATE:
        return {(end - 1) // size: _state_name(layout, group, family, end)}
    return {
        i: _name(layout, group, family, i) if (i + 1) * size <= end else None
        for i in range(computed // size, -(-end // size))
    }


def offers_at(layout: KVLayout, request: Request, ends: set[int]) -> list[StateOffer]:
    """Offer the states at some ends, also those that were loaded, or of a tail."""
    return [
        StateOffer(at, request.tables[at][(end - 1) // group.block_tokens], end)
        for at, group in enumerate(layout.groups)
        if group.kind is GroupKind.STATE
        for end in ends
    ]


def written_blocks(
    layout: KVLayout, facts: StepFacts, loads: tuple[SpanOrder, ...]
) -> set[int]:
    """Return the blocks that get new content in this step."""
    written = {block_id for order in loads for block_id in order.block_ids}
    written |= facts.overwritten
    written.update(facts.allocated)
    for each in facts.scheduled:
        for at, group in enumerate(layout.groups if each.is_new else ()):
            own_tokens = min(each.computed_tokens, each.own_tokens)
            shared = own_tokens // group.block_tokens
            new = set(each.new_block_ids[at])
            written |= new.difference(each.tables[at][:shared])
    return written


def _name(layout: KVLayout, group: GroupLayout, family: str, index: int) -> bytes:
    at = layout.hash_index(group, index)
    return hashes_of(family, at + 1)[at]


def _state_name(
    layout: KVLayout, group: GroupLayout, family: str, tokens: int
) -> bytes:
    """Return the name of the state behind so many tokens."""
    index, rest = divmod(tokens, group.block_tokens)
    if rest:
        return f"{family}@{tokens}".encode()
    return _name(layout, group, family, index - 1)
