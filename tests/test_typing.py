# SPDX-License-Identifier: Apache-2.0
"""What the types let pass, and what they do not: mypy over small programs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "typing"
NEGATIVE = sorted((PROGRAMS / "negative").glob("*.py"))
OK = sorted((PROGRAMS / "ok").glob("*.py"))

pytestmark = pytest.mark.slow


def expected_errors(path: Path) -> set[tuple[str, int, str]]:
    """Return file, line and code of each error that a program announces."""
    marked = re.compile(r"# error: ([\w-]+)$")
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        (path.name, number, match[1])
        for number, line in enumerate(lines, start=1)
        if (match := marked.search(line))
    }


@pytest.fixture(scope="module")
def found() -> set[tuple[str, int, str]]:
    """Return file, line and code of each error of mypy over all programs together."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context"),
            *map(str, [*OK, *NEGATIVE]),
        ],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    error = re.compile(r"^(.+?):(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
    return {
        (Path(name).name, int(line), code)
        for name, line, code in error.findall(done.stdout)
    }


class TestTypes:
    @pytest.mark.parametrize("path", OK, ids=lambda path: path.stem)
    def test_right_program_passes(self, path, found):
        """What users and stages are meant to write has no error."""
        assert set() == {error for error in found if error[0] == path.name}

    @pytest.mark.parametrize("path", NEGATIVE, ids=lambda path: path.stem)
    def test_wrong_program_fails_where_it_says(self, path, found):
        """Each announced mistake, and nothing else, is an error: a chain that leaves
        out a stage, an id of another kind, a changed value."""
        expected = expected_errors(path)
        assert expected
        assert expected == {error for error in found if error[0] == path.name}

    def test_nothing_else_has_errors(self, found):
        """All errors are in programs that announce them."""
        assert {error[0] for error in found} <= {path.name for path in NEGATIVE}
