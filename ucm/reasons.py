# SPDX-License-Identifier: Apache-2.0
"""
Why something ended as it did: the words of outcomes, reports and metrics.

The list is closed and frozen by a test, because each word becomes a label of a metric.
What differs from one time to the next, such as a number, an id or an exception's text,
goes to the log.
"""

import enum

__all__ = ["Reason"]


class Reason(enum.StrEnum):
    """Every word that a ``reason`` can be; whatever else there is to say is logged."""

    NONE = ""
    """A plain success."""
    QUEUE_TICKETS = "queue_tickets"
    """Refused: as many saves wait as may."""
    QUEUE_BYTES = "queue_bytes"
    """Refused: as many bytes wait as may."""
    CLOSED = "closed"
    """The runtime was closed before."""
    FAILED = "failed"
    """Refused: the runtime has failed before."""
    RUNTIME_FAILED = "runtime_failed"
    """The runtime failed meanwhile."""
    SHUTDOWN = "shutdown"
    """It still waited when the runtime closed."""
    LATE = "late"
    """The runtime closed while it was offered."""
    STORED = "stored"
    """The store has it already."""
    STORE_FULL = "store_full"
    """The store had no slot."""
    DEADLINE = "deadline"
    """Its time was up."""
    RECYCLED = "recycled"
    """The engine overwrote the blocks first."""
    UNFINISHED = "unfinished"
    """The forward pass ended before it wrote all rows."""
    UNSUBMITTED = "unsubmitted"
    """Its step ended before it was carried out."""
    OVERWRITTEN = "overwritten"
    """The engine may have overwritten the blocks before the copy's end was seen."""
    UNCONFIRMED = "unconfirmed"
    """The engine closed before it had seen the copy's end."""
    ROW_FAILED = "row_failed"
    """Given up because another load of its request failed."""
    UNASKED = "unasked"
    """A layer ran without having waited for its row."""
    STUCK = "stuck"
    """A device copy never ended."""
    CORRUPT = "corrupt"
    """A checksum does not hold."""
    EVICTED = "evicted"
    """The store no longer had it."""
    UNAVAILABLE = "unavailable"
    """The store did not answer."""
    SLOW = "slow"
    """The store answered too late."""
    DEVICE = "device"
    """The device refused or failed."""
    WORKER_DIED = "worker_died"
    """A copy thread has died."""
    OVER = "over"
    """It came to its end elsewhere first."""
    ERROR = "error"
    """Anything else; the log has the exception."""
