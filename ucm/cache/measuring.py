# SPDX-License-Identifier: Apache-2.0
"""
What there is to say about a cache in numbers.

Threading: all of it on any thread that may wait.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from ucm.cache.fetches import Fetches
from ucm.cache.pending import Pending
from ucm.cache.transfers import Statistics, Transfer
from ucm.errors import StoreUnavailableError, UCMError
from ucm.metrics import Counters, Snapshot
from ucm.pipeline.tickets import Direction
from ucm.stores.abc import StoreStats
from ucm.stores.opening import tell_store
from ucm.threads import Event
from ucm.tracing import Log, num_dropped

__all__ = ["Asked", "measured", "statistics_of"]

_WAIT_S: Final = 1.0
"""A scrape that takes longer is of no use."""


class Asked(Protocol):
    """The part of a cache that knows how it stands."""

    fetches: Fetches
    log: Log
    new_event: Callable[[], Event]

    def statistics(self) -> Pending[Statistics]:
        """Ask; raises PipelineClosedError once it is closed."""


def statistics_of(
    counters: Counters,
    store: StoreStats,
    *,
    open_transfers: int,
    waiting_parts: int,
    failure: str,
) -> Statistics:
    """Return how things stand, as a value for the host."""
    total = partial(counters.total, "ucm_settled_parts_total", outcome="committed")
    return Statistics(
        store=store,
        open_transfers=open_transfers,
        waiting_parts=waiting_parts,
        saved_blocks=int(total(direction=Direction.SAVE.value)),
        loaded_blocks=int(total(direction=Direction.LOAD.value)),
        failure=failure,
    )


def measured(
    counters: Counters,
    transfers: Sequence[Transfer],
    asked: Asked,
) -> Snapshot:
    """
    Bring gauges up to date, and return all metrics.

    Args:
        counters: Where they are.
        transfers: Those that are not over.
        asked: Who knows. Without an answer within a second it is not healthy, and what
            the store said before stands.
    """
    asked.fetches.refresh()
    is_load = [each.is_load for each in transfers]
    for direction in Direction:
        count = is_load.count(direction is Direction.LOAD)
        counters.set("ucm_open_tickets", count, direction=direction.value)
    is_healthy = False
    try:
        answer, answered = asked.statistics(), asked.new_event()
        if answer.subscribe(answered.set):
            answered.wait(_WAIT_S)
        answer.end(None, StoreUnavailableError("it did not answer a scrape"))
        tell_store(counters, answer.result().store)
        is_healthy = not answer.result().failure
    except UCMError:
        is_healthy = False
    counters.set("ucm_healthy", int(is_healthy))
    counters.reach("ucm_dropped_log_lines_total", num_dropped(asked.log))
    return counters.snapshot()
