# SPDX-License-Identifier: Apache-2.0
"""The command ``ucm`` within a test: its exit code and what it told."""

import contextlib
import io
import json
from typing import Any

import attrs

from ucm.cli.main import NOT_WELL, UNREADABLE, USAGE, main

__all__ = ["Called", "call"]


@attrs.frozen
class Called:
    """What came of a call."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the answer to ``--json``."""
        return json.loads(self.out)

    def is_tidy(self) -> bool:
        """Return whether it was done, or told in one printable line why not."""
        if self.code in (0, NOT_WELL):
            return not self.err
        line = self.err.removesuffix("\n")
        ends = self.code in (USAGE, UNREADABLE)
        return ends and line.startswith("ucm: ") and line.isprintable()


def call(*arguments: object) -> Called:
    """Run ``ucm`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(each) for each in arguments])
    return Called(code, out.getvalue(), err.getvalue())
