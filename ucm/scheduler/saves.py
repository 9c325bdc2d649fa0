# SPDX-License-Identifier: Apache-2.0
"""
Which blocks of a request a step saves.

Complete blocks of ``FULL`` and ``WINDOW`` groups queue up in the request's life and are
taken as far as a step has room. A state that the engine offers is taken at once, or
dropped: there is no queue for what is overwritten next.
"""

from collections.abc import Iterator, Sequence

from ucm.blocks import GroupId
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.requests import NULL_BLOCK, Life, ScheduledRequest
from ucm.scheduler.transfers import BlockRef, OpenTransfers

__all__ = ["SaveSelector"]


class SaveSelector:
    """
    Selects blocks that are not stored and that nobody saves already.

    Used on the scheduler's thread only.

    Args:
        layout: Groups, in the order of the requests' tables.
        matcher: Knows which blocks are stored.
        transfers: Knows which are being saved, and which count as missing.
    """

    __slots__ = ("_layout", "_matcher", "_transfers", "dropped_blocks")

    def __init__(
        self, layout: KVLayout, matcher: PrefixMatcher, transfers: OpenTransfers
    ) -> None:
        self._layout = layout
        self._matcher = matcher
        self._transfers = transfers
        self.dropped_blocks = 0
        """Blocks whose turn came, or whose only chance it was, but were not taken."""

    def select(
        self, life: Life, request: ScheduledRequest, room: int
    ) -> Iterator[tuple[GroupId, list[BlockRef]]]:
        """
        Take at most *room* blocks of a scheduled request, group by group.

        Args:
            life: In which it runs. Of one that waits for loads nothing is taken: its
                blocks are garbage if they fail.
            request: The facts of this step.
            room: Blocks that the step may still save.
        """
        if life.loads or not life.may_save:
            room = 0
        else:
            life.advance(self._layout, request, self._stored)
        for at, group in enumerate(self._layout.groups):
            if group.kind is GroupKind.STATE:
                blocks = self._take_offered(life, request, at, room)
            else:
                blocks = self._take_pending(life, request, at, room)
            room -= len(blocks)
            yield group.group_id, blocks

    def _take_pending(
        self, life: Life, request: ScheduledRequest, at: int, room: int
    ) -> list[BlockRef]:
        blocks: list[BlockRef] = []
        if not room:
            return blocks
        group, pending = self._layout.groups[at], life.pending[at]
        while pending and len(blocks) < room:
            index = pending.popleft()
            block = BlockRef(
                index,
                request.tables[at][index],
                request.hashes[self._layout.hash_index(group, index)],
            )
            if block.block_id == NULL_BLOCK:
                self.dropped_blocks += 1
            elif not self._transfers.is_saving(group.group_id, block.block_hash):
                blocks.append(block)
        return blocks

    def _take_offered(
        self, life: Life, request: ScheduledRequest, at: int, room: int
    ) -> list[BlockRef]:
        if not request.states:
            return []
        group = self._layout.groups[at]
        offered = [
            block
            for block in life.offered(self._layout, at, request)
            if not self._transfers.is_saving(group.group_id, block.block_hash)
        ]
        stored = self._stored(group, [block.block_hash for block in offered])
        wanted = [
            block
            for block, is_stored in zip(offered, stored, strict=True)
            if not is_stored
        ]
        self.dropped_blocks += len(wanted[room:])
        return wanted[:room]

    def _stored(self, group: GroupLayout, hashes: Sequence[bytes]) -> list[bool]:
        return self._matcher.stored(group, hashes, self._transfers.denied)
