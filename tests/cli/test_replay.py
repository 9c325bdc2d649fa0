# SPDX-License-Identifier: Apache-2.0
"""``ucm replay`` says of a trace what the models say, or in one line why it cannot."""

import contextlib
import io
import json
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.store_kit import ask, tell
from ucm.cli.main import UNREADABLE, USAGE, main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace in which a prompt comes back behind one that fills a small store."""
    path = tmp_path / "some.jsonl"
    prompts = [[1, 2], [3, 4], [1, 2]]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at * 1000, "hash_ids": ids}) + "\n"
            for at, ids in enumerate(prompts)
        )
    )
    return path


def test_hits_grow_with_the_capacity(trace):
    """Two blocks keep the last prompt, four keep both: a third of the tokens is found."""
    sizes = ("--capacity", "2MiB", "--capacity", "4MiB", "--block-bytes", "1MiB")
    found = ask("replay", trace, *sizes, "--policy", "ours")
    assert [(2, 0.0), (4, 0.3333)] == [
        (row["capacity_blocks"], row["ratio"]) for row in found["rows"]
    ]
    assert (3, 4, "some") == (
        found["requests"],
        found["distinct_blocks"],
        found["trace"],
    )


def test_table_has_a_column_for_each_policy(trace):
    """People see each capacity with each policy beside the optimum."""
    code, said, _ = tell("replay", trace)
    assert 0 == code
    assert ["blocks", "of", "all", "ours", "lru", "optimal"] == next(
        line.split() for line in said.splitlines() if "optimal" in line
    )
    assert "33.33%" in said


def test_reading_is_shown_on_a_terminal(trace, monkeypatch):
    """A long trace is read for a minute before anything of it is replayed."""
    ours, theirs = pty.openpty()
    seen = bytearray()

    def look() -> None:
        with contextlib.suppress(OSError):  # its other end is closed
            while piece := os.read(ours, 65536):
                seen.extend(piece)

    looking = threading.Thread(target=look)
    looking.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        assert 0 == main(["replay", str(trace)])
    looking.join()
    os.close(ours)
    size = trace.stat().st_size
    assert f"{size}/{size} bytes" in seen.decode()
    assert b"replayed" in seen


def test_trace_that_would_not_fit_into_memory_is_refused(trace):
    """A bound, and the line at which it was passed."""
    code, _, complaint = tell("replay", trace, "--most-blocks", 3)
    assert UNREADABLE == code
    assert "line 2: over 3 blocks" in complaint


@pytest.mark.parametrize(
    "words",
    [
        ("--capacity", "1GiB"),
        ("--capacity", "1KiB", "--block-bytes", "2KiB"),
        ("--capacity", "much"),
        ("--policy", "best"),
        ("--block-tokens", "0"),
    ],
)
def test_call_that_is_wrong_is_one_line(trace, words):
    """A size that is none, a policy that nobody knows."""
    code, _, complaint = tell("replay", trace, *words)
    assert (USAGE, 1) == (code, complaint.count("\n"))


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_file_that_is_none_is_one_line(tmp_path, kind):
    """What cannot be read is told with exit code 3."""
    path = tmp_path if kind == "folder" else tmp_path / "no"
    code, _, complaint = tell("replay", path)
    assert (UNREADABLE, 1) == (code, complaint.count("\n"))


_LINES = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda stamp, ids: json.dumps({"timestamp": stamp, "hash_ids": ids}).encode(),
        st.one_of(st.integers(), st.floats(), st.none()),
        st.lists(
            st.one_of(st.integers(), st.floats(), st.lists(st.none())), max_size=4
        ),
    ),
    st.sampled_from(
        [b"[" * 9000, b"\x1b[2J", b"\0" * 50, b'{"hash_ids":' + b"9" * 5000]
    ),
)


@pytest.mark.slow
@given(st.lists(_LINES, max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_file_is_a_trace_or_one_line(tmp_path_factory, lines):
    """Whatever a file holds: a table, or exit code 3 and one line."""
    path = tmp_path_factory.mktemp("fuzz") / "trace"
    path.write_bytes(b"\n".join(lines))
    complaint = io.StringIO()
    with (
        contextlib.redirect_stderr(complaint),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main(["replay", str(path)])
    assert (code, complaint.getvalue().count("\n")) in {(0, 0), (UNREADABLE, 1)}
    assert "\x1b" not in complaint.getvalue()
