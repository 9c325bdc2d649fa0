# SPDX-License-Identifier: Apache-2.0
"""A package outside of the tree has a store, a backend and a device by entry points."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "third_party_store"


def run(*command: str, **env: str) -> str:
    """Run a module of Python, and return what it said, also where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert 0 == done.returncode, said[-8000:]
    return said


@pytest.mark.slow
def test_package_outside_of_the_tree_passes_the_contracts(tmp_path: Path) -> None:
    """It is installed as anybody's, found by its names, and runs its own tests."""
    pytest.importorskip("torch")  # of which its device's memory is
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(PACKAGE, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run("pip", "install", *options, "--target", str(target), str(source))
    shutil.rmtree(source / "ucm_example")  # what runs is what was installed
    said = run(
        *("pytest", str(source / "tests"), "-q", "-p", "no:cacheprovider"),
        *("--basetemp", str(tmp_path / "t")),  # which no other run clears away
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(source)),
        PYTHONPATH=os.pathsep.join([str(target), str(ROOT)]),
    )
    assert " passed" in said
    assert 90 < int(said.split(" passed")[0].split()[-1])
