# SPDX-License-Identifier: Apache-2.0
"""What a request's life costs the scheduler's thread of an engine that is full."""

from pathlib import Path

from benchmarks.lives_side import SCHEDULER, WARM, Engine, make_setup


def test_life_of_a_request_is_so_many_calls(tmp_path: Path) -> None:
    """R-18: look-up, load, plans and end of a request among 256 that decode: calls of functions, whose
    number depends on no machine; each is cold between two steps, and costs a microsecond."""
    engine = Engine(make_setup(tmp_path / "slab"))
    engine.run(WARM)
    before, engine.meter.counts = engine.lives, True
    engine.run(20)
    engine.worker.close()
    engine.half.close()
    lives = engine.lives - before
    assert 60 == lives
    calls = sum(engine.meter.calls[part] for part in SCHEDULER) / lives
    assert calls <= 185
