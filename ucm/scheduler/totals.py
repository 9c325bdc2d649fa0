# SPDX-License-Identifier: Apache-2.0
"""What the scheduler counts, for a block once however many ranks have a part of it."""

from collections import Counter
from collections.abc import Mapping

import attrs
import msgspec

__all__ = ["LoadTotals", "Totals"]


@attrs.define
class LoadTotals:
    """
    What became of loads since the start, once for all ranks.

    Args:
        tokens: Tokens that requests went on with.
        blocks: The engine's blocks of these.
        failed: Requests whose load ended in a recompute, by the reason told first.
    """

    tokens: int = 0
    blocks: int = 0
    failed: Counter[str] = attrs.Factory(Counter)


class Totals(msgspec.Struct, frozen=True):
    """
    What was counted since the start, once for all ranks; compared in each step.

    Args:
        saved_blocks: Became visible with their last part.
        dropped_blocks: Complete blocks that nobody took in time; some may be stored
            already.
        loaded_blocks: Blocks of the engine that were loaded for requests that went on.
        loaded_tokens: Tokens of these requests that were loaded.
        failed_loads: Requests whose load ended in a recompute, by reason.
        held_blocks: Of the engine, that some save reads now.
        quarantined_holds: Given up on some rank.
        stray_reports: Reports of tickets that are not open.
        cut_plans: Plans that left something to the next one.
    """

    saved_blocks: int
    dropped_blocks: int
    loaded_blocks: int
    loaded_tokens: int
    failed_loads: Mapping[str, int]
    held_blocks: int
    quarantined_holds: int
    stray_reports: int
    cut_plans: int
