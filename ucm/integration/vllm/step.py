# SPDX-License-Identifier: Apache-2.0
"""How far one rank is with a plan."""

import sys
from collections.abc import Sequence

import attrs

from ucm.scheduler.messages import SpanOrder, StepPlan

__all__ = ["Step"]


@attrs.define
class Step:
    """
    A plan, and what became of it so far.

    Args:
        plan: What is ordered.
        metadata: In what it came.
        saves: Those of the plan that are this rank's.
        is_bound: The engine is between binding and clearing it.
        is_over: Results were asked for: the forward pass has run, drafts may be to come.
        handled: The error within whose handling the step began, which is not its own: an
            application may serve within an ``except`` block.
        has_raised: A hook was called while another error was handled.
        has_loaded: The loads were submitted.
        has_begun_rows: The saves go row by row, and have begun to.
        has_saved: The saves were submitted.
    """

    plan: StepPlan
    metadata: object = None
    saves: Sequence[SpanOrder] = ()
    is_bound: bool = False
    is_over: bool = False
    handled: BaseException | None = attrs.Factory(lambda: sys.exc_info()[1])
    has_raised: bool = False
    has_loaded: bool = False
    has_begun_rows: bool = False
    has_saved: bool = False

    @property
    def can_save(self) -> bool:
        """Whether what the saves read is known to be written."""
        return self.is_over and not self.has_raised

    def note_error(self) -> bool:
        """Return whether the forward pass has raised; the engine tells no other way."""
        error = sys.exc_info()[1]
        self.has_raised |= error is not None and error is not self.handled
        return self.has_raised
