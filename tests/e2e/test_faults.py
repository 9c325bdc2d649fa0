# SPDX-License-Identifier: Apache-2.0
"""A busy engine whose tier stops to answer, once; each fault, many times, by the command."""

import pytest

from benchmarks.faults_side import suffer
from tests.e2e.engine import run_function
from tests.kit.wall_clock import COMPILER


@pytest.mark.skipif(not COMPILER, reason="no C compiler for the clock")
def test_engine_does_not_notice_a_tier_that_is_stopped() -> None:
    """R-52: all that an engine says over a server that is stopped, and goes on, is what it
    says without; metric and log name it; the calls under way end; and prompts hit again."""
    told = run_function(
        suffer, expected=None, steps=48, rounds=1, only="server stopped"
    )
    (fault,) = told["faults"]
    assert ("server stopped", 0) == (fault["fault"], fault["wrong"])
    assert fault["answers"] > 0
