# SPDX-License-Identifier: Apache-2.0
"""Whoever dies among engine, agent and a tier's server, a few times; many by the command."""

from benchmarks.kills import run


def test_whoever_is_killed_no_answer_is_wrong_and_nothing_is_left() -> None:
    """R-53, R-55, R-63, X-05: under load a tier's server, the agent and the engine are killed
    and come back: each answer is the model's own and comes in time, prompts hit again behind
    each of them, and no hold, want, slot, socket or process stays."""
    told = run(("agent", "server", "engine", "agent"), seed=7)
    assert [] == told.problems
    assert 4 == told.kills.total()
    assert told.hit_tokens["slab"] > 0
