# SPDX-License-Identifier: Apache-2.0
"""A host that forks behind the opening of its cache."""

import os
import traceback

import pytest

from tests.cache.kit import Host, keys_of, leaving_nothing
from ucm.cache.sync import Cache
from ucm.errors import PipelineClosedError


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_is_told_that_nothing_serves_it() -> None:
    """R-22: it waits for no thread that only its parent has; the parent is served on."""
    host, keys = Host(), keys_of(2)
    with leaving_nothing(host), Cache(*host.open_core()) as cache:
        cache.save(keys, range(2)).wait_committed()
        calls = (
            lambda: cache.match(keys),
            lambda: cache.load(keys, range(2)),
            lambda: cache.save(keys, range(2)),
            lambda: cache.prefetch(keys),
            cache.statistics,
        )
        cache.save(keys_of(2, 1), range(2))  # perhaps under way as it forks
        if not (child := os.fork()):
            try:
                for call in calls:
                    with pytest.raises(PipelineClosedError, match="forked"):
                        call()
                cache.flush()
                cache.close()
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        assert 0 == os.waitpid(child, 0)[1]
        assert 2 == cache.load(keys, range(2, 4)).leading  # no save reads these
