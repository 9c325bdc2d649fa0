# SPDX-License-Identifier: Apache-2.0
"""Layouts, and the fake host around the small connector, right or spoilt."""

from collections import Counter

import numpy as np

from tests.testing.tiny_connector import TinyScheduler, TinyWorker
from ucm.blocks import GroupId, RowId
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.testing.host import FakeHost, HostSettings, Odds, SeededChoices

ALWAYS = {
    "aborted_loading",
    "aborted_preempted",
    "aborted_running",
    "aborted_waiting",
    "bound_first",
    "checked_blocks",
    "declined",
    "deferred",
    "empty_step",
    "finished",
    "free_now",
    "freed_later",
    "full_hit",
    "held_back",
    "id_reused",
    "load",
    "poisoned",
    "preempted",
    "preempted_for_room",
    "received_late",
    "repeated",
    "results_first",
    "resumed",
    "step",
}
BUSY = Odds(abort=0.05, preempt=0.05, resume=0.8)
PAGE_BYTES = 64


def make_layout(
    *groups: tuple[int, int | GroupKind | None],
    rows: int = 2,
    hash_block_tokens: int = 4,
) -> KVLayout:
    """
    Return groups over the same rows, given as (block tokens, reach).

    A reach is a window, None for the whole prefix, or ``GroupKind.STATE``.
    """
    return KVLayout(
        groups=tuple(
            GroupLayout(
                group_id=GroupId(at),
                kind=GroupKind.WINDOW
                if isinstance(reach, int)
                else reach or GroupKind.FULL,
                block_tokens=size,
                window_tokens=reach if isinstance(reach, int) else None,
                rows=tuple(
                    RowLayout(
                        row_id=RowId(row),
                        page_bytes=PAGE_BYTES,
                        layer_names=(f"layer.{at}.{row}",),
                    )
                    for row in range(rows)
                ),
            )
            for at, (size, reach) in enumerate(groups)
        ),
        hash_block_tokens=hash_block_tokens,
        engine_tag="test",
    )


ONE_FULL = make_layout((4, None))
HYBRID = make_layout((8, None), (4, 10), (8, 5))
RECURRENT = make_layout((8, GroupKind.STATE), (8, GroupKind.STATE), (4, None))


def tiny_host(
    layout: KVLayout,
    scheduler_type: type = TinyScheduler,
    worker_type: type = TinyWorker,
    *,
    seed: int = 1,
    num_ranks: int = 2,
    num_blocks: int = 40,
    settings: HostSettings | None = None,
    in_step: bool = False,
) -> FakeHost:
    """Return a host around a small connector, or around one that was spoilt."""
    store: dict = {}
    memories = [
        np.zeros((layout.num_rows, num_blocks, PAGE_BYTES), dtype=np.uint8)
        for _ in range(num_ranks)
    ]
    scheduler = scheduler_type(layout, num_ranks, store, in_step=in_step)
    return FakeHost(
        scheduler=scheduler,
        workers=[
            worker_type(rank, layout, memory, store)
            for rank, memory in enumerate(memories)
        ],
        memories=memories,
        layout=layout,
        choices=SeededChoices(seed),
        settings=settings,
        containers=scheduler.counts,
    )


def run(host: FakeHost, acts: int) -> None:
    """Let a host act and come to its end."""
    for _ in range(acts):
        host.act()
    host.drain()
    assert not any(host.audit().values())


def missing(seen: Counter[str], kinds: set[str]) -> set[str]:
    """Return the kinds that did not happen."""
    return {kind for kind in kinds if not seen[kind]}
