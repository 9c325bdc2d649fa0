# SPDX-License-Identifier: Apache-2.0
"""
The one line of each request, and what of it the engine alone knows.

What becomes of a request is gathered in ``ucm.scheduler.records``.

Threading: the engine's scheduler thread.
"""

import logging
from typing import Any, Final

from msgspec.structs import replace

from ucm.blocks import id_in_log, whose
from ucm.integration.vllm.running import Known
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.misses import Miss
from ucm.scheduler.records import Record, Records
from ucm.spans import trace_id_of, traceparent_in
from ucm.tracing import (
    HOLD_QUARANTINED,
    HOLD_RELEASED,
    HOLD_TAKEN,
    PREFIX_MATCHED,
    PREFIX_MISSED,
    REQUEST_ENDED,
    Log,
    is_told,
    unix_now,
)

__all__ = ["LifeLog"]

_MOST_TRACES: Final = 512
"""In one plan; a message is bounded."""


class LifeLog:
    """
    Tells of requests.

    Args:
        records: Of all requests.
        log: Where their lines go.
        num_ranks: Of the engine.
    """

    def __init__(self, records: Records, log: Log, num_ranks: int = 1) -> None:
        self._records = records
        self._log = log
        self._num_ranks = num_ranks
        self._tells_ends = is_told(log, REQUEST_ENDED)
        self._tells_hits = is_told(log, PREFIX_MATCHED)
        self._tells_misses = is_told(log, PREFIX_MISSED)
        self._has_traces = False

    def begun(self, known: Known) -> Record:
        """Return the record of a request, which begins with its first look-up."""
        request, present = known.request, self._records.present
        record = present.get(request.request_id)
        if record is None:  # no detour by ``__missing__``
            record = present[request.request_id] = Record(request.request_id)
        known.record = record
        record.began_s = unix_now()
        record.prompt_tokens = request.num_prompt_tokens
        if headers := getattr(request, "trace_headers", None):
            record.trace = traceparent_in(headers)
            self._has_traces |= bool(record.trace)
        return record

    def allocated(self, known: Known) -> Record:
        """Take note that it has got blocks, and of what its look-up found; return its record."""
        record = known.record or self.begun(known)  # if its engine asks for nothing
        if not record.lives:
            record.computed_tokens = known.computed_tokens
        if (miss := known.miss) is None:
            return record
        if not record.miss:  # a request's first one is kept
            record.miss = miss.reason
            record.first_missing = None if miss.block is None else miss.block.at
        if self._tells_misses:
            self._missed(record, known, miss)
        return record

    def _missed(self, record: Record, known: Known, miss: Miss) -> None:
        """Tell why a look-up fell short."""
        block = miss.block
        first: dict[str, Any] = {}
        if block is not None:
            group_id = block.group.group_id
            first = {"block": block.at, "group": group_id, "key": miss.key.hex()}
        self._log.info(
            PREFIX_MISSED,
            request_id=id_in_log(record.request_id),
            life=known.life,
            computed_tokens=known.computed_tokens,
            found_tokens=known.found_tokens,
            wanted_tokens=known.wanted_tokens,
            reason=miss.reason,
            detail=dict(miss.detail),
            **first,
            **_traced(record),
        )

    def matched(self, record: Record, computed: int, hit: dict[str, int]) -> None:
        """Tell that a load was ordered; *hit* has its tokens by where they were."""
        record.load_found(hit)
        if self._tells_hits:
            self._log.info(
                PREFIX_MATCHED,
                request_id=id_in_log(record.request_id),
                computed_tokens=computed,
                external_tokens=sum(hit.values()),
                hit_tokens=hit,
                **_traced(record),
            )

    def ordered(self, plan: StepPlan) -> StepPlan:
        """Tell what a plan holds, and return it with the traces of its tickets."""
        if self._log.is_enabled_for(logging.DEBUG):
            self._held(plan)
        traces = self.traces_of(plan) if self._has_traces else {}
        return replace(plan, traces=traces) if traces else plan

    def traces_of(self, plan: StepPlan) -> dict[int, str]:
        """Return the traces of tickets that have one owner, which brought one."""
        traces: dict[int, str] = {}
        for order in (*plan.loads, *plan.saves):
            record = self._records.of_life(order.owners[0].life)
            if len(order.owners) == 1 and record is not None and record.trace:
                traces[order.transfer_id] = record.trace
            if len(traces) == _MOST_TRACES:
                break
        return traces

    def _held(self, plan: StepPlan) -> None:
        """Tell which blocks the saves of a plan hold, until every rank lets go of them."""
        for order in plan.saves:
            self._log.debug(
                HOLD_TAKEN,
                **whose(order.owners),
                hold_id=order.transfer_id,
                blocks=len(order.block_ids),
                ranks_left=self._num_ranks,
            )

    def released(self, report: StepReport) -> None:
        """Tell which blocks a rank has let go of, or given up."""
        for hold_id in report.released:
            self._log.debug(HOLD_RELEASED, hold_id=hold_id, rank=report.rank)
        for hold_id in report.quarantined:
            self._log.error(HOLD_QUARANTINED, hold_id=hold_id, rank=report.rank)

    def aborted(self, request_id: str) -> None:
        """Take note, before its end, that nobody wants it any more."""
        if (record := self._records.present.get(request_id)) is not None:
            record.is_aborted = True

    def tell(self, *, at_end: bool = False) -> None:
        """Write the lines of those of which nothing is open any more; of all *at_end*."""
        for record in self._records.take(at_end=at_end):
            if self._tells_ends:
                self._write(record)

    def _write(self, record: Record) -> None:
        missing = record.first_missing
        if_any: dict[str, object] = {
            "hit_tokens": record.hit_tokens,
            "load_failure": record.load_failure,
            "miss": record.miss,
        }
        self._log.info(
            REQUEST_ENDED,
            request_id=id_in_log(record.request_id),
            life=len(record.lives),
            began_s=round(record.began_s, 6),
            outcome="aborted" if record.is_aborted else "finished",
            prompt_tokens=record.prompt_tokens,
            computed_tokens=record.computed_tokens,
            matched_tokens=record.matched_tokens,
            loaded_tokens=record.loaded_tokens,
            saved_blocks=record.saved_blocks,
            dropped_blocks=record.dropped_blocks,
            unsettled_blocks=record.unsettled_blocks,
            preemptions=record.preemptions,
            load_s=round(record.load_s, 6),
            **{key: word for key, word in if_any.items() if word},
            **({} if missing is None else {"first_missing": missing}),
            **_traced(record),
        )


def _traced(record: Record) -> dict[str, str]:
    return {"trace_id": trace_id_of(record.trace)} if record.trace else {}
