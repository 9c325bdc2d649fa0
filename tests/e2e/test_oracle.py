# SPDX-License-Identifier: Apache-2.0
"""Random engines with a neighbour and adapters, once, briefly; many of them by the command."""

from rich.console import Console

from benchmarks.oracle import run

SEED = 189
"""Two engines after each other, a third beside, three adapters, a disk, faults, and full attention."""


def test_each_block_and_each_answer_of_a_random_engine_is_right() -> None:
    """R-05: what three engines commit, load, use and say over one slab is what an engine
    without connector computes, and nothing is left of them."""
    (told,) = run([SEED], 4.0, Console(quiet=True))
    assert [] == told["problems"]
    assert ("stays", 3) == (told["setting"]["neighbour"], told["setting"]["adapters"])
    assert 0 < told["told"]["answers"]
    assert 0 < told["compared"]["verified"]
