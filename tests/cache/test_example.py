# SPDX-License-Identifier: Apache-2.0
"""The page for authors of hosts: its example runs, and what it names is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ucm import errors
from ucm.cache import aio

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "embedded_host.py"


def run(example: Path, tmp_path: Path) -> str:
    """Run an example over a store of our own; return what it prints."""
    text = example.read_text(encoding="utf-8")
    assert 1 == text.count('"/dev/shm/ucm-')
    mine = tmp_path / example.name
    mine.write_text(text.replace('"/dev/shm/ucm-', f'"{tmp_path}/'), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(mine)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_host_written_from_the_page_alone_finds_what_it_stored(tmp_path: Path) -> None:
    """R-41: in at most 60 lines, with the right answers, and from a store that an
    earlier process has filled."""
    assert 60 >= len(EXAMPLE.read_text(encoding="utf-8").splitlines())
    loaded = []
    for _ in range(2):
        told = re.findall(r"(\d+) blocks, (\d+) loaded", run(EXAMPLE, tmp_path))
        assert 6 == len(told)
        loaded.append([(int(blocks), int(found)) for blocks, found in told])
    assert (5, 0) == loaded[0][0]
    assert all(blocks == found for blocks, found in loaded[1])


@pytest.mark.slow
def test_host_with_threads_finds_what_conversations_had_before(tmp_path: Path) -> None:
    """R-41: no loop, eight conversations that grow on any thread, each answer checked;
    a second process finds them whole."""
    example = EXAMPLE.with_name("threaded_host.py")
    assert 60 >= len(example.read_text(encoding="utf-8").splitlines())
    for turn in range(2):
        said = run(example, tmp_path)
        told = re.findall(r"user \d: (\d+) of (\d+) blocks loaded", said)
        assert 8 * 3 == len(told)
        if turn:
            assert all(loaded == blocks for loaded, blocks in told)


@pytest.mark.slow
def test_host_with_stages_of_its_own_keeps_out_what_they_refuse() -> None:
    """R-44: the example runs; the save that a stage fails is not found."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_stage.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [
        "committed, 2 found, 512 bytes counted",
        "failed, 2 found, 512 bytes counted",
    ]
    assert told == done.stdout.splitlines()


def test_page_lists_every_verb() -> None:
    """Nothing that a host may call has to be found in the code."""
    for cls in (aio.Cache, aio.Save):
        helpers = {"wait_save", "cancel"} if cls is aio.Cache else set()
        for name in set(vars(cls)) - helpers:
            if not name.startswith("_"):
                assert re.search(rf"\b{name}\b", PAGE), name


def test_page_names_errors_that_there_are() -> None:
    """What a host catches by name exists."""
    named = set(re.findall(r"`(\w+Error)`", PAGE))
    assert len(named) > 5
    assert set() == {name for name in named if not hasattr(errors, name)}
