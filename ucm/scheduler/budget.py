# SPDX-License-Identifier: Apache-2.0
"""
What fits into one plan.

A message is bounded (``MAX_MESSAGE_BYTES``), so each part of a plan has a share of it and
what is beyond goes with the next plan. Sizes are upper bounds; nothing is encoded to
find out. Shares, with what must come at once or not:

- Loads: the engine was promised them, so that they are put off but never dropped. A
  request's loads may be cut, and the plan says so.
- Saves: what has no room waits as complete blocks do that exceed a step's number.
- Fences: never put off. One names a hold, and there are at most ``MAX_HOLDS``. Which of
  a shared ticket's blocks are lost is told as far as there is room; of the rest all are.
- Wants: what is beyond is not asked for, and so not found.
- Deferrals: the engine keeps the blocks meanwhile.

A request whose id alone is longer than ``MAX_ID_CHARS`` is neither matched nor saved.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ucm.blocks import GroupId
from ucm.layout import KVLayout
from ucm.scheduler.messages import MAX_MESSAGE_BYTES, Deferral, Failure, SpanOrder
from ucm.scheduler.shares import Run, Share, Stay

__all__ = [
    "MAX_HOLDS",
    "MAX_ID_CHARS",
    "SAVE_NBYTES",
    "WANT_NBYTES",
    "Draft",
    "LoadQueue",
    "block_nbytes",
    "cut_deferrals",
    "cut_lost",
    "failure_nbytes",
    "order_nbytes",
    "owner_nbytes",
    "share_nbytes",
]

_LOAD_NBYTES: Final = MAX_MESSAGE_BYTES // 2
SAVE_NBYTES: Final = MAX_MESSAGE_BYTES // 4
_DEFERRAL_NBYTES: Final = MAX_MESSAGE_BYTES // 16
WANT_NBYTES: Final = MAX_MESSAGE_BYTES // 16
_LOST_NBYTES: Final = MAX_MESSAGE_BYTES // 32
MAX_HOLDS: Final = 65536
MAX_ID_CHARS: Final = 65536

_UTF8: Final = 4
_NUMBER: Final = 9
_MAX_HASH: Final = 64
_LOST: Final = 14
_POSITION: Final = 3
"""A ticket has fewer blocks than numbers of so many bytes."""
_FIXED: Final = 192
"""Field names, and numbers that an order has once."""
_OWNER: Final = 64
"""The same of an owner."""
_BLOCK: Final = _FIXED + _OWNER + _NUMBER + _MAX_HASH
"""An order of one block, without its owner's name."""


def block_nbytes(request_id: str) -> int:
    """Return what a block costs at most: as an order of its own."""
    return _BLOCK + _UTF8 * len(request_id)


def owner_nbytes(request_id: str) -> int:
    """Return what it costs at most that a request has blocks in an order."""
    return _OWNER + _UTF8 * len(request_id)


def order_nbytes(order: SpanOrder) -> int:
    """Return what an order costs at most."""
    owners = sum(owner_nbytes(owner.request_id) for owner in order.owners)
    return _FIXED + owners + _NUMBER * len(order.block_ids) + len(order.hashes)


@functools.lru_cache(maxsize=1024)
def share_nbytes(id_chars: int, num_blocks: int, span_blocks: int) -> int:
    """Return what so many blocks of a request cost at most, in orders of full spans."""
    num_orders = -(-num_blocks // span_blocks)
    per_order = _FIXED + _OWNER + _UTF8 * id_chars
    return num_orders * per_order + num_blocks * (_NUMBER + _MAX_HASH)


def cut_lost(lost: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return the lost positions that fit into a plan; of other tickets, all are lost."""
    nbytes, kept = 0, {}
    for transfer_id, positions in lost.items():
        nbytes += _LOST + _POSITION * len(positions)
        if nbytes > _LOST_NBYTES:
            break
        kept[transfer_id] = tuple(positions)
    return kept


def failure_nbytes(failure: Failure) -> int:
    """Return what a failure costs at most in a report."""
    return _FIXED + _UTF8 * (len(failure.request_id) + len(failure.reason)) + _MAX_HASH


def cut_deferrals(
    deferrals: Sequence[Deferral],
) -> tuple[tuple[Deferral, ...], list[Deferral]]:
    """Return the deferrals for this plan, and those left over."""
    nbytes = 0
    for at, deferral in enumerate(deferrals):
        nbytes += _FIXED + _UTF8 * len(deferral.request_id)
        if at and nbytes > _DEFERRAL_NBYTES:
            return tuple(deferrals[:at]), list(deferrals[at:])
    return tuple(deferrals), []


class Draft:
    """
    What one plan saves, by group, and the room that it has left.

    Args:
        room: In blocks.
    """

    __slots__ = ("_nbytes", "_room", "ended_nbytes", "ended_tickets", "runs")

    def __init__(self, room: int) -> None:
        self._room = room
        self._nbytes = SAVE_NBYTES
        self.runs: dict[GroupId, dict[Stay, list[Run]]] = {}
        self.ended_tickets = self.ended_nbytes = 0

    def room_of(self, stay: Stay) -> int:
        """Return how many blocks of a life fit, whatever tickets they go into."""
        nbytes = self._nbytes // (_BLOCK + _UTF8 * len(stay.request_id))
        return max(0, min(self._room, nbytes))

    def put(self, stay: Stay, group_id: GroupId, run: Run, span_blocks: int) -> None:
        """Let the plan save blocks of a life, behind those of it that are there."""
        num_blocks = len(run.block_ids)
        self._room -= num_blocks
        self._nbytes -= share_nbytes(len(stay.request_id), num_blocks, span_blocks)
        runs = self.runs.setdefault(group_id, {}).setdefault(stay, [])
        if runs and runs[-1].at.stop == run.start:
            runs[-1] = runs[-1].then(run)
        else:
            runs.append(run)

    def shares(self) -> Iterator[tuple[GroupId, list[Share]]]:
        """Yield by group what is saved; all of a life is together, in its order."""
        for group_id, lives in self.runs.items():
            yield (
                group_id,
                [(stay, run) for stay, runs in lives.items() for run in runs],
            )


class LoadQueue:
    """
    Loads that the engine was promised and that no plan has brought yet.

    Args:
        layout: The engine's groups.
        max_blocks: About the most blocks of one plan.
        parks: Whether requests wait until they are loaded. Otherwise they run in the
            step that orders the load, and nothing may be left to a later plan.
    """

    def __init__(self, layout: KVLayout, max_blocks: int, *, parks: bool) -> None:
        self._layout = layout
        self._max_blocks = max_blocks
        self._parks, self.is_bounded = parks, not parks
        """Whether ``room_tokens`` limits what is promised."""
        self._orders: list[SpanOrder] = []
        self._blocks = self._nbytes = 0  # of all orders, if none may be left over

    def __len__(self) -> int:
        return len(self._orders)

    def put(self, orders: Sequence[SpanOrder]) -> None:
        """Put the loads of a request behind those of others."""
        self._orders += orders
        for order in () if self._parks else orders:
            self._blocks += len(order.block_ids)
            self._nbytes += order_nbytes(order)

    def room_tokens(self, request_id: str) -> int:
        """Return how many tokens may still be promised to a request, if that is bounded."""
        nbytes = _LOAD_NBYTES - self._nbytes
        blocks = self._max_blocks - self._blocks
        blocks = max(0, min(blocks, nbytes // block_nbytes(request_id)))
        groups = self._layout.groups
        return blocks // len(groups) * min(group.block_tokens for group in groups)

    def take(self) -> tuple[tuple[SpanOrder, ...], str]:
        """
        Take the next plan's loads, cut between two requests if that fits.

        Returns:
            The orders, and the request of which some are left over, or an empty text.
        """
        if not self._orders:
            return (), ""
        taken, cut = self._cut() if len(self._orders) > 1 else (1, "")
        loads, self._orders = tuple(self._orders[:taken]), self._orders[taken:]
        self._blocks = self._nbytes = 0
        return loads, cut

    def _cut(self) -> tuple[int, str]:
        blocks = nbytes = generation = 0
        for at, order in enumerate(self._orders):
            is_other = order.generation != generation
            nbytes += order_nbytes(order)
            if at and nbytes > _LOAD_NBYTES and self._parks:
                return at, "" if is_other else order.request_id
            if at and is_other and self._parks and blocks >= self._max_blocks:
                return at, ""
            blocks += len(order.block_ids)
            generation = order.generation
        return len(self._orders), ""
