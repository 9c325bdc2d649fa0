# SPDX-License-Identifier: Apache-2.0
"""
Holds, as the logs of a scheduler and of its workers tell them.

Processes have no common clock worth trusting. What a rank did and what the scheduler
heard of it are only paired, never ordered: one gives a part, the other takes it, and a
part that stays is looked at when all is over. With several engines in one trace parts
of equal names are many, and still come out even.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import attrs

from tests.kit.lockstep_rules import Event, Line, Rule, Violate, number_in
from ucm.tracing import (
    HOLD_QUARANTINED,
    HOLD_RELEASED,
    HOLD_TAKEN,
    PREFIX_MATCHED,
    RUNTIME_FAILED,
    SAVE_PASSED,
    SCHEDULER_CLOSED,
    SCHEDULER_STARTED,
    SOURCE_RELEASED,
)

__all__ = ["HoldTrace", "Parts"]

_TOLD: Final = {
    SOURCE_RELEASED: "released",
    SAVE_PASSED: "released",  # a replica reads instead
    HOLD_QUARANTINED: "quarantined",
}


class Parts:
    """What ranks told of saves' blocks, less what schedulers heard of it."""

    def __init__(self) -> None:
        self._left: Counter[tuple[object, object, str]] = Counter()
        self._ranks: set[object] = set()

    def told(self, event: Event, name: str) -> None:
        """Take note of a rank's line."""
        rank = event.get("rank")
        if rank is None or event.get("direction") != "save":
            return
        self._ranks.add(rank)
        how = _TOLD.get(name)
        if how is not None:
            self._add((rank, event.get("transfer_id"), how), 1)

    def heard(self, rank: object, hold_id: object, how: str) -> None:
        """Take note of a scheduler's line."""
        self._add((rank, hold_id, how), -1)

    def take(self, rank: object, hold_id: object) -> bool:
        """Return whether a rank told what no scheduler heard, and forget it."""
        for how in _TOLD.values():
            if self._left[rank, hold_id, how] > 0:
                self._add((rank, hold_id, how), -1)
                return True
        return False

    def unfounded(self) -> list[str]:
        """Say what schedulers heard though the rank, which logged too, never told."""
        return [
            f"hold {hold_id} was {how} though rank {rank} never said so"
            for (rank, hold_id, how), count in self._left.items()
            if count < 0 and rank in self._ranks
        ]

    def _add(self, key: tuple[object, object, str], by: int) -> None:
        self._left[key] += by
        if not self._left[key]:
            del self._left[key]


@attrs.define
class _Hold:
    num_ranks: int
    left_by: set[int] = attrs.Factory(set)
    story: list[Line] = attrs.Factory(list)


class HoldTrace:
    """
    One scheduler from its start to its end.

    Args:
        violate: Raises.
        parts: Shared by all processes of the trace.
    """

    def __init__(self, violate: Violate, parts: Parts) -> None:
        self._violate = violate
        self._parts = parts
        self._holds: dict[object, _Hold] = {}
        self._has_failed = False

    @property
    def num_open(self) -> int:
        """Holds that some rank has not left."""
        return len(self._holds)

    def finish(self) -> None:
        """
        Check what must hold behind the last line.

        A rank may have given blocks back behind the last step, in which nobody was told
        any more. A report that made no sense took with it what it told.
        """
        if self._has_failed:
            return
        for hold_id, hold in self._holds.items():
            missing = hold.num_ranks - len(hold.left_by)
            ranks = {*range(hold.num_ranks)} - hold.left_by
            told = sum(self._parts.take(rank, hold_id) for rank in ranks)
            if told < missing:
                why = f"hold {hold_id}: {missing} ranks left, {told} gave blocks back"
                self._violate(Rule.HOLD_LEFT, why, hold.story)

    def _taken(self, line: Line) -> None:
        hold_id, ranks = number_in(line[1], "hold_id"), line[1].get("ranks_left")
        hold = self._holds.get(hold_id)
        if hold is not None or not isinstance(ranks, int) or ranks < 1:
            why = f"hold {hold_id} is taken for {ranks} ranks"
            story = [*hold.story, line] if hold else [line]
            self._violate(Rule.HOLD_ONCE, why, story)
        self._holds[hold_id] = _Hold(ranks, story=[line])

    def _left(self, line: Line) -> None:
        """Take note that a rank left a hold, for good or for bad."""
        hold_id, rank = number_in(line[1], "hold_id"), number_in(line[1], "rank")
        hold = self._holds.get(hold_id)
        if hold is None or rank in hold.left_by:
            why = f"rank {rank} has no part in hold {hold_id}"
            story = [*hold.story, line] if hold else [line]
            self._violate(Rule.HOLD_ONCE, why, story)
        hold.story.append(line)
        hold.left_by.add(rank)
        how = str(line[1]["event"]).removeprefix("hold.")
        self._parts.heard(rank, hold_id, how)
        if len(hold.left_by) == hold.num_ranks:
            del self._holds[hold_id]

    def _matched(self, line: Line) -> None:
        tokens = [line[1].get(f"{which}_tokens") for which in ("computed", "external")]
        least = (0, 1)
        for count, limit in zip(tokens, least, strict=True):
            if not isinstance(count, int) or count < limit:
                why = f"{line[1].get('request_id')} matched {tokens}"
                self._violate(Rule.MATCHED, why, [line])

    def _started(self, _: Line) -> None:
        """Nothing to check; whoever feeds begins a trace with it."""

    def _failed(self, _: Line) -> None:
        self._has_failed = True

    def _closed(self, line: Line) -> None:
        told = line[1].get("holds")
        if told != self.num_open and not self._has_failed:
            why = f"the scheduler closed with {told} holds, the log has {self.num_open}"
            self._violate(Rule.HOLD_LEFT, why, [line])

    HANDLERS: ClassVar[Mapping[str, Callable[["HoldTrace", Line], None]]] = {
        SCHEDULER_STARTED: _started,
        SCHEDULER_CLOSED: _closed,
        RUNTIME_FAILED: _failed,
        HOLD_TAKEN: _taken,
        HOLD_RELEASED: _left,
        HOLD_QUARANTINED: _left,
        PREFIX_MATCHED: _matched,
    }
    """What is read, by event."""
