# SPDX-License-Identifier: Apache-2.0
"""How much a ticket carries. Pure."""

from typing import Final

import attrs

__all__ = ["LOAD_SPANS", "TicketBytes"]

LOAD_SPANS: Final = 4
"""So many times as much as a save's has a load's ticket on a CPU. It holds back no other, and
each ticket costs its way through six threads, which wait for the interpreter lock beside a
busy engine."""
_SAVE_OF_DEVICE: Final = 4
_LOAD_OF_DEVICE: Final = 8
"""An H100 loaded 2 GB beside an engine that steps in 76 ms by tickets of 64 MB, in 49 by
tickets of 128, as fast as the link is, and in as many by 256 (docs/gpu.md, "Fourth run")."""


@attrs.frozen
class TicketBytes:
    """
    What a ticket carries at most, where that is more than a block.

    Args:
        save: Of a save.
        load: Of a load; some times as much.
    """

    save: int
    load: int

    @classmethod
    def of(cls, span_bytes: int, *, is_synchronous: bool) -> "TicketBytes":
        """
        Return what tickets carry.

        Args:
            span_bytes: ``queue.span_bytes``.
            is_synchronous: Whether the device copies on our thread. An accelerator takes
                a millisecond for 64 MB, and our own way of a ticket takes as much again.
        """
        if is_synchronous:
            return cls(span_bytes, LOAD_SPANS * span_bytes)
        return cls(_SAVE_OF_DEVICE * span_bytes, _LOAD_OF_DEVICE * span_bytes)

    @classmethod
    def host(cls, span_bytes: int, *, is_synchronous: bool) -> "TicketBytes":
        """
        Return what tickets of the library carry; see ``of``.

        A host builds on what is there of a load that failed, which is told by whole tickets:
        small ones, where they cost little.
        """
        if is_synchronous:
            return cls(span_bytes, span_bytes)
        return cls.of(span_bytes, is_synchronous=False)
