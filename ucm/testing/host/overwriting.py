# SPDX-License-Identifier: Apache-2.0
"""
What the engine overwrites by itself before a forward pass.

Some models have new blocks cleared, those excepted into which something is loaded; a
state that ends within a block is copied onto a block of its own.
"""

from collections import Counter

from ucm.layout import GroupKind, KVLayout
from ucm.testing.host.choices import Choices
from ucm.testing.host.requests import BlockCopy, SchedulerOutput
from ucm.testing.host.settings import HostSettings
from ucm.testing.host.tables import KVTables

__all__ = ["Overwriting"]


class Overwriting:
    """
    Decides what is cleared and copied onto.

    Args:
        layout: The engine's groups.
        tables: Know which blocks were handed out.
        choices: Decide whether a state is copied.
        settings: The engine.
        seen: Counts what happens.
    """

    def __init__(
        self,
        layout: KVLayout,
        tables: KVTables,
        choices: Choices,
        settings: HostSettings,
        seen: Counter[str],
    ) -> None:
        self._has_states = any(group.kind is GroupKind.STATE for group in layout.groups)
        self._tables = tables
        self._choices = choices
        self._settings = settings
        self._seen = seen

    def plan(
        self, output: SchedulerOutput, fresh: list[int], loading: set[int]
    ) -> list[int]:
        """
        Tell in *output* what is overwritten; return the other blocks handed out.

        Args:
            output: Of the step.
            fresh: Blocks that the step may overwrite.
            loading: Blocks that are loaded into behind it, and not cleared.
        """
        if self._settings.clears:
            cleared = [block for block in fresh if block not in loading]
            self._seen["cleared"] += len(cleared)
            output.new_block_ids_to_zero = cleared or None
            fresh = [block for block in fresh if block in loading]
        output.kv_cache_block_copies = self._copies() or None
        return fresh

    def _copies(self) -> list[BlockCopy]:
        """Let the engine keep a state within a block, in a block that nobody has."""
        pool = self._tables.pool
        if not self._has_states or not pool.num_free:
            return []
        if not self._choices.chance("copy", self._settings.odds.copy):
            return []
        self._seen["copied"] += 1
        block = pool.allocate(newest=self._tables.newest)
        pool.free(block)
        return [BlockCopy(block, block)]
