# SPDX-License-Identifier: Apache-2.0
"""A cache that is still open as its interpreter ends."""

import subprocess
import sys

import pytest

from tests.cache.kit import LIMIT_S

_HOST = """
from tests.cache.kit import Host, keys_of
from ucm.cache.sync import Cache

def serve():
    host = Host(config={"timeout": {"shutdown": 3600}})
    with Cache(*host.open_core()) as cache:
        yield cache.save(keys_of(2), range(2)).wait_committed().committed

served = serve()
print(next(served), flush=True)
"""


@pytest.mark.slow
def test_interpreter_does_not_wait_for_threads_that_have_ended() -> None:
    """A generator that nobody ends is closed behind all threads: nothing drains any more."""
    told = subprocess.run(
        [sys.executable, "-c", _HOST],
        capture_output=True,
        check=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ("2\n", "") == (told.stdout, told.stderr)
