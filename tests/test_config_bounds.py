# SPDX-License-Identifier: Apache-2.0
"""Settings that are bounded by one another, or by who has to keep to them."""

import pytest

from tests.test_config import refused
from ucm.agent.protocol import LONGEST_S
from ucm.config import QueueConfig, UCMConfig
from ucm.configuration.schema import schema
from ucm.errors import ConfigError


def test_longest_fetch_is_named():
    """X-09: it was cut to a minute without a word; a minute itself is well."""
    error = refused({"timeout": {"fetch": LONGEST_S + 1}})
    assert "Give a finite number of at least 0.001 and at most 60." == error.remedy
    told = UCMConfig.from_mapping({"timeout": {"fetch": LONGEST_S}}).timeout
    assert LONGEST_S == told.fetch
    settings = schema()["properties"]["timeout"]["properties"]
    assert LONGEST_S == settings["fetch"]["maximum"]


def test_queue_that_holds_no_block_is_refused():
    """X-09: one below a ticket has saves go one by one; a model says what a block has."""
    queue = QueueConfig(nbytes=4096, span_bytes=1)
    queue.check_holds(4096, "a block")
    with pytest.raises(ConfigError, match=r"does not hold a block of 4\.001 KiB"):
        queue.check_holds(4097, "a block")
