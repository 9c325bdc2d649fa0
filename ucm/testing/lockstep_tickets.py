# SPDX-License-Identifier: Apache-2.0
"""
The life of one ticket, as the log tells it.

States, apart from where in its chain a ticket is::

    refused ───────────────────▶ settled ──▶ over, once its blocks are given back
    accepted ──▶ (stages) ─────▶ settled ──▶ over, likewise

Lines come from several threads, each in its own order. That leaves a settled ticket a
*tail*: the end of the stage that was running, the wait for a copy that had begun, its
blocks given back, and one stage that started while another thread gave the last word;
such a start never leads to a copy.
"""

from typing import Final

import attrs

from ucm.testing.lockstep_rules import Line, Rule, Violate, number_in, word_in
from ucm.tracing import STAGE_FAILED

__all__ = ["CHAINS", "TicketTrace"]

CHAINS: Final = {
    "save": ("event_wait", "gather", "gather_wait", "transfer", "commit"),
    "load": ("event_wait", "fetch", "scatter", "scatter_wait", "publish"),
}
"""Stages by direction; those that wait for the device's fence may be left out."""

_COPIES: Final = {"save": 1, "load": 2}
_IN_QUEUE: Final = -1


@attrs.define(kw_only=True)
class TicketTrace:
    """
    One ticket that brings all its rows in one item.

    Args:
        transfer_id: Its number.
        direction: ``save`` or ``load``.
        lane: What it shares with others whose order counts; None if not known.
        turn: Its place among the offers.
        blocks: As offered.
        nbytes: As offered.
        refusal: Why it was refused; empty if it was not.
        violate: Raises.
        story: All its lines.
    """

    transfer_id: int
    direction: str
    lane: tuple[object, ...] | None
    turn: int
    blocks: int
    nbytes: int
    refusal: str
    violate: Violate
    story: list[Line]
    outcome: str = ""
    _at: int = attrs.field(default=_IN_QUEUE, init=False)
    _is_running: bool = attrs.field(default=False, init=False)
    _has_failed: bool = attrs.field(default=False, init=False)
    _waits_again: bool = attrs.field(default=False, init=False)
    _started_late: bool = attrs.field(default=False, init=False)
    _may_copy: bool = attrs.field(default=True, init=False)
    _is_released: bool = attrs.field(default=False, init=False)
    _is_quarantined: bool = attrs.field(default=False, init=False)

    @property
    def stage(self) -> str:
        """The stage that started last."""
        return "queue" if self.is_queued else CHAINS[self.direction][self._at]

    @property
    def is_queued(self) -> bool:
        """Whether no stage of it has started."""
        return self._at == _IN_QUEUE

    @property
    def copy_began(self) -> bool:
        """Whether the copy of its blocks may have begun."""
        return self._at >= _COPIES[self.direction]

    @property
    def has_blocks(self) -> bool:
        """Whether its blocks are neither given back nor given up."""
        return not (self._is_released or self._is_quarantined)

    @property
    def is_over(self) -> bool:
        """Whether only its tail may follow."""
        return bool(self.outcome) and not self.has_blocks

    def start_stage(self, line: Line) -> None:
        """A stage started."""
        stage = word_in(line[1], "stage")
        chain, copy = CHAINS[self.direction], _COPIES[self.direction]
        may_skip = self._at == copy
        following = chain[self._at + 1 : self._at + (3 if may_skip else 2)]
        fits = stage in following and not (self._is_running or self._has_failed)
        if self._is_running and stage == self.stage == chain[copy + 1]:
            fits = not self._waits_again  # once more, beyond the deadline
            self._waits_again = True
        if not fits:
            why = f"{stage} of {self} started behind {self.stage}"
            self._violate(Rule.STAGE_ORDER, why)
        self._at = chain.index(stage)
        self._is_running = True
        if self.outcome and self._at != copy + 1:
            self._start_late()
        if self._at > copy + 1 and self.has_blocks:
            why = f"{stage} started before the blocks of {self} were given back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)

    def _start_late(self) -> None:
        if self._started_late:
            why = f"{self.stage} started though {self} is settled"
            self._violate(Rule.SETTLED_ONCE, why)
        self._started_late = True
        self._may_copy = False  # its blocks were taken back before the last word

    def end_stage(self, line: Line) -> None:
        """A stage ended; one that failed may have done so before it started."""
        stage = word_in(line[1], "stage")
        failed = line[1]["event"] == STAGE_FAILED
        fits = stage == self.stage and (self._is_running or failed)
        if not fits or self._has_failed:
            why = f"{stage} of {self} ended, which is in {self.stage}"
            self._violate(Rule.STAGE_ENDED, why)
        self._is_running = False
        self._has_failed = failed
        if self._at == _COPIES[self.direction] and not (failed or self._may_copy):
            why = f"{stage} copied blocks of {self} that were given back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)

    def release(self) -> None:
        """Its blocks were given back: instead of a copy, or while one was waited for."""
        if not self.has_blocks:
            why = f"the blocks of {self} were given back or given up before"
            self._violate(Rule.SOURCE_ONCE, why)
        if not self.copy_began:
            self._may_copy = False
        elif not (self._is_running or self._has_failed):
            why = f"{self.stage} was over when {self} gave its blocks back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)
        self._is_released = True

    def quarantine(self) -> None:
        """Its blocks were given up, with a copy that does not end."""
        if not self.has_blocks or not self.copy_began:
            why = f"{self} has no copy under way that could be given up"
            self._violate(Rule.SOURCE_ONCE, why)
        self._is_quarantined = True

    def settle(self, line: Line) -> dict[str, int]:
        """Take the last word; return how many blocks ended in which way."""
        outcome, reason = word_in(line[1], "outcome"), line[1].get("reason")
        if self.outcome:
            self._violate(
                Rule.SETTLED_ONCE, f"{self} was settled before as {self.outcome}"
            )
        if self.refusal and (outcome, reason) != ("refused", self.refusal):
            self._violate(
                Rule.REFUSED_ONLY, f"{self} was refused because of {self.refusal}"
            )
        if outcome != "committed" and not reason:
            self._violate(Rule.REASON, f"{self} is {outcome}")
        ends = self._add_up(outcome, line)
        if ends["committed"] or outcome in ("committed", "skipped"):
            self._check_whole(line)
        self.outcome = outcome
        return ends

    def _add_up(self, outcome: str, line: Line) -> dict[str, int]:
        event = line[1]
        committed, skipped = number_in(event, "committed"), number_in(event, "skipped")
        rest = self.blocks - committed - skipped
        fitting = {
            "committed": committed > 0 and rest == 0,
            "skipped": committed == 0 and rest == 0,
            "refused": rest > 0,
            "failed": committed == skipped == 0,
            "cancelled": committed == skipped == 0,
        }
        fits = fitting.get(outcome, False) and min(committed, skipped) >= 0
        told = (number_in(event, "blocks"), number_in(event, "nbytes"))
        if not fits or told != (self.blocks, self.nbytes):
            why = f"{self} was offered with {self.blocks} blocks, {self.nbytes} bytes"
            self._violate(Rule.BLOCKS_ADD_UP, why)
        ends = {"committed": committed, "skipped": skipped}
        return ends | {outcome: ends.get(outcome, 0) + rest}

    def _check_whole(self, line: Line) -> None:
        saves = self.direction == "save"
        rule = Rule.COMMITTED_WHOLE if saves else Rule.LOADED_WHOLE
        # A copy that was waited for beyond the deadline is torn, too.
        torn = line[1].get("torn") or self._waits_again
        is_last = self.stage == CHAINS[self.direction][-1]
        if torn or not is_last or self._is_running or self._has_failed:
            self._violate(rule, f"{self} came to {self.stage}; torn: {torn}")

    def _violate(self, rule: Rule, why: str) -> None:
        self.violate(rule, why, self.story)

    def __str__(self) -> str:
        return f"{self.direction} {self.transfer_id}"
