# SPDX-License-Identifier: Apache-2.0
"""
Calls that a host has made when something is over, as a rule on threads of ours.

Each stands alone: what it raises goes where what ends a thread goes, to
``threading.excepthook``, and neither ends the thread nor costs anybody else a wake-up.

Threading: any thread. One that makes such a call must not wait for us meanwhile: it may be
the one that brings what is waited for.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from ucm.errors import PipelineError

__all__ = ["alone", "check_may_wait"]

_HERE: Final = threading.local()


def alone(call: Callable[[], None]) -> Callable[[], None]:
    """Return what makes a host's call, and raises nothing but Ctrl-C on the main thread."""
    return partial(_make, call)


def check_may_wait() -> None:
    """
    Refuse to wait within such a call.

    Raises:
        PipelineError: The calling thread makes one.
    """
    if getattr(_HERE, "is_calling", False):
        raise PipelineError(
            "what when_over calls may not block: as a rule it is called on the thread "
            "that brings the ends of all saves and loads; have another thread do it"
        )


def _make(call: Callable[[], None]) -> None:
    within, _HERE.is_calling = getattr(_HERE, "is_calling", False), True
    try:
        call()
    except BaseException as exc:  # a host's, which ends no thread of ours
        thread = threading.current_thread()
        if isinstance(exc, KeyboardInterrupt) and thread is threading.main_thread():
            raise  # meant for the host, not for its call
        told = (type(exc), exc, exc.__traceback__, thread)
        threading.excepthook(threading.ExceptHookArgs(told))
    finally:
        _HERE.is_calling = within
