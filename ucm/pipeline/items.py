# SPDX-License-Identifier: Apache-2.0
"""What travels: some rows of a ticket, from the queue through all stages of its lane."""

from typing import TYPE_CHECKING

from ucm.blocks import RowId
from ucm.devices.abc import Fence
from ucm.pipeline.outcomes import Outcome
from ucm.pipeline.tickets import Ticket

if TYPE_CHECKING:
    import asyncio

    from ucm.pipeline.lane import RequestLane
    from ucm.pipeline.stage import Segment

__all__ = ["Item"]


class Item:
    """
    Some rows of a ticket, as they become ready; a whole-block ticket is one item.

    It goes from stage to stage itself, so that a span costs one object: each stage takes
    it under the name of what it may find in it (``save``, ``load``). What lies behind
    the first four fields belongs to whoever has the item: its lane on the loop, or the
    stages of the segment that runs.

    Args:
        ticket: The ticket.
        row_ids: The rows this item brings.
        fence: Passes when the rows are written (save) or may be overwritten (load).
        is_first: The ticket is counted and may be refused with it, not with what
            follows.
    """

    __slots__ = (
        "at",
        "copy",
        "failure",
        "fence",
        "has_failed",
        "is_first",
        "is_given_up",
        "is_over",
        "is_partial",
        "is_whole",
        "lane",
        "outcome",
        "row_ids",
        "segment",
        "task",
        "ticket",
        "waits_since",
    )
    lane: "RequestLane"
    segment: "Segment"

    def __init__(
        self,
        ticket: Ticket,
        row_ids: tuple[RowId, ...],
        fence: Fence,
        is_first: bool = True,  # noqa: FBT001 - as it reads
    ) -> None:
        self.ticket = ticket
        self.row_ids = row_ids
        self.fence = fence
        self.is_first = is_first
        self.is_partial = len(row_ids) < len(ticket.row_ids)
        """Whether it brings not all of its ticket's rows."""
        self.copy: Fence | None = None
        """Passes when the device has copied the rows."""
        self.is_whole = False
        """Whether the copy is over, and these were the ticket's last rows."""
        self.failure: Exception | None = None
        """Why what a copy brings is not right, though it goes on."""
        self.outcome: Outcome | None = None
        """What the last stage says; nothing while rows are missing."""
        self.at = 0
        """In which of the lane's segments it is."""
        self.is_over = False
        """Whether that segment is over."""
        self.waits_since = 0.0
        """When the segment of the loop that it is in, or comes to next, began; or zero."""
        self.has_failed = False
        self.is_given_up = False
        """Whether the lane wants to hear nothing of it any more."""
        self.task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        """
        Want nothing of it any more.

        A wait in a task ends. A fence that calls, and a job on a copy thread, go on to
        their own end, unheard.
        """
        self.is_given_up = True
        if self.task is not None:
            self.task.cancel()

    @property
    def nbytes(self) -> int:
        """Bytes of its rows, were they all alike."""
        ticket = self.ticket
        return ticket.nbytes * len(self.row_ids) // len(ticket.row_ids)
