# SPDX-License-Identifier: Apache-2.0
"""
The structured log as an oracle: any run is checked against what must always hold.

``check_trace`` reads events as they were logged, at debug level, by one process or by
several; ``TraceChecker`` takes them one at a time and keeps only what is open, so that
a long run can be checked while it lasts. What is checked, and what a log cannot show,
stands in ``tests.kit.lockstep_rules``.

Lines of one process must come in the order in which they were written. Between
processes no order counts: their clocks are not compared for any verdict.

Threading: ``TraceChecker.log`` and ``Tracer.log`` may be used from any thread; their
other methods by one thread at a time.
"""

import heapq
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import structlog

from tests.kit.lockstep_holds import HoldTrace, Parts
from tests.kit.lockstep_rules import (
    Event,
    Line,
    Rule,
    TraceFormatError,
    TraceViolationError,
    word_in,
)
from tests.kit.lockstep_runtime import QueueBounds, RuntimeTrace
from ucm.events import EVENTS, unknown_keys
from ucm.tracing import (
    RUNTIME_FAILED,
    RUNTIME_STARTED,
    SAVE_PASSED,
    SCHEDULER_STARTED,
    Log,
)

__all__ = [
    "QueueBounds",
    "Rule",
    "TraceChecker",
    "TraceFormatError",
    "TraceSummary",
    "TraceViolationError",
    "Tracer",
    "check_trace",
    "read_traces",
]

_SHOWN: Final = 12
_READERS_OWN: Final = {"process"}


@attrs.frozen
class TraceSummary:
    """
    What a trace told.

    Args:
        events: Lines by the name of their event.
        tickets: Tickets by direction and what became of them; ``offered`` is the sum.
        blocks: Blocks, likewise.
    """

    events: Mapping[str, int]
    tickets: Mapping[tuple[str, str], int]
    blocks: Mapping[tuple[str, str], int]


class _Process:
    """What is open in one process."""

    def __init__(self) -> None:
        self.recent: deque[Line] = deque(maxlen=_SHOWN)
        self.runtime: RuntimeTrace | None = None
        self.holds: HoldTrace | None = None


class TraceChecker:
    """
    Checks events one at a time; keeps what is open.

    Args:
        is_whole: Whether every process ended in order, so that nothing may be left.
        bounds: Of the queues, to be checked if given.
    """

    def __init__(
        self, *, is_whole: bool = True, bounds: QueueBounds | None = None
    ) -> None:
        self._is_whole = is_whole
        self._bounds = bounds
        self._events: Counter[str] = Counter()
        self._tickets: Counter[tuple[str, str]] = Counter()
        self._blocks: Counter[tuple[str, str]] = Counter()
        self._parts = Parts()
        self._processes: dict[object, _Process] = {}
        self._ended: list[HoldTrace] = []
        self._number = 0
        self._lock = threading.Lock()
        self._error: TraceViolationError | TraceFormatError | None = None

    @property
    def log(self) -> Log:
        """A log whose events are fed; the first error is raised by ``finish``."""
        return _log_to(self._feed_quietly)

    @property
    def num_open(self) -> int:
        """Tickets and holds that are not over."""
        return sum(
            trace.num_open
            for process in self._processes.values()
            for trace in (process.runtime, process.holds)
            if trace is not None
        )

    def feed(self, event: Event) -> None:
        """
        Take the next event of its process.

        A process is known by ``process``, which ``read_traces`` adds, or by ``role``.

        Raises:
            TraceViolationError: It breaks a rule.
            TraceFormatError: It lacks a key, or it, or a key of it, is not in the table.
        """
        name = word_in(event, "event")
        _check_keys(name, event)
        self._number += 1
        self._events[name] += 1
        key = event.get("process", event.get("role"))
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _Process()
        line = (self._number, event)
        process.recent.append(line)
        for_holds = name in HoldTrace.HANDLERS and "transfer_id" not in event
        if name == RUNTIME_FAILED:  # of a report, or of a runtime
            for_holds = process.holds is not None
        if for_holds:
            HoldTrace.HANDLERS[name](self._holds_of(process, name), line)
        elif name == SAVE_PASSED:
            self._parts.told(event, name)
        elif name in RuntimeTrace.HANDLERS:
            self._parts.told(event, name)
            RuntimeTrace.HANDLERS[name](self._runtime_of(process, name), line)

    def finish(self) -> TraceSummary:
        """
        Check what must hold at the end and return what was seen.

        Raises:
            TraceViolationError: Something is left, or an event of ``log`` broke a rule.
            TraceFormatError: An event of ``log`` lacked a key.
        """
        if self._error is not None:
            raise self._error
        if self._is_whole:
            for process in self._processes.values():
                if process.runtime is not None:
                    process.runtime.finish()
                if process.holds is not None:
                    self._ended.append(process.holds)
            for holds in self._ended:
                holds.finish()
            for why in self._parts.unfounded():
                self._violate(_Process(), Rule.HOLD_AFTER_SOURCE, why, ())
        return TraceSummary(self._events, self._tickets, self._blocks)

    def _feed_quietly(self, event: Event) -> None:
        """Feed on a thread that must not suffer from what is found."""
        with self._lock:
            if self._error is None:
                try:
                    self.feed(event)
                except (TraceViolationError, TraceFormatError) as exc:
                    self._error = exc

    def _runtime_of(self, process: _Process, name: str) -> RuntimeTrace:
        runtime = process.runtime
        if runtime is not None and name == RUNTIME_STARTED and runtime.is_started:
            if self._is_whole:
                runtime.finish()
            runtime = None
        if runtime is None:
            runtime = process.runtime = RuntimeTrace(
                partial(self._violate, process),
                tickets=self._tickets,
                blocks=self._blocks,
                bounds=self._bounds,
            )
        return runtime

    def _holds_of(self, process: _Process, name: str) -> HoldTrace:
        holds = process.holds
        if holds is not None and name == SCHEDULER_STARTED:
            if holds.num_open:
                self._ended.append(holds)  # looked at when its ranks are read, too
            holds = None
        if holds is None:
            holds = process.holds = HoldTrace(
                partial(self._violate, process), self._parts
            )
        return holds

    def _violate(
        self, process: _Process, rule: Rule, why: str, story: Iterable[Line]
    ) -> NoReturn:
        raise TraceViolationError(rule, why, story, process.recent)


def check_trace(
    events: Iterable[Event], *, is_whole: bool = True, bounds: QueueBounds | None = None
) -> TraceSummary:
    """
    Check a trace and return what it told.

    Args:
        events: As they were logged, at debug level.
        is_whole: See ``TraceChecker``.
        bounds: See ``TraceChecker``.

    Raises:
        TraceViolationError: It breaks a rule.
        TraceFormatError: An event lacks a key.
    """
    checker = TraceChecker(is_whole=is_whole, bounds=bounds)
    for event in events:
        checker.feed(event)
    return checker.finish()


def read_traces(directory: Path) -> Iterator[Event]:
    """
    Yield the events of all processes that logged into a directory.

    They are merged by time, so that little is open at once; each file keeps its order.
    The last line of a process that was killed may be cut off, and is left out.

    Raises:
        TraceFormatError: Another line is no JSON object.
    """
    files = [_read(path) for path in sorted(directory.glob("*.jsonl"))]
    return heapq.merge(*files, key=lambda event: event.get("timestamp_s", 0.0))


def _check_keys(name: str, event: Event) -> None:
    if name not in EVENTS:
        raise TraceFormatError(f"{name} is not in the table of events: {event}")
    if unknown := unknown_keys(event) - _READERS_OWN:
        raise TraceFormatError(f"{sorted(unknown)} of {name} are not in the table")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for number, text in enumerate(file, 1):
            try:
                event = json.loads(text)
            except ValueError as exc:
                if not text.endswith("\n"):
                    return
                raise TraceFormatError(f"{path}, line {number}: {text!r}") from exc
            yield event | {"process": path.stem}


class Tracer:
    """A log that keeps its events in a list; for tests in one process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.log: Log = _log_to(self.events.append)

    def check(
        self, *, is_whole: bool = True, bounds: QueueBounds | None = None
    ) -> TraceSummary:
        """Check what was logged so far; see ``check_trace``."""
        return check_trace(tuple(self.events), is_whole=is_whole, bounds=bounds)


def _log_to(take: Callable[[Event], None]) -> Log:
    def keep(_: object, level: str, event: MutableMapping[str, Any]) -> str:
        take({**event, "level": level})
        return ""

    log: Log = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=[keep],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
    return log
