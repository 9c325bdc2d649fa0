# SPDX-License-Identifier: Apache-2.0
"""R-24: a host's own log, of whatever class, keeps nobody of ours from going on."""

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
