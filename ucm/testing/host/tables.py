# SPDX-License-Identifier: Apache-2.0
"""
Which blocks a request has: the engine's KV cache manager.

Blocks that the next token's window does not reach are given back while the request
runs; in its table stands the null block then. A group of states has one block that
matters, that of the last computed token, and null blocks before it. Where a block of
tokens ends, its state stays as it is, and the request goes on in the next block.
"""

from collections import Counter

from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.testing.host.pool import NULL_BLOCK, BlockPool
from ucm.testing.host.requests import Request

__all__ = ["KVTables", "LocalHit", "first_needed", "written_blocks"]

LocalHit = tuple[list[list[int]], int]
"""``[groups][blocks]`` and how many tokens they hold."""


def first_needed(group: GroupLayout, computed_tokens: int) -> int:
    """Return the first block that the next token reads."""
    if group.kind is GroupKind.STATE:
        return max(0, computed_tokens - 1) // group.block_tokens
    if group.window_tokens is None:
        return 0
    return max(0, computed_tokens - group.window_tokens + 1) // group.block_tokens


def written_blocks(group: GroupLayout, computed_tokens: int, end: int) -> range:
    """Return the blocks that computing up to *end* writes."""
    stop = -(-end // group.block_tokens)
    if group.kind is GroupKind.STATE:
        return range(stop - 1, stop)
    return range(computed_tokens // group.block_tokens, stop)


def _new_blocks(
    group: GroupLayout, have: int, computed_tokens: int, end: int
) -> list[bool]:
    """Return for each block that a table lacks whether it is one to hand out."""
    stop = -(-end // group.block_tokens)
    if group.kind is not GroupKind.STATE:
        return [True] * (stop - have)
    real = {stop - 1}
    if computed_tokens:  # the state to load
        real.add(first_needed(group, computed_tokens))
    return [i in real for i in range(have, stop)]


class KVTables:
    """
    Gives blocks to requests and takes them back.

    Args:
        layout: The engine's groups.
        pool: All blocks.
        seen: Counts what happens.
        caches: Whether full blocks are found again.
    """

    def __init__(
        self, layout: KVLayout, pool: BlockPool, seen: Counter[str], *, caches: bool
    ) -> None:
        self.pool = pool
        self.newest = False
        """Whether blocks that were freed last are handed out first."""
        self.offers: dict[str, list[tuple[int, int, int]]] = {}
        """By request, states completed since the last plan: group, block, tokens."""
        self._fresh: list[int] = []
        self._new_states: set[int] = set()
        self._groups = layout.groups
        self._layout = layout
        self._seen = seen
        self._caches = caches

    def take_fresh(self) -> list[int]:
        """
        Return the blocks handed out since the last call that somebody still has.

        Whoever was thrown out in the step that gave it a block never writes to it.
        """
        self._new_states.clear()
        fresh, self._fresh = self._fresh, []
        return [block for block in dict.fromkeys(fresh) if self.pool.is_used(block)]

    def find(self, request: Request) -> LocalHit:
        """Return the longest prefix in the engine's own cache, without its last token."""
        nothing: LocalHit = [[] for _ in self._groups], 0
        if not self._caches:
            return nothing
        align = self._layout.alignment_tokens
        tokens = (request.num_tokens - 1) // align * align
        while tokens > 0:
            tables = [self._found(group, request, tokens) for group in self._groups]
            if all(tables):
                return [table or [] for table in tables], tokens
            tokens -= align
        return nothing

    def has_next(self, request: Request, tokens: int) -> bool:
        """Return whether the cache also has the blocks behind *tokens*."""
        for group in self._groups:
            at = self._layout.hash_index(group, tokens // group.block_tokens)
            if at >= len(request.stream.hashes) or not self.pool.find(
                group.group_id, request.stream.hashes[at]
            ):
                return False
        return True

    def allocate(
        self,
        request: Request,
        computed_tokens: int,
        new_tokens: int,
        *,
        local: LocalHit | None = None,
        reserved: int = 0,
    ) -> list[list[int]] | None:
        """
        Make room for a request's tokens.

        Args:
            request: Whose tables grow.
            computed_tokens: All that is or will be there without being computed.
            new_tokens: To compute.
            local: Blocks of the engine's own cache to begin with.
            reserved: Blocks to leave to others.

        Returns:
            ``[groups]`` blocks handed out; none when there is no room.
        """
        end = computed_tokens + new_tokens
        adopted = local[0] if local else [[] for _ in self._groups]
        plan = []
        for group, table, found in zip(
            self._groups, request.tables, adopted, strict=True
        ):
            skipped = first_needed(group, computed_tokens)
            blocks = table or [NULL_BLOCK] * min(skipped, len(found)) + found[skipped:]
            blocks = [*blocks, *[NULL_BLOCK] * (skipped - len(blocks))]
            plan.append((blocks, _new_blocks(group, len(blocks), computed_tokens, end)))
        revived = sum(
            self.pool.num_free_among(blocks)
            for blocks, _ in plan
            if not request.has_blocks
        )
        wanted = sum(sum(missing) for _, missing in plan) + revived
        if wanted > self.pool.num_free - reserved:
            return None
        if not request.has_blocks:
            for blocks, _ in plan:
                for block in blocks:
                    if block != NULL_BLOCK:
                        self.pool.touch(block)
        new = []
        for at, (blocks, missing) in enumerate(plan):
            added = [
                self.pool.allocate(newest=self.newest) if is_real else NULL_BLOCK
                for is_real in missing
            ]
            handed = [block for block in added if block != NULL_BLOCK]
            self._fresh += handed
            request.tables[at] = [*blocks, *added]
            new.append(handed)
        return new

    def slide(self, request: Request, processed_tokens: int) -> None:
        """Give back blocks that no later token needs."""
        for group, table in zip(self._groups, request.tables, strict=True):
            for i in range(min(first_needed(group, processed_tokens), len(table))):
                if table[i] != NULL_BLOCK:
                    self.pool.free(table[i])
                    table[i] = NULL_BLOCK
                    self._seen["recycled"] += 1

    def cache(self, request: Request, tokens: int) -> None:
        """Let others find the request's full blocks, and offer new states."""
        tokens = min(tokens, len(request.block_hashes) * self._layout.hash_block_tokens)
        for at, group in enumerate(self._groups):
            full = tokens // group.block_tokens
            for i in range(request.cached[at], full):
                block = request.tables[at][i]
                if block == NULL_BLOCK:
                    continue
                if group.kind is GroupKind.STATE:
                    self.offer(request, group, block, (i + 1) * group.block_tokens)
                if self._caches:
                    name = request.block_hashes[self._layout.hash_index(group, i)]
                    self.pool.cache(block, group.group_id, name)
            request.cached[at] = max(full, request.cached[at])

    def offer(
        self, request: Request, group: GroupLayout, block: int, tokens: int
    ) -> None:
        """Have the connector told that a block will hold a state after the step."""
        self._seen["offered"] += 1
        self._new_states.add(block)
        offer = (group.group_id, block, tokens)
        self.offers.setdefault(request.request_id, []).append(offer)

    def take_offers(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the offers since the last call."""
        offers, self.offers = self.offers, {}
        return offers

    def clip(self, computed_tokens: int, tokens: int) -> int:
        """Return how many of *tokens* a step may compute, so that no state is lost."""
        for group in self._groups:
            rest = computed_tokens % group.block_tokens
            if group.kind is GroupKind.STATE and rest:
                tokens = min(tokens, group.block_tokens - rest)
        return tokens

    def pop(self, request: Request) -> list[int]:
        """Take all blocks from a request, in the order in which they are freed."""
        self.offers.pop(request.request_id, None)
        blocks = [
            block
            for table in request.tables
            for block in reversed(table)
            if block != NULL_BLOCK
        ]
        request.clear_tables()
        return blocks

    def remaining(self, request: Request) -> int:
        """Return how many blocks a request still needs for its known tokens."""
        return sum(
            sum(_new_blocks(group, len(table), 0, request.num_tokens))
            for group, table in zip(self._groups, request.tables, strict=True)
        )

    def _found(
        self, group: GroupLayout, request: Request, tokens: int
    ) -> list[int] | None:
        """
        Return the table of a prefix of so many tokens, if the cache has it all.

        A state that this very step completes is none to go on from.
        """
        first = first_needed(group, tokens)
        stop = tokens // group.block_tokens
        table = [NULL_BLOCK] * first
        for i in range(first, stop):
            name = request.block_hashes[self._layout.hash_index(group, i)]
            block = self.pool.find(group.group_id, name)
            if block == NULL_BLOCK or block in self._new_states:
                return None
            table.append(block)
        return table
