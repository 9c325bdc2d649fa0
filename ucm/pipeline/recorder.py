# SPDX-License-Identifier: Apache-2.0
"""
What the world is told of tickets: counters, log lines, and notices for the engine.

Threading: used from every thread; its parts are safe for that.
"""

import enum
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from ucm.affinity import AffinityPlan, format_cpulist
from ucm.blocks import named
from ucm.devices.abc import Device
from ucm.mailbox import Mailbox
from ucm.metrics import Counters, sample_key
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.ring import EdgeRing
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind, Ticket
from ucm.reasons import Reason
from ucm.spans import tell_spans, trace_id_of
from ucm.stores.abc import Store
from ucm.threads import SYSTEM
from ucm.tracing import (
    CHECKSUMS_LEFT,
    HOLD_QUARANTINED,
    RUNTIME_FAILED,
    RUNTIME_STARTED,
    SOURCE_RELEASED,
    STORE_CAVEAT,
    THREAD_BOUND,
    TICKET_ACCEPTED,
    TICKET_REFUSED,
    TICKET_SETTLED,
    Log,
    is_told,
    summarize,
    unix_before,
)

__all__ = ["STAGES", "Notice", "NoticeKind", "Recorder"]


STAGES: Final = frozenset(
    (
        *("event_wait", "gather", "gather_wait", "transfer", "confirm", "commit"),
        *("fetch", "scatter", "verify", "scatter_wait", "publish"),
    )
)
"""Our stages, as metrics know them; a host's own are ``own`` together."""
_DURATIONS: Final = {
    direction: f"ucm_{direction.value}_duration_seconds" for direction in Direction
}


class NoticeKind(enum.Enum):
    """What a notice tells."""

    RELEASED = "released"
    QUARANTINED = "quarantined"
    SETTLED = "settled"


@attrs.frozen
class Notice:
    """
    One message to the engine's thread.

    Args:
        kind: What it tells.
        ticket: Whose.
        outcome: With ``SETTLED``, the last word.
    """

    kind: NoticeKind
    ticket: Ticket
    outcome: Outcome | None = None


class Recorder:
    """
    Tells the world what becomes of tickets: counters, log, notices.

    Used from every thread; its parts are safe for that.

    Args:
        counters: Where totals go.
        mailbox: Where the engine's thread finds notices.
        log: The process's log.
        tier: Where the store's blocks lie, as a word for metrics.
    """

    def __init__(
        self,
        counters: Counters,
        mailbox: Mailbox[Notice],
        log: Log,
        clock: Callable[[], float] = SYSTEM.monotonic,
        tier: str = "memory",
    ) -> None:
        self.counters = counters
        self.ring = EdgeRing(log, clock)
        """What stages did last."""
        self._tier = tier
        self._mailbox = mailbox
        self._log = log
        self._tells_ends = is_told(log, TICKET_SETTLED)

    def offered(self, tickets: Sequence[Ticket]) -> None:
        """Count what is about to be offered in one go."""
        totals: dict[str, float] = {}
        for ticket in tickets:
            parts, nbytes = _offered_keys(ticket.direction)
            totals[parts] = totals.get(parts, 0) + len(ticket.span)
            totals[nbytes] = totals.get(nbytes, 0) + ticket.nbytes
        self.counters.add_all(totals)

    def admitted(self, ticket: Ticket, refusal: Reason, queue: DumpQueue) -> None:
        """Log what becomes of an offer; a refusal is the ticket's end."""
        if not (refusal or ticket.is_traced):
            return
        queue_tickets, queue_nbytes = queue.waiting(ticket.direction)
        told = {
            "blocks": len(ticket.span),
            "nbytes": ticket.nbytes,
            "rows": len(ticket.row_ids),
            "queue_tickets": queue_tickets,
            "queue_nbytes": queue_nbytes,
        }
        if refusal:
            ticket.log.info(TICKET_REFUSED, **told, reason=refusal)
            ticket.end(Outcome(OutcomeKind.REFUSED, refusal))
        else:
            ticket.log.debug(TICKET_ACCEPTED, **told)

    def released(self, ticket: Ticket) -> None:
        """Tell that the engine may reuse the blocks."""
        held = ticket.released_at - ticket.accepted_at
        if ticket.direction is Direction.SAVE:
            self.counters.observe("ucm_hold_duration_seconds", held)
        self._mailbox.put(Notice(NoticeKind.RELEASED, ticket))
        if ticket.is_traced:
            ticket.log.debug(SOURCE_RELEASED, elapsed_s=held)

    def quarantined(self, ticket: Ticket) -> None:
        """Tell that a device copy never ended."""
        self._mailbox.put(Notice(NoticeKind.QUARANTINED, ticket))
        ticket.log.error(HOLD_QUARANTINED, blocks=len(ticket.span))

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """Tell a ticket's end."""
        # First of all: whatever goes wrong below, the engine must hear of it.
        self._mailbox.put(Notice(NoticeKind.SETTLED, ticket, outcome))
        total = ticket.clock() - ticket.accepted_at
        self._count(ticket, outcome, total)
        trace = ticket.origin.traces.get(ticket.transfer_id, "")
        if self._tells_ends and self._log.is_enabled_for(logging.INFO):
            self._write_line(ticket, outcome, total, trace)
        if trace:
            tell_spans(
                f"ucm.{ticket.direction.value}",
                trace,
                began_s=unix_before(total),
                total_s=total,
                edges=_edges(ticket, total),
                attributes={
                    "ucm.ticket": ticket.transfer_id,
                    "ucm.outcome": outcome.kind.value,
                    "ucm.reason": outcome.reason.value,
                    "ucm.bytes": ticket.nbytes,
                },
            )
        if outcome.kind is OutcomeKind.FAILED:
            self.ring.failed(outcome.reason)

    def started(self, store: Store, device: Device) -> None:
        """Tell that saves and loads are served from now on."""
        names = {"store": type(store).__name__, "device": type(device).__name__}
        self._log.info(RUNTIME_STARTED, **names, **device.describe())
        if caveat := store.capabilities.caveat:
            self._log.warning(STORE_CAVEAT, remedy=caveat)
        summarize(self._log, self.counters.totals)

    def bound(self, plan: AffinityPlan, bound: AffinityPlan) -> None:
        """Tell where a copy thread runs, and that it is not where it should."""
        tell = self._log.info if bound == plan else self._log.warning
        tell(THREAD_BOUND, cpus=format_cpulist(bound.cpus), reason=bound.reason)

    def left_checksums(self, device: Device) -> None:
        """Tell that the device is asked for none any more."""
        self._log.warning(
            CHECKSUMS_LEFT, checksums=device.describe().get("checksums", "host")
        )

    def failed(self, why: str) -> None:
        """Tell that nothing is served any more."""
        self._log.error(RUNTIME_FAILED, error=why)
        self.ring.failed(Reason.RUNTIME_FAILED)

    def _write_line(
        self, ticket: Ticket, outcome: Outcome, total: float, trace: str
    ) -> None:
        """Write the one canonical line of a ticket."""
        more = named(ticket.owners)
        stages = ticket.stage_times.copy()  # a copy job may still add to it
        for stage, (_, end, spent) in stages.items():
            if end:
                more[f"{stage}_s"] = round(spent, 6)
        if ticket.released_at:
            more["released_s"] = round(ticket.released_at - ticket.accepted_at, 6)
        if trace:
            more["trace_id"] = trace_id_of(trace)
        ticket.log.info(
            TICKET_SETTLED,
            ticket=ticket.transfer_id,
            group=ticket.span.group_id,
            step=ticket.origin.step,
            outcome=outcome.kind.value,
            reason=outcome.reason,
            torn=ticket.guard.torn,
            lost=len(ticket.guard.lost),
            error=outcome.error,
            blocks=len(ticket.span),
            committed=outcome.committed,
            skipped=outcome.skipped,
            nbytes=ticket.nbytes,
            accepted_s=round(unix_before(total), 6),
            total_s=round(total, 6),
            edges=_edges(ticket, total),
            **more,
        )

    def _count(self, ticket: Ticket, outcome: Outcome, total: float) -> None:
        num_blocks = len(ticket.span)
        rest = num_blocks - outcome.committed - outcome.skipped
        ends = (
            (OutcomeKind.COMMITTED, Reason.NONE, outcome.committed),
            (OutcomeKind.SKIPPED, Reason.STORED, outcome.skipped),
            (outcome.kind, outcome.reason, rest),
        )
        totals: dict[str, float] = {}
        for kind, reason, blocks in ends:
            if blocks:
                parts, nbytes = _settled_keys(ticket.direction, kind, reason)
                totals[parts] = totals.get(parts, 0) + blocks
                totals[nbytes] = totals.get(nbytes, 0) + blocks * ticket.block_bytes
        if ticket.direction is Direction.LOAD and outcome.committed:
            parts, nbytes = _hit_keys(self._tier)
            totals[parts] = outcome.committed
            totals[nbytes] = outcome.committed * ticket.block_bytes
        moved = (num_blocks - outcome.skipped) * ticket.block_bytes
        for stage, (_, end, spent) in ticket.stage_times.copy().items():
            if not end:
                continue  # it failed there, or was left there
            nbytes, seconds = _stage_keys(ticket.direction, stage)
            totals[nbytes] = totals.get(nbytes, 0) + moved
            totals[seconds] = totals.get(seconds, 0) + spent
        self.counters.add_all(totals)
        self.counters.observe(_DURATIONS[ticket.direction], total)


def _edges(ticket: Ticket, total: float) -> list[tuple[str, float, float]]:
    """Return each stage's begin and end; of one that failed, or goes on, the ticket's."""
    zero = ticket.accepted_at
    return [
        (stage, round(begin - zero, 6), round(end - zero if end else total, 6))
        for stage, (begin, end, _) in ticket.stage_times.copy().items()
    ]


# The labels are few and the same for ever: their texts are made once.


@functools.cache
def _offered_keys(direction: Direction) -> tuple[str, str]:
    labels = {"direction": direction.value}
    parts, nbytes = "ucm_offered_parts_total", "ucm_offered_part_bytes_total"
    return sample_key(parts, labels), sample_key(nbytes, labels)


@functools.cache
def _hit_keys(tier: str) -> tuple[str, str]:
    labels = {"tier": tier}
    parts, nbytes = "ucm_hit_parts_total", "ucm_hit_part_bytes_total"
    return sample_key(parts, labels), sample_key(nbytes, labels)


@functools.cache
def _stage_keys(direction: Direction, stage: str) -> tuple[str, str]:
    word = stage if stage in STAGES else "own"
    labels = {"direction": direction.value, "stage": word}
    nbytes, seconds = "ucm_stage_part_bytes_total", "ucm_stage_seconds_total"
    return sample_key(nbytes, labels), sample_key(seconds, labels)


@functools.cache
def _settled_keys(
    direction: Direction, kind: OutcomeKind, reason: Reason
) -> tuple[str, str]:
    labels = {
        "direction": direction.value,
        "outcome": kind.value,
        "reason": reason,
    }
    parts, nbytes = "ucm_settled_parts_total", "ucm_settled_part_bytes_total"
    return sample_key(parts, labels), sample_key(nbytes, labels)
