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

from collections.abc import Iterator
from typing import Final

import attrs

from tests.kit.lockstep_rules import Line, Rule, Violate, number_in, word_in
from ucm.tracing import STAGE_FAILED

__all__ = ["CHAINS", "OPTIONAL", "VERIFYING", "TicketTrace", "rows_in"]

OWN: Final = ("audit", "second")
"""What tests call a host's own stages."""

_SAVES: Final = ("event_wait", "gather", "gather_wait", "transfer", *OWN)

CHAINS: Final = {
    "save": (*_SAVES, "confirm", "commit"),
    "load": ("event_wait", "fetch", "scatter", "verify", "scatter_wait", "publish"),
}
"""Stages by direction."""

OPTIONAL: Final = frozenset({"gather_wait", "verify", "scatter_wait", "confirm", *OWN})
"""Those that are there for some devices, engines and hosts only."""

VERIFYING: Final = frozenset({"verify", "scatter_wait", "publish"})
"""Those that whole loads pass on several threads, so that one may overtake another."""

_COPIES: Final = {"save": 1, "load": 2}
_WAITS: Final = {"save": 2, "load": 4}
_IN_QUEUE: Final = -1


def rows_in(line: Line) -> tuple[int, ...]:
    """Return the rows of an item that does not bring all; empty for one that does."""
    rows = line[1].get("rows", ())
    return tuple(rows) if isinstance(rows, (list, tuple)) else ()


@attrs.define
class _ItemTrace:
    """
    Some rows of a ticket on their way; all of them, as a rule.

    Args:
        chain: Names of the stages.
        copy: Which of them copies.
        wait: Which of them waits for the copy.
        may_copy: The blocks were not taken back before.
    """

    chain: tuple[str, ...]
    copy: int
    wait: int
    may_copy: bool
    at: int = _IN_QUEUE
    is_running: bool = False
    has_failed: bool = False
    started_late: bool = False

    @property
    def stage(self) -> str:
        """The stage that started last."""
        return "queue" if self.at == _IN_QUEUE else self.chain[self.at]

    @property
    def copy_began(self) -> bool:
        """Whether its copy may have begun."""
        return self.at >= self.copy

    @property
    def is_whole(self) -> bool:
        """Whether it came to the end of its chain."""
        is_last = self.at == len(self.chain) - 1
        return is_last and not (self.is_running or self.has_failed)

    def _following(self) -> Iterator[str]:
        for stage in self.chain[self.at + 1 :]:
            yield stage
            if stage not in OPTIONAL:
                return

    def start(self, stage: str) -> bool:
        """Take note that a stage starts; return whether it may."""
        if (
            self.has_failed
            and self.stage == "verify"
            and stage == self.chain[self.wait]
        ):
            self.has_failed = False  # the copy beside it is waited for all the same
        fits = stage in self._following() and not (self.is_running or self.has_failed)
        self.at = self.chain.index(stage) if stage in self.chain else self.at
        self.is_running = True
        return fits


@attrs.define(kw_only=True)
class TicketTrace:
    """
    One ticket, whose rows come in one item or in several.

    Args:
        transfer_id: Its number.
        direction: ``save`` or ``load``.
        lane: What it shares with others whose order counts; None if not known.
        turn: Its place among the offers.
        blocks: As offered.
        nbytes: As offered.
        rows: Rows of each block; None if not told.
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
    rows: int | None = None
    refusal: str
    violate: Violate
    story: list[Line]
    outcome: str = ""
    _items: dict[tuple[int, ...], _ItemTrace] = attrs.field(factory=dict, init=False)
    _is_released: bool = attrs.field(default=False, init=False)
    _is_quarantined: bool = attrs.field(default=False, init=False)
    _is_published: bool = attrs.field(default=False, init=False)

    @property
    def has_blocks(self) -> bool:
        """Whether its blocks are neither given back nor given up."""
        return not (self._is_released or self._is_quarantined)

    @property
    def is_over(self) -> bool:
        """Whether only its tail may follow."""
        return bool(self.outcome) and not self.has_blocks

    @property
    def copy_began(self) -> bool:
        """Whether a copy of its blocks may have begun."""
        return any(item.copy_began for item in self._items.values())

    def start_stage(self, line: Line) -> None:
        """A stage started."""
        stage, item = word_in(line[1], "stage"), self._item(line)
        behind = item.stage
        if not item.start(stage):
            self._violate(
                Rule.STAGE_ORDER, f"{stage} of {self} started behind {behind}"
            )
        if self.outcome and item.at != item.wait:
            self._start_late(item)
        is_alone = () in self._items  # others may go on while rows are to come
        is_alone = is_alone and self.direction == "save"  # a load's: once published
        if is_alone and item.at > item.copy + 1 and self.has_blocks:
            why = f"{stage} started before the blocks of {self} were given back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)

    def _item(self, line: Line) -> _ItemTrace:
        """Return the item of a line; no row is in two of them."""
        rows = rows_in(line)
        if rows not in self._items:
            known = [row for each in self._items for row in each]
            if () in self._items or set(rows).intersection(known):
                why = f"rows {rows} of {self} came twice"
                self._violate(Rule.STAGE_ORDER, why)
            chain, copy = CHAINS[self.direction], _COPIES[self.direction]
            wait, may_copy = _WAITS[self.direction], not self._is_released
            self._items[rows] = _ItemTrace(chain, copy, wait, may_copy)
        return self._items[rows]

    def _start_late(self, item: _ItemTrace) -> None:
        if item.started_late:
            why = f"{item.stage} started though {self} is settled"
            self._violate(Rule.SETTLED_ONCE, why)
        item.started_late = True
        item.may_copy = False  # its blocks were taken back before the last word

    def end_stage(self, line: Line) -> None:
        """A stage ended; one that failed may have done so before it started."""
        stage, item = word_in(line[1], "stage"), self._item(line)
        failed = line[1]["event"] == STAGE_FAILED
        fits = stage == item.stage and (item.is_running or failed)
        if not fits or item.has_failed:
            why = f"{stage} of {self} ended, which is in {item.stage}"
            self._violate(Rule.STAGE_ENDED, why)
        item.is_running = False
        item.has_failed = failed
        if item.at == item.copy and not (failed or item.may_copy):
            why = f"{stage} copied blocks of {self} that were given back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)

    def release(self) -> None:
        """Its blocks were given back: instead of a copy, or while one was waited for."""
        if not self.has_blocks:
            why = f"the blocks of {self} were given back or given up before"
            self._violate(Rule.SOURCE_ONCE, why)
        for item in self._items.values():
            if not item.copy_began:
                item.may_copy = False
        alone = self._items.get(()) if self.direction == "save" else None
        if alone and alone.copy_began and not (alone.is_running or alone.has_failed):
            why = f"{alone.stage} was over when {self} gave its blocks back"
            self._violate(Rule.SOURCE_AFTER_COPY, why)
        self._is_released = True
        stages = {item.stage for item in self._items.values() if item.is_running}
        self._is_published = "publish" in stages

    def quarantine(self) -> None:
        """Its blocks were given up, with a copy that does not end."""
        if not (self.has_blocks and self.copy_began):
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
        lost = number_in(event, "lost") if "lost" in event else 0
        fitting = {
            "committed": committed > 0 and rest == 0,
            "skipped": committed == 0 and rest == 0,
            "refused": rest > 0,
            "failed": committed == skipped == 0,
            # The blocks that the engine did not overwrite are stored even so.
            "cancelled": rest > 0 and (lost > 0 or committed == skipped == 0),
        }
        fits = fitting.get(outcome, False) and min(committed, skipped) >= 0
        fits = fits and committed + lost <= self.blocks
        told = (number_in(event, "blocks"), number_in(event, "nbytes"))
        if not fits or told != (self.blocks, self.nbytes):
            why = f"{self} was offered with {self.blocks} blocks, {self.nbytes} bytes"
            self._violate(Rule.BLOCKS_ADD_UP, why)
        ends = {"committed": committed, "skipped": skipped}
        return ends | {outcome: ends.get(outcome, 0) + rest}

    def _check_whole(self, line: Line) -> None:
        saves = self.direction == "save"
        rule = Rule.COMMITTED_WHOLE if saves else Rule.LOADED_WHOLE
        items = self._items.values()
        torn = line[1].get("torn")
        came = sum(map(len, self._items))
        lacks = () not in self._items and (self.rows is None or came < self.rows)
        if torn or lacks or not all(item.is_whole for item in items):
            stages = [item.stage for item in items] or ["queue"]
            self._violate(rule, f"{self} came to {stages}, {came} rows; torn: {torn}")
        if () in self._items and not (saves or self._is_published):
            self._violate(rule, f"the blocks of {self} went back before its last stage")
        if self.has_blocks:
            self._violate(rule, f"{self} is settled before its blocks were given back")

    def _violate(self, rule: Rule, why: str) -> None:
        self.violate(rule, why, self.story)

    def __str__(self) -> str:
        return f"{self.direction} {self.transfer_id}"
