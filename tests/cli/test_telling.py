# SPDX-License-Identifier: Apache-2.0
"""How far long work is, where somebody looks at it."""

import io
import os
import pty
import sys

import pytest

from ucm.cli.telling import progress


@pytest.mark.parametrize(
    ("is_bytes", "told"), [(True, "1.0/2.0 KiB"), (False, "1024/2048")]
)
def test_work_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_bytes: bool, told: str
) -> None:
    """What is done of what there is, with its unit."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        with progress("read", 2048, is_bytes=is_bytes) as tell:
            tell(1024)
            seen = ""
            for _ in range(100):  # it is drawn again ten times a second
                if told in seen:
                    break
                seen += os.read(ours, 65536).decode()
    os.close(ours)
    assert "read" in seen
    assert told in seen


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is piped on, or goes to a log, stays clean."""
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with progress("read", 2048) as tell:
        tell(1024)
    assert "" == told.getvalue()
