# SPDX-License-Identifier: Apache-2.0
"""
Event names of the structured log, and how a log is opened.

Names are constants: renaming one is a breaking change for operators. The library never
configures structlog globally. Where the host has configured it, events go to the
host's loggers, and what these raise is nobody's; otherwise to JSON lines on standard
error or in a directory of the operator's choice. These are written on a thread of their
own: who logs never waits.

Standard error belongs to the server: at ``info`` it gets warnings, but not one for each
ticket that fails alike, the start and end of a process, and a summary once a minute. A
file gets every line of its level.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import FunctionType
from typing import Any, Final, cast

import structlog
from structlog import stdlib

from ucm.config import LogConfig
from ucm.errors import ConfigError
from ucm.line_writer import DescriptorSink, LineWriter, Sink, TextSink
from ucm.log_file import RotatingFile
from ucm.threads import SYSTEM

VERSION: Final = 1
"""Of the lines' keys, as ``ucm.events`` lists them; ``v`` of each line."""

TICKET_ACCEPTED: Final = "ticket.accepted"
TICKET_REFUSED: Final = "ticket.refused"
TICKET_SETTLED: Final = "ticket.settled"
STAGE_STARTED: Final = "stage.started"
STAGE_FINISHED: Final = "stage.finished"
STAGE_FAILED: Final = "stage.failed"
SOURCE_RELEASED: Final = "source.released"
SAVE_PASSED: Final = "save.passed"
HOLD_TAKEN: Final = "hold.taken"
HOLD_RELEASED: Final = "hold.released"
HOLD_QUARANTINED: Final = "hold.quarantined"
PREFIX_MATCHED: Final = "prefix.matched"
REQUEST_ENDED: Final = "request.ended"
TRACE_RING: Final = "trace.ring"
SUMMARY: Final = "summary"
PREFIX_MISSED: Final = "prefix.missed"
ADAPTER_PASSED: Final = "adapter.passed"
AGENT_STARTED: Final = "agent.started"
AGENT_ENDED: Final = "agent.ended"
AGENT_JOINED: Final = "agent.joined"
AGENT_LOST: Final = "agent.lost"
AGENT_REFUSED: Final = "agent.refused"
TIER_FAILED: Final = "tier.failed"
TIER_SILENT: Final = "tier.silent"
TIER_ANSWERS: Final = "tier.answers"
WISH_IGNORED: Final = "wish.ignored"
EVENT_REFUSED: Final = "event.refused"
CHECKSUMS_LEFT: Final = "checksums.left"
MEMORY_PINNED: Final = "memory.pinned"
MEMORY_UNMAPPED: Final = "memory.unmapped"
MEMORY_UNPINNED: Final = "memory.unpinned"
THREAD_BOUND: Final = "thread.bound"
LOG_DROPPED: Final = "log.dropped"
RUNTIME_STARTED: Final = "runtime.started"
RUNTIME_CLOSED: Final = "runtime.closed"
RUNTIME_FAILED: Final = "runtime.failed"
SCHEDULER_STARTED: Final = "scheduler.started"
SCHEDULER_CLOSED: Final = "scheduler.closed"
STORE_BYPASSED: Final = "store.bypassed"
STORE_ANSWERS: Final = "store.answers"
STORE_HUNG: Final = "store.hung"
STORE_GROWN: Final = "store.grown"
STORE_SHORT: Final = "store.short"
STORE_DESCRIBE_FAILED: Final = "store.describe_failed"
STORE_CAVEAT: Final = "store.caveat"
SETTING_UNSAFE: Final = "setting.unsafe"
SETTING_IGNORED: Final = "setting.ignored"
SETTING_TRANSLATED: Final = "setting.translated"
ENGINE_UNTRIED: Final = "engine.untried"
WEIGHTS_DOUBTED: Final = "weights.doubted"
WEIGHTS_MIXED: Final = "weights.mixed"
WEIGHTS_PROVEN: Final = "weights.proven"
WEIGHTS_READ: Final = "weights.read"
WEIGHTS_UNREADABLE: Final = "weights.unreadable"

Log = structlog.typing.FilteringBoundLogger
"""A structlog logger with the usual level methods."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,  # nothing of ours is that loud
}


_PER_PROCESS: Final = frozenset(
    (
        *(RUNTIME_STARTED, RUNTIME_CLOSED, SCHEDULER_STARTED, SCHEDULER_CLOSED),
        *(AGENT_STARTED, AGENT_ENDED),
    )
)
"""Events at ``info`` of which standard error gets one line each."""
_PER_FAILURE: Final = frozenset((STAGE_FAILED, STORE_HUNG, HOLD_QUARANTINED))
"""Events that come for each ticket while a store or device is in trouble."""
_PER_FAILURE_S: Final = 10.0
_SUMMARY_S: Final = 60.0

_STAMP: Final = structlog.processors.TimeStamper(fmt=None, key="timestamp_s")
_CLOSE_S: Final = 1.0
_STDERR: Final = 2


def open_log(config: LogConfig, role: str) -> Log:
    """
    Return the log of one process, to be closed by ``close_log``.

    Args:
        config: Level and directory; both are unused when the host configured structlog.
        role: Part of the file's name and bound to every event, such as ``worker-0``.

    Raises:
        ConfigError: The directory cannot be written.
    """
    log: Log
    if structlog.is_configured():
        kind: Any = structlog.get_config()["wrapper_class"]
        if isinstance(kind, type) and issubclass(kind, stdlib.AsyncBoundLogger):
            kind = stdlib.BoundLogger  # as it has inside: nobody awaits a line here
        logger = structlog.wrap_logger(
            None, wrapper_class=kind, logger_factory_args=("ucm",)
        )
        return cast("Log", _HostLog(logger.bind(role=role)))

    sink = _sink(config, role)
    quiet: list[structlog.typing.Processor] = []
    if not config.directory and config.level != "debug":
        quiet = [_leave_out(set()), _Sparse(SYSTEM.monotonic)]
    log = structlog.wrap_logger(
        _LineLogger(sink, role, is_quiet=bool(quiet)),
        processors=[
            *quiet,
            structlog.processors.add_log_level,
            _STAMP,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
    ).bind(v=VERSION, role=role)
    return log


def close_log(log: Log) -> None:
    """
    Write what is left of a log of ours, for at most a second, and close its file.

    Idempotent. A host's log is left alone. Lines that come later are lost.
    """
    logger = getattr(log, "_logger", None)
    if isinstance(logger, _LineLogger):
        logger.writer.close(_CLOSE_S)


def is_told(log: Log, event: str) -> bool:
    """Return whether an event at ``info`` may be written, for who has many of them."""
    logger = getattr(log, "_logger", None)
    is_quiet = isinstance(logger, _LineLogger) and logger.is_quiet
    return not is_quiet or event in _PER_PROCESS


def summarize(log: Log, totals: Callable[[], Mapping[str, float]]) -> None:
    """
    Write once a minute, on the log's own thread, how much more was counted.

    Nothing if nothing was, where the host has configured structlog, or below ``info``.

    Args:
        log: Where to.
        totals: Tells what was counted since the start, on any thread.
    """
    logger = getattr(log, "_logger", None)
    if isinstance(logger, _LineLogger) and log.is_enabled_for(logging.INFO):
        former: dict[str, float] = {}
        line_of = logger.line_of

        def make() -> str:
            now = dict(totals())
            more = {key: now[key] - former.get(key, 0) for key in now}
            more = {key: count for key, count in more.items() if count}
            former.update(now)
            told = {"seconds": _SUMMARY_S, "totals": more}
            return line_of(SUMMARY, "info", told) if more else ""

        logger.writer.every(_SUMMARY_S, make)


def num_dropped(log: Log) -> int:
    """Return how many lines of a log of ours were lost; of a host's log none is known."""
    logger = getattr(log, "_logger", None)
    return logger.writer.num_dropped if isinstance(logger, _LineLogger) else 0


unix_now: Final = time.time  # noqa: TID251 - for people and their other logs
"""Returns the time of day, as the lines' own stamps."""


def unix_before(seconds: float) -> float:
    """Return the time of day some seconds ago."""
    return unix_now() - seconds


def _writes(level: str) -> Callable[..., None]:
    """Return the method of a host's log for a level."""

    def write(self: "_HostLog", event: str, **told: object) -> None:
        """Write, or lose the event: whose thread this is has nothing to do with it."""
        with contextlib.suppress(Exception):
            getattr(self.log, level)(event, **told)

    # Counts as structlog's own, so that a host hears who logs, and not of this file.
    inner = {**globals(), "__name__": "structlog.ucm"}
    return FunctionType(write.__code__, inner, level, None, write.__closure__)


class _HostLog:
    """
    A host's log, as far as it is used here: a ``Log`` that raises nothing.

    It may be of any class, and write to a disk that is full, or to somebody who has gone.

    Args:
        log: The host's own.
    """

    def __init__(self, log: Any) -> None:  # noqa: ANN401 - of any class
        self.log = log

    def bind(self, **told: object) -> "_HostLog":
        """Return one whose events have these keys as well."""
        return _HostLog(self.log.bind(**told))

    def is_enabled_for(self, level: int) -> bool:
        """Return whether events of a level may be written; not every class knows."""
        if hasattr(type(self.log), "is_enabled_for"):  # else it may be written itself
            with contextlib.suppress(Exception):
                return bool(self.log.is_enabled_for(level))
        return True

    debug, info, warning, error = map(_writes, ("debug", "info", "warning", "error"))


class _LineLogger:
    """What structlog calls with the text of an event."""

    def __init__(self, sink: Sink, role: str, *, is_quiet: bool) -> None:
        def line_of(event: str, level: str, told: Mapping[str, object]) -> str:
            common = {"v": VERSION, "event": event, "level": level, "role": role}
            return json.dumps(_STAMP(None, level, {**common, **told})) + "\n"

        self.line_of = line_of  # no method: the writer's thread must not keep us alive
        self.is_quiet = is_quiet
        self.writer = LineWriter(
            sink, lambda count: line_of(LOG_DROPPED, "warning", {"lines": count})
        )

    def msg(self, text: str) -> None:
        """Take a line."""
        self.writer.put(text + "\n")

    debug = info = warning = error = exception = critical = msg


def _leave_out(told: set[str]) -> structlog.typing.Processor:
    """Return what lets warnings pass, and of a process's own lines the first of each."""

    def leave_out(
        _: object, level: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        name = event["event"]
        if level == "info" and (name not in _PER_PROCESS or name in told):
            raise structlog.DropEvent
        if name == TRACE_RING:  # long, and for tools
            raise structlog.DropEvent
        told.add(name)
        return event

    return leave_out


class _Sparse:
    """
    Lets one failure of a kind pass in ten seconds; the next says how many did not.

    Threading: any, without a lock; two threads may at worst both tell the same.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._quiet_until: dict[tuple[object, ...], float] = {}
        self._left_out: dict[tuple[object, ...], int] = {}

    def __call__(
        self, _: object, __: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if event["event"] not in _PER_FAILURE:
            return event
        kind = tuple(str(event.get(key)) for key in ("event", "direction", "reason"))
        now = self._clock()
        if now < self._quiet_until.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            raise structlog.DropEvent
        self._quiet_until[kind] = now + _PER_FAILURE_S
        if count := self._left_out.pop(kind, 0):
            event["left_out"] = count
        return event


def _sink(config: LogConfig, role: str) -> Sink:
    if not config.directory or config.level == "off":
        return _standard_error()
    path = Path(config.directory) / f"ucm-{role}-{os.getpid()}.jsonl"
    try:
        return RotatingFile(path, max_bytes=config.max_bytes, files=config.files)
    except OSError as exc:
        raise ConfigError(
            "log.directory", config.directory, str(exc), "Name a writable directory."
        ) from exc


def _standard_error() -> Sink:
    """Return the host's stream; if it is a file, by a descriptor that stays valid."""
    if sys.stderr is None:
        return DescriptorSink(os.open(os.devnull, os.O_WRONLY), is_ours=True)
    try:
        descriptor = sys.stderr.fileno()
        is_ours = descriptor != _STDERR
        descriptor = os.dup(descriptor) if is_ours else descriptor
    except (AttributeError, OSError, TypeError, ValueError):  # it has none
        return TextSink(sys.stderr)
    return DescriptorSink(descriptor, is_ours=is_ours)
