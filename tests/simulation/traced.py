# SPDX-License-Identifier: Apache-2.0
"""A log for simulated runs: checked line by line, and others run at each line."""

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog

from tests.kit.lockstep import TraceChecker
from tests.kit.simulation import Simulation
from ucm.tracing import Log


def traced(
    simulation: Simulation,
    checker: TraceChecker,
    role: str,
    also: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Log:
    """Return the log of one process; *also* sees each event."""

    def take(_: object, level: str, event: MutableMapping[str, Any]) -> str:
        simulation.pause()
        checker._feed_quietly({**event, "level": level})
        also(event)
        return ""

    log: Log = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=[take],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
    return log.bind(role=role)
