# SPDX-License-Identifier: Apache-2.0
"""What breaks a good trace, rule by rule."""

from collections.abc import Callable
from typing import Any

import attrs

from tests.kit.good_traces import (
    GOOD,
    NBYTES,
    Event,
    Trace,
    cancelled,
    process,
    released,
    scheduler,
    settled,
    shared,
    stage,
    through,
    worker,
)
from tests.kit.lockstep import Rule

Change = Callable[[Trace], Trace]


def find(trace: Trace, event: str, nth: int = 0, **keys: Any) -> int:
    """Return the place of the nth such event."""
    places = [
        at
        for at, each in enumerate(trace)
        if each["event"] == event and keys.items() <= each.items()
    ]
    return places[nth]


def without(event: str, nth: int = 0, **keys: Any) -> Change:
    """Leave a line out."""

    def change(trace: Trace) -> Trace:
        at = find(trace, event, nth, **keys)
        return trace[:at] + trace[at + 1 :]

    return change


def doubled(event: str, nth: int = 0, **keys: Any) -> Change:
    """Write a line twice."""

    def change(trace: Trace) -> Trace:
        at = find(trace, event, nth, **keys)
        return trace[: at + 1] + trace[at:]

    return change


def moved(by: int, event: str, nth: int = 0, **keys: Any) -> Change:
    """Write a line earlier or later."""

    def change(trace: Trace) -> Trace:
        at = find(trace, event, nth, **keys)
        rest = trace[:at] + trace[at + 1 :]
        return [*rest[: at + by], trace[at], *rest[at + by :]]

    return change


def changed(name: str, nth: int = 0, **values: Any) -> Change:
    """Let a line say something else."""

    def change(trace: Trace) -> Trace:
        at = find(trace, name, nth)
        return [*trace[:at], trace[at] | values, *trace[at + 1 :]]

    return change


def inserted(at: int, *events: Event) -> Change:
    """Write lines more."""
    return lambda trace: trace[:at] + list(events) + trace[at:]


@attrs.frozen
class Break:
    """A good trace and what breaks it."""

    rule: Rule
    trace: str
    change: Change

    def apply(self) -> Trace:
        """Return the broken trace."""
        return self.change(GOOD[self.trace])


def overtaking() -> Trace:
    """Return two saves of one lane, of which the second is gathered first."""
    first, second = (through(number, "save", waits=False) for number in (1, 2))
    return process([first[0], *second, *first[1:]])


BREAKS = (
    Break(Rule.SOURCE_ONCE, "save", doubled("source.released")),
    Break(Rule.SOURCE_ONCE, "refused", doubled("source.released")),
    Break(Rule.SOURCE_ONCE, "stuck", doubled("hold.quarantined")),
    Break(Rule.SOURCE_ONCE, "stuck", moved(-1, "hold.quarantined")),
    Break(Rule.SOURCE_ONCE, "given_up", inserted(8, released(1))),
    Break(Rule.SOURCE_AFTER_COPY, "save", moved(1, "source.released")),
    Break(Rule.SOURCE_AFTER_COPY, "save", moved(-1, "source.released")),
    Break(Rule.SOURCE_AFTER_COPY, "save_async", moved(-1, "source.released")),
    Break(Rule.SOURCE_AFTER_COPY, "save_async", without("source.released")),
    Break(Rule.SOURCE_AFTER_COPY, "load", moved(-6, "source.released")),
    Break(Rule.LOADED_WHOLE, "load", without("source.released")),
    Break(Rule.LOADED_WHOLE, "load", moved(-2, "source.released")),
    Break(Rule.LOADED_WHOLE, "load_async", moved(-2, "source.released")),
    Break(
        Rule.SOURCE_AFTER_COPY,
        "late",
        inserted(-1, worker("stage.finished", 1, "load", stage="scatter")),
    ),
    Break(Rule.SOURCE_LEFT, "cancelled", without("source.released")),
    Break(Rule.SOURCE_LEFT, "refused", without("source.released")),
    Break(Rule.SOURCE_LEFT, "torn", without("source.released")),
    Break(Rule.SOURCE_LEFT, "ends_later", without("source.released")),
    Break(Rule.HOLD_ONCE, "engine", doubled("hold.taken", 2)),
    Break(Rule.HOLD_ONCE, "engine", doubled("hold.released")),
    Break(Rule.HOLD_ONCE, "engine", without("hold.taken")),
    Break(Rule.HOLD_ONCE, "engine", changed("hold.taken", ranks_left=0)),
    Break(Rule.HOLD_ONCE, "engine", changed("hold.released", hold_id=7)),
    Break(Rule.HOLD_ONCE, "given_up", doubled("hold.quarantined", hold_id=1)),
    Break(
        Rule.HOLD_ONCE,
        "given_up",
        inserted(-1, scheduler("hold.released", hold_id=1, rank=0)),
    ),
    Break(
        Rule.HOLD_AFTER_SOURCE,
        "engine",
        lambda trace: [each for each in trace if each.get("transfer_id") != 2],
    ),
    Break(
        Rule.HOLD_AFTER_SOURCE,
        "given_up",
        lambda trace: [
            *trace[:-2],
            scheduler("hold.released", hold_id=1, rank=0),
            scheduler("scheduler.closed", holds=0),
        ],
    ),
    Break(Rule.HOLD_LEFT, "engine", changed("hold.taken", ranks_left=2)),
    Break(
        Rule.HOLD_LEFT,
        "engine",
        lambda trace: [each for each in trace if each.get("transfer_id") != 3],
    ),
    Break(Rule.HOLD_LEFT, "engine", changed("scheduler.closed", holds=0)),
    Break(Rule.HOLD_LEFT, "engine", without("hold.released")),
    Break(Rule.OFFER_FIRST, "save", without("ticket.accepted")),
    Break(Rule.OFFER_FIRST, "save", doubled("ticket.accepted")),
    Break(Rule.OFFER_FIRST, "save", moved(1, "ticket.accepted")),
    Break(Rule.OFFER_FIRST, "refused", without("ticket.refused")),
    Break(Rule.OFFER_FIRST, "refused", doubled("ticket.refused")),
    Break(Rule.OFFER_FIRST, "refused", moved(2, "ticket.refused")),
    Break(Rule.OFFER_FIRST, "cancelled", moved(1, "ticket.accepted")),
    Break(Rule.OFFER_FIRST, "load", inserted(5, *cancelled(1))),
    Break(Rule.SETTLED_ONCE, "save", doubled("ticket.settled")),
    Break(Rule.SETTLED_ONCE, "refused", doubled("ticket.settled")),
    Break(Rule.SETTLED_ONCE, "torn", doubled("ticket.settled")),
    Break(
        Rule.SETTLED_ONCE,
        "late",
        inserted(
            -1,
            worker("stage.failed", 1, "load", stage="scatter"),
            settled(1, "load", "failed", "device"),
        ),
    ),
    Break(Rule.SETTLED_ONCE, "late", moved(-3, "ticket.settled")),
    Break(Rule.SETTLED_AT_END, "save", without("ticket.settled")),
    Break(Rule.SETTLED_AT_END, "refused", without("ticket.settled")),
    Break(Rule.SETTLED_AT_END, "torn", without("ticket.settled")),
    Break(Rule.SETTLED_AT_END, "ends_later", without("ticket.settled")),
    Break(Rule.REFUSED_ONLY, "refused", changed("ticket.settled", reason="other")),
    Break(Rule.REFUSED_ONLY, "refused", changed("ticket.settled", outcome="failed")),
    Break(Rule.REFUSED_ONLY, "refused", inserted(2, *stage(1, "save", "event_wait"))),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.settled", blocks=3)),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.settled", nbytes=1)),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.settled", committed=3)),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.settled", committed=5)),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.settled", skipped=1)),
    Break(Rule.BLOCKS_ADD_UP, "save", changed("ticket.accepted", blocks=5)),
    Break(Rule.BLOCKS_ADD_UP, "cancelled", changed("ticket.settled", committed=1)),
    Break(Rule.BLOCKS_ADD_UP, "failed_load", changed("ticket.settled", skipped=1)),
    Break(Rule.BLOCKS_ADD_UP, "lossy", changed("ticket.settled", lost=0)),
    Break(Rule.BLOCKS_ADD_UP, "lossy", changed("ticket.settled", lost=2)),
    Break(Rule.BLOCKS_ADD_UP, "lossy", changed("ticket.settled", committed=4)),
    Break(Rule.COMMITTED_WHOLE, "lossy", changed("ticket.settled", torn="recycled")),
    Break(
        Rule.BLOCKS_ADD_UP,
        "save",
        changed("ticket.settled", outcome="done", reason="x"),
    ),
    Break(Rule.COMMITTED_WHOLE, "save", moved(-1, "ticket.settled")),
    Break(Rule.COMMITTED_WHOLE, "save", changed("ticket.settled", torn="recycled")),
    Break(
        Rule.COMMITTED_WHOLE,
        "cancelled",
        changed("ticket.settled", outcome="committed", committed=4),
    ),
    Break(
        Rule.COMMITTED_WHOLE,
        "cancelled",
        changed("ticket.settled", outcome="skipped", skipped=4),
    ),
    Break(
        Rule.COMMITTED_WHOLE,
        "save",
        changed("stage.finished", -1, event="stage.failed"),
    ),
    Break(Rule.COMMITTED_WHOLE, "save", without("stage.finished", stage="commit")),
    Break(Rule.STAGE_ORDER, "save", doubled("stage.started", stage="gather")),
    Break(Rule.STAGE_ORDER, "save", doubled("stage.started", stage="commit")),
    Break(Rule.STAGE_ORDER, "save", without("stage.finished", stage="event_wait")),
    Break(Rule.STAGE_ORDER, "save", without("stage.finished", stage="transfer")),
    Break(Rule.STAGE_ORDER, "save", changed("stage.finished", event="stage.failed")),
    Break(Rule.STAGE_ORDER, "save", changed("stage.started", stage="gather")),
    Break(Rule.STAGE_ORDER, "save", changed("stage.started", 1, stage="fetch")),
    Break(
        Rule.STAGE_ORDER,
        "save",
        lambda trace: [each for each in trace if each.get("stage") != "event_wait"],
    ),
    Break(
        Rule.STAGE_ORDER,
        "load",
        lambda trace: [each for each in trace if each.get("stage") != "fetch"],
    ),
    Break(Rule.STAGE_ORDER, "torn", doubled("stage.started", stage="gather_wait")),
    Break(Rule.STAGE_ENDED, "save", doubled("stage.finished", stage="gather")),
    Break(Rule.STAGE_ENDED, "save", without("stage.started", stage="commit")),
    Break(Rule.STAGE_ENDED, "load", without("stage.started", stage="publish")),
    Break(Rule.STAGE_ENDED, "failed_load", doubled("stage.failed")),
    Break(Rule.STAGE_ENDED, "save", changed("stage.finished", 1, stage="commit")),
    Break(Rule.LANE_ORDER, "save", lambda _: overtaking()),
    Break(Rule.LANE_ORDER, "shared", lambda _: shared(overtaking())),
    Break(Rule.QUEUE_BOUND, "save", changed("ticket.accepted", queue_tickets=2)),
    Break(
        Rule.QUEUE_BOUND,
        "save",
        changed("ticket.accepted", queue_tickets=1, queue_nbytes=6 * NBYTES),
    ),
    Break(Rule.CLOSED_LAST, "torn", moved(1, "stage.finished", -1)),
    Break(Rule.CLOSED_LAST, "save", doubled("runtime.closed")),
    Break(Rule.CLOSED_LAST, "save", lambda trace: trace + cancelled(2)),
    Break(Rule.CLOSED_LAST, "save", lambda trace: [*trace, worker("runtime.failed")]),
    Break(Rule.CLOSED_AT_END, "save", without("runtime.closed")),
    Break(Rule.CLOSED_AT_END, "two_runs", without("runtime.closed")),
    Break(Rule.ABANDONED, "late", changed("runtime.closed", abandoned=0)),
    Break(Rule.ABANDONED, "save", changed("runtime.closed", abandoned=2)),
    Break(Rule.ABANDONED, "save", changed("runtime.closed", abandoned=-1)),
    Break(Rule.MATCHED, "engine", changed("prefix.matched", external_tokens=0)),
    Break(Rule.MATCHED, "engine", changed("prefix.matched", external_tokens=None)),
    Break(Rule.MATCHED, "engine", changed("prefix.matched", computed_tokens=-1)),
    Break(Rule.LOADED_WHOLE, "load", moved(-1, "ticket.settled")),
    Break(Rule.LOADED_WHOLE, "load", without("stage.finished", stage="publish")),
    Break(
        Rule.LOADED_WHOLE,
        "failed_load",
        changed("ticket.settled", outcome="committed", committed=4),
    ),
    Break(Rule.REASON, "failed_load", changed("ticket.settled", reason="")),
    Break(Rule.REASON, "cancelled", changed("ticket.settled", reason="")),
)
