# SPDX-License-Identifier: Apache-2.0
"""
What it means for an engine's requests that blocks were not loaded.

All that a request computed on top of such a block is garbage. So the request goes back
to where its first invalid block starts, and computes from there on. Where requests share
the block, the first of them computes it; the others go back to what they had before the
step, and find it in order when they run again.

Facts in, decisions out: pure, nothing here is remembered. Blocks are named by the
position of their group and their id, because ids mean nothing beyond a group.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from ucm.layout import GroupKind, GroupLayout
from ucm.scheduler.requests import NULL_BLOCK

__all__ = [
    "Affected",
    "BlockName",
    "BlockUser",
    "Cut",
    "Recovery",
    "affected_tokens",
    "blocks_to_evict",
    "first_invalid_index",
    "recover",
]

BlockName = tuple[int, int]
"""Position of the group in the layout, and block id."""


@attrs.frozen(kw_only=True)
class BlockUser:
    """
    A request that runs on blocks of which some may be invalid.

    Args:
        request_id: Its name.
        tables: ``[groups][blocks]``; empty tables where it has no blocks.
        computed_tokens: Tokens that count as computed, with those of this step.
        cached_tokens: Of these, what was there before the step.
    """

    request_id: str
    tables: Sequence[Sequence[int]]
    computed_tokens: int
    cached_tokens: int


@attrs.frozen(kw_only=True)
class Affected:
    """
    Tokens to compute again.

    Args:
        tokens: How many; never negative.
        excess: By how much the request kept more than it had: a contradiction in the
            engine's numbers, to be counted by the caller.
    """

    tokens: int
    excess: int = 0


@attrs.frozen(kw_only=True)
class Cut:
    """
    What becomes of one request.

    Args:
        request_id: Whose.
        computed_tokens: Tokens that count as computed from now on.
        affected: Tokens that do not any more.
        recomputes: It computes an invalid block itself; if not, all of its invalid
            blocks are computed by requests before it.
    """

    request_id: str
    computed_tokens: int
    affected: Affected
    recomputes: bool


@attrs.frozen(kw_only=True)
class Recovery:
    """
    What becomes of all requests.

    Args:
        cuts: Of the requests that have an invalid block, in their order.
        evict: Blocks that hold garbage: no other request may find them.
    """

    cuts: tuple[Cut, ...] = ()
    evict: frozenset[BlockName] = frozenset()

    @property
    def affected_tokens(self) -> int:
        """Tokens that are computed again, over all requests."""
        return sum(cut.affected.tokens for cut in self.cuts)


def first_invalid_index(
    block_ids: Sequence[int], invalid: Collection[int]
) -> int | None:
    """Return the lowest index of an invalid block, whatever the order of *invalid*."""
    return next((i for i, block in enumerate(block_ids) if block in invalid), None)


def affected_tokens(had: int, keeps: int, *, is_strict: bool = __debug__) -> Affected:
    """
    Return how many tokens a request loses that had some and keeps some of them.

    Args:
        had: Tokens that counted as computed.
        keeps: Tokens that still do.
        is_strict: Raise if these contradict each other, instead of telling.

    Raises:
        AssertionError: It keeps more than it had; names both.
    """
    if keeps > had and is_strict:
        raise AssertionError(f"a request had {had} tokens and keeps {keeps}")
    return Affected(tokens=max(0, had - keeps), excess=max(0, keeps - had))


def blocks_to_evict(block_ids: Sequence[int], first: int) -> frozenset[int]:
    """Return a table's first invalid block and all later ones."""
    return frozenset(block_ids[first:]).difference({NULL_BLOCK})


def recover(
    groups: Sequence[GroupLayout],
    users: Iterable[BlockUser],
    invalid: Collection[BlockName],
    *,
    is_strict: bool = __debug__,
) -> Recovery:
    """
    Return what becomes of the requests that use invalid blocks.

    Args:
        groups: In the order of the tables.
        users: Who may use them, in the order in which they run again.
        invalid: Blocks that were not loaded.
        is_strict: As for ``affected_tokens``.
    """
    marked: set[BlockName] = set()
    cuts, evict = [], set[BlockName]()
    for user in users:
        cached = _cached_blocks(groups, user)
        found = {
            (at, block) for at, blocks in enumerate(cached) for block in blocks
        }.intersection(invalid)
        if not found:
            continue
        own = found - marked
        marked |= own
        keeps, had = user.cached_tokens, user.computed_tokens
        if own:
            keeps, had = _resumable(groups, cached, own), user.cached_tokens
            evict.update(_garbage(groups, user.tables, keeps))
        cuts.append(
            Cut(
                request_id=user.request_id,
                computed_tokens=keeps,
                affected=affected_tokens(had, keeps, is_strict=is_strict),
                recomputes=bool(own),
            )
        )
    return Recovery(cuts=tuple(cuts), evict=frozenset(evict))


def _cached_blocks(
    groups: Sequence[GroupLayout], user: BlockUser
) -> list[Sequence[int]]:
    """Return by group the blocks that a request took over from before the step."""
    return [
        table[: -(-user.cached_tokens // group.block_tokens)]
        for group, table in zip(groups, user.tables, strict=True)
    ]


def _resumable(
    groups: Sequence[GroupLayout],
    tables: Sequence[Sequence[int]],
    invalid: Collection[BlockName],
) -> int:
    """
    Return how many of a request's first tokens it can go on from.

    All before its first invalid block, down to whole blocks of every group, if what
    their windows reach is still there. None of them with a state: that was written
    over since.
    """
    starts = []
    for at, (group, table) in enumerate(zip(groups, tables, strict=True)):
        first = first_invalid_index(table, {block for g, block in invalid if g == at})
        if first is not None:
            starts.append(first * group.block_tokens)
    align = math.lcm(*(group.block_tokens for group in groups))
    tokens = min(starts) // align * align
    for group, table in zip(groups, tables, strict=True):
        if group.kind is GroupKind.STATE or NULL_BLOCK in (
            table[i] for i in group.window_blocks(tokens)
        ):
            return 0
    return tokens


def _garbage(
    groups: Sequence[GroupLayout], tables: Sequence[Sequence[int]], keeps: int
) -> Iterator[BlockName]:
    """Yield a request's blocks behind the tokens that it keeps."""
    for at, (group, table) in enumerate(zip(groups, tables, strict=True)):
        for block in blocks_to_evict(table, keeps // group.block_tokens):
            yield at, block
