# SPDX-License-Identifier: Apache-2.0
"""What decides in the scheduler's half, made for a setup."""

from ucm.integration.vllm.modes import Loads, Saves
from ucm.integration.vllm.setup import Setup
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.stores.abc import Store

__all__ = ["make_decider"]

_MAX_STEP_BLOCKS = 16384


def make_decider(setup: Setup, store: Store) -> SchedulerAdapter:
    """Return what decides; it finds and saves nothing before the ranks have agreed."""
    parks = setup.mode.loads is not Loads.LAYERWISE
    return SchedulerAdapter(
        setup.layout,
        store,
        keyspace_digest=b"",
        num_ranks=setup.topology.num_ranks,
        shards=setup.topology.shards,
        span_blocks=setup.span_blocks(
            group.block_bytes for group in setup.layout.groups
        ),
        max_step_blocks=_MAX_STEP_BLOCKS,
        full_hits=parks,
        saves=setup.mode.saves is not Saves.NOTHING,
        parks=parks,
        batches=1 + setup.topology.stages,
        limits=setup.save_limits(),
    )
