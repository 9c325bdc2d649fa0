# SPDX-License-Identifier: Apache-2.0
"""An adapter whose engine is served by another connector as well, over many seeds."""

from collections import Counter

import pytest

from tests.kit.served_engine import ServedEngine

_MET = (
    *("served", "failed", "shared bad", "aborted", "preempted"),
    *("in doubt", "bad", "dropped", "saved", "saved anew"),
)


def _seen(seeds: range, *, is_served: bool, is_disturbed: bool) -> Counter[str]:
    """Run engines; return what happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        engine = ServedEngine(seed, is_served=is_served, is_disturbed=is_disturbed)
        engine.run()
        seen.update(engine.seen)
    return seen


@pytest.mark.slow
def test_no_garbage_is_saved_and_nobody_is_stuck_whoever_shares_what_did_not_come() -> (
    None
):
    """Whatever fails, is shared, aborted or preempted in whatever order, what is saved is what its key
    says, all come to their end, and nothing is left; and the seeds meet all of that."""
    seen = _seen(range(500), is_served=True, is_disturbed=True)
    assert [] == [what for what in _MET if not seen[what]]


@pytest.mark.slow
@pytest.mark.parametrize("is_disturbed", [False, True])
def test_nothing_is_in_doubt_where_nobody_serves(is_disturbed: bool) -> None:
    """Nothing is ever bad either, and nothing dropped unless by those who are aborted or preempted."""
    seen = _seen(range(50), is_served=False, is_disturbed=is_disturbed)
    none = ("in doubt", "bad", "served", "saved anew")
    assert not any(seen[what] for what in none)
    assert seen["saved"]
    assert is_disturbed == bool(seen["dropped"])


def test_seed_repeats_a_run() -> None:
    """A number is enough to see a run again."""
    runs = [ServedEngine(7) for _ in range(2)]
    for run in runs:
        run.run()
    assert runs[0].seen == runs[1].seen
