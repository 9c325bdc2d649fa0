# SPDX-License-Identifier: Apache-2.0
"""``ucm bench`` measures, leaves nothing behind, and keeps away from stores."""

import os
from pathlib import Path

import pytest

from tests.cli.store_kit import ask, snapshot, tell
from tests.stores.slab_kit import open_slab
from ucm.cli import measuring
from ucm.cli.main import UNREADABLE, USAGE
from ucm.testing.store_blocks import make_keys, save

QUICK = ("--size", "1MiB", "--block", "8KiB", "--seconds", "0.01")


@pytest.fixture
def place(memory_path: Path) -> Path:
    """Return an empty directory in memory."""
    memory_path.mkdir()
    return memory_path


def test_store_is_measured_where_a_path_is_memory(place):
    """Copies, saves, loads and look-ups, each with rate and latency; nothing stays."""
    (answer,) = ask("bench", place, *QUICK)["paths"]
    assert "memory" == answer["kind"]
    assert ["copy", "save", "load", "look-up"] == [
        row["what"] for row in answer["rows"]
    ]
    for row in answer["rows"]:
        assert 0 < row["median_s"] <= row["slowest_s"]
        assert 0 < row["operations_per_s"]
    copied, saved = answer["rows"][:2]
    assert 8192 * saved["operations_per_s"] == pytest.approx(saved["bytes_per_s"])
    assert 0 < copied["bytes_per_s"]
    assert [] == list(place.iterdir())


@pytest.mark.slow
def test_disk_is_measured_at_several_depths(tmp_path):
    """A file is written, and read at random by more and more at a time."""
    plan = measuring.Plan(8192, 1 << 20, 0.01)
    with measuring.workplace(tmp_path, plan.size) as folder:
        rows, _ = measuring.measure_disk(folder, plan)
        assert plan.size == (folder / "file").stat().st_size
    assert [1, 1, 4, 16, 32] == [row.depth for row in rows]
    assert all(row.bytes_per_s > 0 for row in rows)
    assert [] == list(tmp_path.iterdir())


def test_store_that_is_there_is_not_touched(place):
    """A directory that is a store is refused, and stays as it was."""
    with open_slab(place) as store:
        save(store, make_keys(2))
    before = snapshot(place)
    code, _, complaint = tell("bench", place, *QUICK)
    assert UNREADABLE == code
    assert "is a store" in complaint
    assert before == snapshot(place)


@pytest.mark.parametrize("size", ["1TiB", "4000TiB"])
def test_too_little_room_is_told_before_anything_is_written(place, size):
    """Both numbers, and nothing made."""
    code, _, complaint = tell("bench", place, "--size", size)
    assert UNREADABLE == code
    assert "bytes left" in complaint
    assert [] == list(place.iterdir())


def test_file_system_without_a_limit_has_room(place, monkeypatch):
    """A tmpfs of ``size=0`` tells of zeros, and is not full."""
    about = list(os.statvfs(place))
    about[2:5] = 0, 0, 0  # all blocks, free ones, and those free for everybody
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(about))
    with measuring.workplace(place, 1) as folder:
        assert place == folder.parent


def test_room_is_given_back_when_measuring_fails(place):
    """Whatever happens in it, the directory that was made goes."""

    def fail() -> None:
        with measuring.workplace(place, 1) as folder:
            (folder / "file").write_text("some")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [] == list(place.iterdir())


@pytest.mark.parametrize("kind", ["missing", "file", "control"])
def test_path_that_is_none_is_one_line(tmp_path, kind):
    """A directory that is not there is not made."""
    path = {
        "missing": tmp_path / "no",
        "file": tmp_path / "f",
        "control": "/\x1b[2J\n",
    }[kind]
    (tmp_path / "f").write_text("")
    code, _, complaint = tell("bench", path)
    assert (UNREADABLE, 2) == (code, complaint.count("\n"))
    assert "\x1b" not in complaint


@pytest.mark.parametrize(
    "words",
    [("--block", "0"), ("--size", "much"), ("--seconds", "0"), ("--seconds", "nan")],
)
def test_call_that_is_wrong_is_one_line(words):
    """Sizes are sizes, and each row takes a while."""
    code, _, complaint = tell("bench", *words)
    assert (USAGE, 1) == (code, complaint.count("\n"))
