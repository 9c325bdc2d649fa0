# SPDX-License-Identifier: Apache-2.0
"""
What becomes of each request, from its first look-up until nothing of it is open.

A record covers all lives of a request. It is *over* when the request has ended, the engine
has its blocks back and every save of them has come to its end; who asks is told of it
once. It costs something when a request begins, ends, loads, or has blocks saved, and
nothing in between.

Pure: time is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ucm.blocks import Owner
from ucm.scheduler.messages import SpanOrder

__all__ = ["Record", "Records", "SaveEnd"]


class SaveEnd(NamedTuple):
    """
    How a save ended on all ranks.

    Args:
        owners: Whose blocks.
        num_blocks: How many they are.
        stored: How many of them the store has, at least.
    """

    owners: tuple[Owner, ...]
    num_blocks: int
    stored: int


class Record(msgspec.Struct, eq=False, gc=False):
    """
    What is known of a request.

    Args:
        request_id: Which.
        lives: Its ids and generations; none while it has had no blocks.
        began_s: When it was first looked at, for the log.
        trace: The W3C ``traceparent`` that came with it; empty without one.
        is_aborted: Its client went away.
        is_over: It has ended.
        is_deferred: The engine keeps its blocks for us.
        prompt_tokens: Of its prompt.
        computed_tokens: What the engine's own cache had of them at first.
        matched_tokens: What was found beyond these, and ordered.
        hit_tokens: The same by where it was: the slab, and tiers by their names.
        loaded_tokens: What it went on with of that.
        saved_blocks: Of it, that its saves have left in the store.
        dropped_blocks: Complete ones that none of them has.
        unsettled_blocks: Of saves that are not over, or of which nobody knows whose
            blocks were stored.
        num_unknown: How many these last ones are.
        preemptions: How often its blocks were taken away.
        load_s: Time for which it waited for loads.
        load_failure: Why one came to nothing; the first reason.
        miss: Why its look-up fell short.
        first_missing: Index of the first block that was missing then.
    """

    request_id: str
    lives: list[tuple[str, int]] = []
    began_s: float = 0.0
    trace: str = ""
    is_aborted: bool = False
    is_over: bool = False
    is_deferred: bool = False
    prompt_tokens: int = 0
    computed_tokens: int = 0
    matched_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    loaded_tokens: int = 0
    saved_blocks: int = 0
    dropped_blocks: int = 0
    unsettled_blocks: int = 0
    preemptions: int = 0
    load_s: float = 0.0
    load_failure: str = ""
    miss: str = ""
    first_missing: int | None = None
    num_unknown: int = 0
    _loads_since: float | None = None

    def load_ordered(self, tokens: int, now: float) -> None:
        """Take note that it waits for so many tokens."""
        self.matched_tokens += tokens
        self._loads_since = now

    def load_found(self, hit: Mapping[str, int]) -> None:
        """Take note of where these tokens were."""
        for name, tokens in hit.items():
            self.hit_tokens[name] = self.hit_tokens.get(name, 0) + tokens

    def load_over(self, now: float, *, tokens: int = 0, failure: str = "") -> None:
        """Take note that it waits no more: it has the tokens, or why it has none."""
        if self._loads_since is not None:
            self.load_s += now - self._loads_since
            self._loads_since = None
        self.loaded_tokens += tokens
        self.load_failure = self.load_failure or failure


class _Present(dict[str, Record]):
    def __missing__(self, request_id: str) -> Record:
        record = self[request_id] = Record(request_id)
        return record


class Records:
    """
    The records of requests that are not settled.

    Used on the scheduler's thread only.
    """

    def __init__(self) -> None:
        self.present = _Present()
        """Of those that have not ended; who is asked for and not there begins."""
        self._of_life: dict[tuple[str, int], Record] = {}
        self._closing: dict[str, list[Record]] = {}
        """By id, which may be used again, those that are over and not settled."""
        self._settled: list[Record] = []

    def __len__(self) -> int:
        """Return how many are of requests that are open in some way."""
        return len(self.present) + sum(map(len, self._closing.values()))

    def of_life(self, life: tuple[str, int]) -> Record | None:
        """Return the record to which a life belongs, unless it was taken."""
        return self._of_life.get(life)

    def begun(self, life: tuple[str, int]) -> Record:
        """Take note that a request has got blocks."""
        record = self._of_life[life] = self.present[life[0]]
        record.lives.append(life)
        return record

    def ordered(self, saves: Iterable[SpanOrder]) -> None:
        """Take note of saves."""
        of_life = self._of_life
        for order in saves:
            for name, generation, num_blocks, _, _ in order.owners:
                if (record := of_life.get((name, generation))) is not None:
                    record.unsettled_blocks += num_blocks

    def saved(self, ends: Iterable[SaveEnd]) -> None:
        """Take note of saves that came to their end."""
        of_life = self._of_life
        for owners, num_blocks, stored in ends:
            is_known = stored in (0, num_blocks) or len(owners) == 1
            for name, generation, own, _, _ in owners:
                if (record := of_life.get((name, generation))) is None:
                    continue
                if not is_known:
                    record.num_unknown += own
                else:
                    record.unsettled_blocks -= own
                    record.saved_blocks += (of_it := min(stored, own))
                    record.dropped_blocks += own - of_it
                if record.is_over and not record.is_deferred:
                    self._settle(record)

    def ended(self, request_id: str, *, is_deferred: bool) -> None:
        """Take note that a request has ended; nothing if it was never looked at."""
        record = self.present.pop(request_id, None)
        if record is not None:
            record.is_over, record.is_deferred = True, is_deferred
            self._closing.setdefault(request_id, []).append(record)
            if not is_deferred:
                self._settle(record)

    def freed(self, request_ids: Iterable[str]) -> None:
        """Take note that the engine has the blocks of deferred requests back."""
        for request_id in request_ids:
            for record in self._closing.get(request_id, [])[:]:
                record.is_deferred = False
                self._settle(record)

    def take(self, *, at_end: bool = False) -> Sequence[Record]:
        """
        Return the records that are settled, each once.

        Where nobody is left for whom the engine would go on, it may not come back to hear
        of the last saves: those that are over are told as they are.

        Args:
            at_end: Nor will it come back after this.
        """
        if self._closing and (at_end or (not self.present and self._is_last())):
            for record in [each for some in self._closing.values() for each in some]:
                self._settle(record, as_it_is=True)
        if not self._settled:
            return ()
        taken, self._settled = self._settled, []
        return taken

    def _is_last(self) -> bool:
        closing = (each for some in self._closing.values() for each in some)
        return not any(each.is_deferred for each in closing)

    def _settle(self, record: Record, *, as_it_is: bool = False) -> None:
        """Have a record told of which nothing more is to be learnt."""
        is_open = not record.is_over or record.is_deferred
        is_open |= record.unsettled_blocks != record.num_unknown
        if is_open and not as_it_is:
            return
        request_id = record.request_id
        for life in record.lives:
            del self._of_life[life]
        closing = self._closing[request_id]
        closing.remove(record)
        if not closing:
            del self._closing[request_id]
        self._settled.append(record)
