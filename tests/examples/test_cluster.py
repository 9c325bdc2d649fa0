# SPDX-License-Identifier: Apache-2.0
"""The example of several machines; it runs as a whole in ``tests/e2e/test_examples.py``."""

from examples.cluster.__main__ import TIMEOUT
from ucm.config import UCMConfig


def test_settings_of_the_example_are_in_range():
    """X-09: a request waits for tiers as long as it may, and an engine that has more does not start."""
    assert (
        TIMEOUT["fetch"] == UCMConfig.from_mapping({"timeout": TIMEOUT}).timeout.fetch
    )
