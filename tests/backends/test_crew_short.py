# SPDX-License-Identifier: Apache-2.0
"""A crew for which the system has no thread at all."""

import pytest

from tests.clocks import no_threads
from ucm.backends._crew import Crew


@pytest.mark.asyncio
async def test_call_without_a_thread_leaves_nothing_to_those_that_come() -> None:
    """X-14: the first thread worked for whoever had gone, and wrote to memory that was another's
    by then; jobs that nobody had begun counted as hung for ever, and nothing was begun any more."""
    crew, late, results = Crew(2, "crew"), list[int](), [0]
    with no_threads("crew"):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await crew.run([1], late.append, [None])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                crew.start(lambda: late.append(2))
    await crew.run([3], int, results, leave=True)
    assert [3] == results
    assert await crew.aclose()
    assert [] == late
