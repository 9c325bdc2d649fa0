# SPDX-License-Identifier: Apache-2.0
"""
Kill -9 before each line of what a process does with a slab, one line after the other.

Those who are killed fork off a process that has little in it: a fork of one that has run
tests of everything costs ten times what its child does. Run by ``Killer`` as
``python -m tests.stores.slab_killer``; speaks in lines.
"""

import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy.ma  # noqa: F401 - or numpy does so at its first use, in each child

ROOT = Path(__file__).resolve().parents[2]
LIVES = (
    *("_arena.py", "_classes.py", "_creation.py", "_files.py", "_keyspaces.py"),
    *("_locks.py", "_opened.py", "_populate.py", "_settle.py"),
)
ONLY_LOOK = {
    *("_check_owner", "_find_loss", "check"),
    *("fit", "is_in_memory", "mount_of", "require_memory", "open"),
}


class Killer:
    """Runs what is to be killed, in one process after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.slab_killer"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def killed_at(
        self, line: int, action: Callable[..., object], *arguments: object
    ) -> bool:
        """
        Run *action* in a process that is killed before the *line*-th line it executes.

        Counted are lines of all that makes, joins and leaves a slab, without what only
        looks: a death there is one before its caller's next line.

        Args:
            line: From one on.
            action: A function of a module.
            arguments: What JSON can carry.

        Returns:
            Whether it was killed; it came to its end otherwise.
        """
        called = (line, action.__module__, action.__name__, arguments)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps(called)}\n")
        stdin.flush()
        status = int(stdout.readline())
        assert status in {0, signal.SIGKILL}
        return status != 0


@functools.cache
def _is_counted(code: CodeType) -> bool:
    return code.co_filename.endswith(LIVES) and code.co_name not in ONLY_LOOK


def _die_at(line: int) -> None:
    """Have this process killed before a line."""
    executed = 0

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal executed
        if event == "line":
            executed += 1
            if executed == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return on_line if _is_counted(frame.f_code) else None

    sys.settrace(on_call)


def _main() -> None:
    for asked in sys.stdin:
        line, module, name, arguments = json.loads(asked)
        action = getattr(importlib.import_module(module), name)
        gc.freeze()  # or a collection in a child copies what it shares
        if not (child := os.fork()):
            status = 1
            try:
                _die_at(line)
                action(*arguments)
                status = 0
            finally:
                sys.settrace(None)
                if status:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
