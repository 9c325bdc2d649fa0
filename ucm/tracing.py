# SPDX-License-Identifier: Apache-2.0
"""
Event names of the structured log, and how a log is opened.

Names are constants: renaming one is a breaking change for operators. The library never
configures structlog globally. Where the host has configured it, events go to the
host's loggers; otherwise to JSON lines on standard error or in a directory of the
operator's choice.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Final, TextIO, cast

import structlog

from ucm.config import LogConfig
from ucm.errors import ConfigError

__all__ = [
    "ENGINE_UNTRIED",
    "EVENT_REFUSED",
    "HOLD_QUARANTINED",
    "HOLD_RELEASED",
    "HOLD_TAKEN",
    "MEMORY_UNPINNED",
    "PREFIX_MATCHED",
    "RUNTIME_CLOSED",
    "RUNTIME_FAILED",
    "RUNTIME_STARTED",
    "SAVE_PASSED",
    "SCHEDULER_CLOSED",
    "SCHEDULER_STARTED",
    "SETTING_UNSAFE",
    "SOURCE_RELEASED",
    "STAGE_FAILED",
    "STAGE_FINISHED",
    "STAGE_STARTED",
    "STORE_ANSWERS",
    "STORE_BYPASSED",
    "STORE_CLEAR_FAILED",
    "STORE_DESCRIBE_FAILED",
    "STORE_EXPERIMENTAL",
    "THREAD_BOUND",
    "TICKET_ACCEPTED",
    "TICKET_REFUSED",
    "TICKET_SETTLED",
    "Log",
    "open_log",
]

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
EVENT_REFUSED: Final = "event.refused"
MEMORY_UNPINNED: Final = "memory.unpinned"
THREAD_BOUND: Final = "thread.bound"
RUNTIME_STARTED: Final = "runtime.started"
RUNTIME_CLOSED: Final = "runtime.closed"
RUNTIME_FAILED: Final = "runtime.failed"
SCHEDULER_STARTED: Final = "scheduler.started"
SCHEDULER_CLOSED: Final = "scheduler.closed"
STORE_BYPASSED: Final = "store.bypassed"
STORE_ANSWERS: Final = "store.answers"
STORE_CLEAR_FAILED: Final = "store.clear_failed"
STORE_DESCRIBE_FAILED: Final = "store.describe_failed"
STORE_EXPERIMENTAL: Final = "store.experimental"
SETTING_UNSAFE: Final = "setting.unsafe"
ENGINE_UNTRIED: Final = "engine.untried"

Log = structlog.typing.FilteringBoundLogger
"""A structlog logger with the usual level methods."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,  # nothing of ours is that loud
}


def open_log(config: LogConfig, role: str) -> Log:
    """
    Return the log of one process.

    Args:
        config: Level and directory; both are unused when the host configured structlog.
        role: Part of the file's name and bound to every event, such as ``worker-0``.

    Raises:
        ConfigError: The directory cannot be written.
    """
    log: Log
    if structlog.is_configured():
        log = structlog.get_logger("ucm").bind(role=role)
        return log
    log = structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, _Unbreakable(_stream(config, role)))),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt=None, key="timestamp_s"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
    ).bind(role=role)
    return log


class _Unbreakable:
    """
    A text stream whose failure is nobody's: lines that cannot be written are lost.

    A full disk or a closed pipe must not stop the engine that the log is about.
    """

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        """Write if possible."""
        with contextlib.suppress(OSError, ValueError):
            self._inner.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with contextlib.suppress(OSError, ValueError):
            self._inner.flush()


def _stream(config: LogConfig, role: str) -> TextIO:
    if not config.directory or config.level == "off":
        return sys.stderr
    path = Path(config.directory) / f"ucm-{role}-{os.getpid()}.jsonl"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError as exc:
        raise ConfigError(
            "log.directory", config.directory, str(exc), "Name a writable directory."
        ) from exc
    return os.fdopen(descriptor, "a", buffering=1)
