# SPDX-License-Identifier: Apache-2.0
"""An engine's memory and a runtime over it, for benchmarks."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.harness import make_keys
from ucm.blocks import BlockKey, GroupId, KeySpace, Owner, PackedKey, RowId
from ucm.config import LogConfig, UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.layout import KVLayout
from ucm.metrics import Counters
from ucm.prefixes import keyspace_of, paged_layout
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import Log, close_log, open_log

__all__ = [
    "GROUP",
    "ROWS",
    "ROW_IDS",
    "log_in",
    "make_keyspace",
    "make_memory",
    "make_order",
    "running",
]

ROWS = 32
GROUP = GroupId(0)
ROW_IDS = tuple(RowId(row) for row in range(ROWS))


def make_memory(
    num_blocks: int,
    page_bytes: int,
    *,
    block_contiguous: bool = False,
    device: str = "cpu",
) -> tuple[KVLayout, dict[str, torch.Tensor]]:
    """Return a layout and touched memory for it on a device, all rows in one tensor."""
    layers = [f"layer.{row}" for row in range(ROWS)]
    layout = paged_layout(dict.fromkeys(layers, page_bytes), block_tokens=16)
    nbytes = num_blocks * ROWS * page_bytes
    flat = torch.ones(nbytes, dtype=torch.uint8, device=device)
    if block_contiguous:
        pages = flat.view(num_blocks, ROWS, page_bytes).unbind(1)
    else:
        pages = flat.view(ROWS, num_blocks, page_bytes).unbind(0)
    return layout, dict(zip(layers, pages, strict=True))


def make_keyspace(layout: KVLayout) -> KeySpace:
    """Return a key space for blocks of a layout."""
    return keyspace_of(
        layout, model="m", weights="w", kv_dtype="auto", engine="benchmark"
    )


def make_order(
    transfer_id: int,
    kind: TransferKind,
    request: str,
    block_ids: Sequence[int],
    keys: Sequence[PackedKey] | int,
) -> SpanOrder:
    """
    Return an order for all rows; *keys* may be the first number of new ones.

    Its blocks count as used now: those of one batch would else have one moment, the batch's, and
    none of them would make room for another.
    """
    if isinstance(keys, int):
        keys = make_keys(keys, len(block_ids))
    return SpanOrder(
        transfer_id=transfer_id,
        kind=kind,
        owners=(Owner(request, transfer_id, len(block_ids), time.monotonic_ns()),),
        group_id=GROUP,
        block_ids=tuple(block_ids),
        hashes=b"".join(BlockKey.unpack(key).block_hash for key in keys),
    )


@contextlib.contextmanager
def log_in(directory: Path) -> Iterator[Log]:
    """Yield a log as a server has it, into a file that is closed at the end."""
    with (directory / "log.jsonl").open("a", buffering=1) as file:
        with contextlib.redirect_stderr(file):
            log = open_log(LogConfig(), "benchmark")
        yield log
        close_log(log)


@contextlib.contextmanager
def running(
    store: Store,
    device: CPUDevice,
    layout: KVLayout,
    logs: Path,
    *,
    config: UCMConfig | None = None,
    threads: Threads = SYSTEM,
) -> Iterator[Runtime]:
    """Run a runtime that logs to *logs*; closes its parts."""
    with log_in(logs) as log:
        runtime = Runtime(
            store,
            device,
            layout=layout,
            config=config or UCMConfig(),
            counters=Counters(),
            log=log,
            threads=threads,
        )
        runtime.start()
        try:
            yield runtime
        finally:
            runtime.close()
