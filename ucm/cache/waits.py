# SPDX-License-Identifier: Apache-2.0
"""
How a thread waits for what a cache does.

Threading: any; only ``wait`` and ``wait_until`` block.
"""

from threading import TIMEOUT_MAX
from typing import TypeVar

from ucm.cache.calls import check_may_wait
from ucm.cache.core import Core
from ucm.cache.pending import Pending
from ucm.config import TimeoutConfig
from ucm.errors import DeviceTimeoutError, StoreUnavailableError

__all__ = ["late", "limits_of", "result_of", "wait", "wait_until"]

_T = TypeVar("_T")


def limits_of(timeout: TimeoutConfig) -> tuple[float, float]:
    """Return after how many seconds a save, and a load, has ended whatever happens."""
    stuck, shutdown = timeout.stuck, timeout.shutdown
    return 2 * timeout.save + stuck + shutdown, timeout.load + stuck + shutdown


def late() -> StoreUnavailableError:
    """Return what a store has that did not answer."""
    return StoreUnavailableError("the store did not answer in time")


def wait(
    core: Core, pending: Pending[_T], limit: float, error: Exception | None = None
) -> _T:
    """Block until something has ended, for *limit* seconds at most."""
    wait_until(core, pending, limit)
    return result_of(pending, limit, error)


def wait_until(core: Core, pending: Pending[_T], limit: float) -> None:
    """Block until something has ended, for *limit* seconds at most; tell nothing."""
    if not pending.is_done:
        check_may_wait()
    over = core.new_event()
    if pending.subscribe(over.set):
        try:
            over.wait(min(limit, TIMEOUT_MAX))  # what is more is an error there
        finally:
            pending.unsubscribe(over.set)


def result_of(pending: Pending[_T], limit: float, error: Exception | None = None) -> _T:
    """Return what something came to; raise *error* if it has not ended by *limit*."""
    if not pending.is_done:
        raise error or DeviceTimeoutError(f"no end after {limit} seconds")
    return pending.result()
