# SPDX-License-Identifier: Apache-2.0
"""What a benchmark has measured is kept, and in which memory it measured."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import harness, report
from ucm.stores.slab._memory import mount_of


def measured(_: harness.Scale) -> Iterator[harness.Figure]:
    """Measure something."""
    yield harness.Figure.over("first", "it", "s", [1.0])


def fails(_: harness.Scale) -> Iterator[harness.Figure]:
    """Fail amid a case."""
    yield harness.Figure.over("second", "it", "s", [1.0])
    raise TypeError("an argument is missing")


def test_case_that_fails_leaves_what_was_measured_before_it(tmp_path: Path) -> None:
    """Twenty minutes of measuring went with the last case of a benchmark."""
    told = tmp_path / "told.json"
    with pytest.raises(TypeError, match="missing"):
        harness.main("two", {"a": measured, "b": fails}, ["--json", str(told)])
    results = json.loads(told.read_text())
    assert [("first", "it")] == [
        (each["case"], each["what"]) for each in results["figures"]
    ]
    page = report.pages({"stores": {**results, "benchmark": "stores"}})
    assert "**Not measured: b.**" in page["benchmarks.md"]


def test_run_that_was_cut_off_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """What was measured is not measured again, unless it is of another machine."""
    told = tmp_path / "told.json"
    command = ["--json", str(told)]
    with pytest.raises(TypeError):
        harness.main("two", {"a": measured, "b": fails}, command)
    cases = {"a": fails, "b": measured}
    harness.main("two", cases, [*command, "--go-on"])
    results = json.loads(told.read_text())
    assert (["a", "b"], []) == (results["cases"], results["left"])
    assert len(results["figures"]) == 2
    results["environment"]["commit"] = "another"
    told.write_text(json.dumps(results))
    with pytest.raises(SystemExit, match="another"):
        harness.main("two", cases, [*command, "--go-on"])


def test_huge_pages_are_had_by_a_mount_that_nobody_else_sees() -> None:
    """A benchmark begins anew there, once, and says so; where it cannot it says that."""
    before = mount_of(Path("/dev/shm")).options
    asked = "from benchmarks.shared_memory import enter; print(enter('huge'))"
    code = f"import sys; print(len(sys.argv)); {asked}"
    done = subprocess.run(
        [sys.executable, "-c", code, "an argument"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    starts, mounted = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1]
    assert {"2"} == set(starts)
    assert ("huge=" in mounted) == (len(starts) == 2 or "huge=" in before)
    assert before == mount_of(Path("/dev/shm")).options
