# SPDX-License-Identifier: Apache-2.0
"""What a command has made for a while goes also where it is killed."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["tidily"]

_KILLS: Final = signal.SIGTERM, signal.SIGHUP


@contextlib.contextmanager
def tidily() -> Iterator[None]:
    """
    Have a kill, and a terminal that is closed, interrupt the body as Ctrl-C does, once.

    Behind the body, which has removed then what it made, the process dies of that signal. Around as
    little as possible: a signal amid an import is lost, or is an error there.
    """
    came: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in before:  # another one would break off what removes things
            signal.signal(each, signal.SIG_IGN)
        came.append(number)
        raise KeyboardInterrupt

    before = [
        each
        for each in _KILLS
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(each) is signal.SIG_DFL
    ]
    try:
        for each in before:
            signal.signal(each, interrupt)
        yield
    finally:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        for number in came:
            os.kill(os.getpid(), number)
