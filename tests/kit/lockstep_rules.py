# SPDX-License-Identifier: Apache-2.0
"""
What must hold in every structured log, and the error that says what does not.

Each rule is part of one of ten invariants. Of these a log shows some whole, some in
part and some not at all; what it does not show is proven elsewhere:

1. Blocks go back to the engine exactly once per rank, never before the last read of
   them, but for a copy that was not seen to end and that nobody stores. Whole, but for whether the device was
   really done: ``DeviceContract`` and ``tests/pipeline/test_async_device.py``.
2. Every accepted ticket is settled exactly once, and its blocks add up. Whole.
3. Bytes are visible only after all is committed. In part: a save passed every stage.
   The bytes: ``StoreContract`` and ``tests/stores/test_slab_crash.py``.
4. Tickets of one request pass each stage in order. Whole.
5. Slots never exceed the pool, waiting saves never the queue. The latter; slots are
   the store's: ``StoreContract``.
6. What the engine's thread calls never blocks. Not at all: ``tests/test_runtime.py``.
7. Nothing is left behind the end. In part: no ticket and no line. Threads, slots and
   leases: ``tests/simulation``.
8. Equal tokens give equal keys everywhere. Not at all; keys are not logged:
   ``tests/test_blocks.py`` and ``tests/golden``.
9. The host hears of each request and direction once. In part: what it is promised.
   What it is told: ``tests/integration/vllm/test_worker.py`` and ``ucm.testing.host``.
10. A damaged block is a miss with a reason. In part: a load that is complete passed its
    last check, one that is not has a reason. The bytes: ``StoreContract``.
"""

import enum
import json
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

__all__ = [
    "Event",
    "Line",
    "Rule",
    "TraceFormatError",
    "TraceViolationError",
    "Violate",
    "number_in",
    "word_in",
]

Event = Mapping[str, object]
"""One event of the log; its name under ``event``."""

Line = tuple[int, Event]
"""An event and its number in the trace, from 1."""


class Rule(enum.Enum):
    """A rule: the invariant it is part of, and a sentence."""

    SOURCE_ONCE = (
        1,
        "a ticket's blocks are given back once, or given up with their copy",
    )
    SOURCE_AFTER_COPY = (1, "blocks are given back before or behind their copy")
    SOURCE_LEFT = (1, "at the end no ticket keeps blocks")
    HOLD_ONCE = (1, "a hold is taken once, and left once by each of its ranks")
    HOLD_AFTER_SOURCE = (1, "a rank leaves a hold because its ticket gave blocks back")
    HOLD_LEFT = (1, "at the end every rank has left every hold")
    OFFER_FIRST = (2, "nothing happens to a ticket before its offer, which is one")
    SETTLED_ONCE = (2, "a ticket is settled once, and nothing follows but its tail")
    SETTLED_AT_END = (2, "at the end every ticket is settled")
    REFUSED_ONLY = (2, "a refused ticket is settled so, with the same reason")
    BLOCKS_ADD_UP = (2, "the blocks of a ticket end as many as they were offered")
    COMMITTED_WHOLE = (3, "a save is stored behind all its stages, and never torn")
    STAGE_ORDER = (4, "a ticket passes the stages of its chain in order")
    STAGE_ENDED = (4, "what ends is the stage that started")
    LANE_ORDER = (4, "tickets of one lane start each stage in order")
    QUEUE_BOUND = (5, "no save waits beyond the bounds of the queue")
    CLOSED_LAST = (7, "nothing follows the end of a runtime that is quiet")
    CLOSED_AT_END = (7, "a runtime that was started is closed")
    ABANDONED = (7, "the end names as many abandoned tickets as were cut off")
    MATCHED = (9, "a match promises tokens, and only such as can be counted")
    LOADED_WHOLE = (10, "a load is complete behind all its stages")
    REASON = (10, "an end that is no plain success has a reason")

    def __init__(self, invariant: int, sentence: str) -> None:
        self.invariant = invariant
        self.sentence = sentence


class TraceFormatError(ValueError):
    """An event lacks a key that is always there, or has it with another type."""


class TraceViolationError(AssertionError):
    """
    A log that breaks a rule.

    Args:
        rule: Which.
        why: What happened, with ids.
        story: Lines that belong to the same ticket or hold.
        around: Lines of the same process before it and itself.
    """

    def __init__(
        self, rule: Rule, why: str, story: Iterable[Line], around: Iterable[Line]
    ) -> None:
        self.rule = rule
        self.why = why
        super().__init__(
            f"invariant {rule.invariant} is broken: {rule.sentence}\n{why}\n"
            f"its own lines:\n{_written(story)}\nthe lines before:\n{_written(around)}"
        )


Violate = Callable[[Rule, str, Iterable[Line]], NoReturn]
"""Raises the error for a rule; takes what happened and the lines that belong to it."""


def number_in(event: Event, key: str) -> int:
    """
    Return a whole number of an event.

    Raises:
        TraceFormatError: There is none under this key.
    """
    value = event.get(key)
    if not isinstance(value, int):
        raise TraceFormatError(f"{key} should be a whole number in {dict(event)}")
    return value


def word_in(event: Event, key: str) -> str:
    """
    Return a text of an event.

    Raises:
        TraceFormatError: There is none under this key.
    """
    value = event.get(key)
    if not isinstance(value, str):
        raise TraceFormatError(f"{key} should be a text in {dict(event)}")
    return value


def _written(lines: Iterable[Line]) -> str:
    shown = [
        f"  {number:>6} {json.dumps(dict(event), default=str)}"
        for number, event in lines
    ]
    return "\n".join(shown) or "  (none)"
