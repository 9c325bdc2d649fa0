# SPDX-License-Identifier: Apache-2.0
"""Processes that die between any two calls to the system: what the next one finds."""

import json
import subprocess
import sys
import tempfile

import pytest

from tests.backends.disk_child import ROOT

LIMIT_S = 400


def ends(told: list[str]) -> tuple[set[int], set[int]]:
    """Return the blocks that were put for all that was told, and those that were deleted."""
    put, deleted = set[int](), set[int]()
    for line in told:
        word, at = line.split()
        (put.add if word == "put" else put.discard)(int(at))
        (deleted.add if word == "deleted" else deleted.discard)(int(at))
    return put, deleted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "files"])
def test_death_before_any_call_costs_what_was_not_told_alone(kind: str) -> None:
    """R-52: what was told as put is there, what was told as deleted is not, what is found is whole,
    nothing is left, and each block can be put; here at each ninth call."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        command = [sys.executable, "-m", "tests.backends.dying_child", kind, home, "9"]
        child = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    deaths = [json.loads(line) for line in child.stdout.splitlines()]
    for number, told, found, left in deaths:
        put, deleted = ends(told)
        there = {at for at, is_there in enumerate(found["there"]) if is_there}
        assert (set(), set()) == (put - there, deleted & there), number
        assert (found["there"], 0) == (found["sound"], left), number
        assert all(found["put"]), number
    assert len(deaths) > 5
