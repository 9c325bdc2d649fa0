# SPDX-License-Identifier: Apache-2.0
"""R-24: a host's own log, of whatever class, keeps nobody of ours from going on."""

import json
import logging
import os

import pytest
import structlog

from ucm.config import LogConfig
from ucm.tracing import STAGE_FAILED, TICKET_SETTLED, open_log


@pytest.fixture(autouse=True)
def _unconfigured():
    """Leave structlog as a host does that never configured it."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def full():
    """Return a processor that writes to a disk without room."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield lambda _, __, event: os.write(descriptor, str(event).encode())
    os.close(descriptor)


@pytest.mark.parametrize("wrapper", [None, structlog.stdlib.BoundLogger])
def test_host_log_without_room_raises_nothing(full, wrapper):
    """It ended the threads that copy, and raised out of hooks of an engine: a load had no end,
    a host's save the error of its log, and blocks stayed in use."""
    structlog.configure(processors=[full], wrapper_class=wrapper)
    log = open_log(LogConfig(), "worker-0")
    with pytest.raises(OSError, match="No space left"):
        structlog.get_logger().warning("of the host itself")
    for each in (log, log.bind(transfer_id=1)):
        for write in (each.debug, each.info, each.warning, each.error):
            write(STAGE_FAILED, reason="x")


def test_host_log_of_a_class_that_knows_no_levels_gets_all():
    """Each save and load asks for them, and all that was ordered in a step had failed."""
    capture = structlog.testing.LogCapture()
    structlog.configure(processors=[capture], wrapper_class=structlog.BoundLogger)
    log = open_log(LogConfig(), "worker-0").bind(transfer_id=1)
    assert log.is_enabled_for(logging.DEBUG)
    log.debug(TICKET_SETTLED)
    assert [(1, "debug")] == [
        (each["transfer_id"], each["log_level"]) for each in capture.entries
    ]


def test_host_log_that_knows_its_level_is_asked():
    """What nobody reads is not made."""
    level = structlog.make_filtering_bound_logger(logging.INFO)
    structlog.configure(wrapper_class=level)
    log = open_log(LogConfig(), "worker-0")
    told = [log.is_enabled_for(each) for each in (logging.DEBUG, logging.INFO)]
    assert [False, True] == told


@pytest.mark.parametrize("factory", [None, structlog.stdlib.LoggerFactory()])
def test_host_hears_who_logs(caplog, factory):
    """Each line was told to come from the log's own file."""
    capture = structlog.testing.LogCapture()
    site = structlog.processors.CallsiteParameterAdder()
    own = [structlog.processors.JSONRenderer()] if factory else [capture]
    structlog.configure(processors=[site, *own], logger_factory=factory)
    log = open_log(LogConfig(), "worker-0")
    log.bind(transfer_id=1).warning(STAGE_FAILED)
    sites = [json.loads(each.message) for each in caplog.records] or capture.entries
    found = [(each["module"], each["func_name"]) for each in sites]
    assert [(__name__.rpartition(".")[2], "test_host_hears_who_logs")] == found
    assert len(caplog.records) == sum(
        each.funcName == "test_host_hears_who_logs" for each in caplog.records
    )


def test_host_log_that_is_to_be_awaited_gets_lines_at_once():
    """Without a running loop nothing could be opened, and with one no line was written."""
    capture = structlog.testing.LogCapture()
    kind = structlog.stdlib.AsyncBoundLogger
    structlog.configure(processors=[capture], wrapper_class=kind)
    open_log(LogConfig(), "worker-0").bind(transfer_id=1).info(STAGE_FAILED)
    assert [("worker-0", 1)] == [
        (each["role"], each["transfer_id"]) for each in capture.entries
    ]
