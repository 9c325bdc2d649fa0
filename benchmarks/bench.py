# SPDX-License-Identifier: Apache-2.0
"""What moves bytes in the benchmarks of the pipeline, and what it is held against."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import make_keys
from benchmarks.memory import GROUP, ROW_IDS, ROWS, make_memory, make_order, running
from benchmarks.step import DIGEST
from benchmarks.stores import MEMORY, await_memory, mapped
from ucm.blocks import PackedKey
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import OutcomeKind
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore

__all__ = ["CALL_SPANS", "KB", "POOL_SPANS", "SPAN_BYTES", "Bench", "on_slab"]

SPAN_BYTES = 8 << 20
POOL_SPANS, CALL_SPANS, CALL_REQUESTS = 64, 16, 4
KB = 1 << 10

_Bytes = npt.NDArray[np.uint8]


class Bench:
    """
    An engine's memory, a store, and what moves bytes between them.

    Args:
        store: Where to save; closed with the runtime.
        page_bytes: Of a block in each row.
        home: Directory in memory, of the runtime's log and of what is copied into.
        block_contiguous: Whether all pages of a block lie together.
        span_bytes: Of one ticket.
        num_spans: In the engine's memory.
        config: Of the runtime.
    """

    def __init__(
        self,
        store: Store,
        page_bytes: int,
        home: Path,
        *,
        block_contiguous: bool = False,
        span_bytes: int = SPAN_BYTES,
        num_spans: int = POOL_SPANS,
        config: UCMConfig | None = None,
    ) -> None:
        self.block_bytes = ROWS * page_bytes
        self.span_bytes = span_bytes
        self.span_blocks = span_bytes // self.block_bytes
        num_blocks = num_spans * self.span_blocks
        self._layout, caches = make_memory(
            num_blocks, page_bytes, block_contiguous=block_contiguous
        )
        whole = next(iter(caches.values())).untyped_storage()
        self._source = torch.empty(0, dtype=torch.uint8).set_(whole).numpy()
        self.device = CPUDevice(num_blocks)
        self.device.register(self._layout, caches)
        ids = np.random.default_rng(0).permutation(num_blocks)
        self._spans: list[list[int]] = ids.reshape(num_spans, self.span_blocks).tolist()
        self._target: _Bytes | None = None
        self.store = store
        self._home = home
        self._config = config
        self._contents = itertools.count()
        self._ids = itertools.count(1)
        self._saved: list[list[PackedKey]] = []
        self._runtime: Runtime | None = None
        self._threads = ThreadPoolExecutor(2)

    @contextlib.contextmanager
    def running(self) -> Iterator["Bench"]:
        """Run the runtime; the store is closed with it."""
        with (
            self._threads,
            running(
                self.store, self.device, self._layout, self._home, config=self._config
            ) as self._runtime,
        ):
            await_memory(self.store)
            yield self

    def new_keys(self) -> list[PackedKey]:
        """Return the keys of a span that was never saved."""
        return make_keys(next(self._contents) * self.span_blocks, self.span_blocks)

    def blocks(self, number: int) -> list[int]:
        """Return the engine's blocks of a span."""
        return self._spans[number % len(self._spans)]

    def orders(
        self,
        kind: TransferKind,
        keys: Sequence[list[PackedKey]],
        requests: int,
        *,
        first: int = 0,
    ) -> list[SpanOrder]:
        """Return an order per span, dealt out to so many requests."""
        return [
            make_order(
                next(self._ids),
                kind,
                f"request-{at % requests}",
                self.blocks(first + at),
                span_keys,
            )
            for at, span_keys in enumerate(keys)
        ]

    @property
    def runtime(self) -> Runtime:
        """What moves bytes."""
        if self._runtime is None:
            raise AssertionError("the runtime does not run")
        return self._runtime

    def submit(self, orders: list[SpanOrder]) -> None:
        """Ask for tickets."""
        self.runtime.submit(DIGEST, orders, self.device.lease(None))

    def taken_in(self) -> None:
        """Wait until the loop has made tickets of all that was submitted."""
        self.runtime.flush(0.0)

    def settle(self, pause: float = 0.0) -> list[float]:
        """
        Wait until all is saved or loaded; return how long each ticket's blocks were held.

        Args:
            pause: Seconds between looks, as an engine has its steps; 0 wakes with each
                notice.
        """
        held = []
        while self.runtime.num_open:
            if pause:
                time.sleep(pause)
            else:
                self.runtime.wait_for_notice(1.0)
            for notice in self.runtime.poll():
                ticket, outcome = notice.ticket, notice.outcome
                if notice.kind is NoticeKind.RELEASED:
                    held.append(ticket.released_at - ticket.accepted_at)
                if outcome and outcome.kind is not OutcomeKind.COMMITTED:
                    raise AssertionError(f"{outcome} of {ticket.transfer_id}")
        return held

    def carry_out(self, orders: list[SpanOrder], pause: float = 0.0) -> list[float]:
        """Submit and wait for the end; see ``settle``."""
        self.submit(orders)
        return self.settle(pause)

    def gather(self, num_spans: int, *, first: int = 0) -> float:
        """Return the seconds that it takes to gather so many spans; keeps them."""
        keys = [key for _ in range(num_spans) for key in self.new_keys()]
        blocks = [block for at in range(num_spans) for block in self.blocks(first + at)]
        with self.store.reserve(keys, self.block_bytes) as lease:
            start = time.perf_counter()
            self.device.gather(GROUP, ROW_IDS, blocks, lease.slots)
            spent = time.perf_counter() - start
            lease.seal(0, len(keys))
            lease.commit()  # the next lease gets other slots, which are as cold
        return spent

    # Sides; each moves the same bytes.

    def save(self, _: int) -> Callable[[], object]:
        """Save through the pipeline."""
        keys = self._keys_to_save()
        orders = self.orders(TransferKind.SAVE, keys, CALL_REQUESTS)
        return lambda: self.carry_out(orders)

    def load(self, _: int) -> Callable[[], object]:
        """Load through the pipeline what was saved last."""
        orders = self.orders(TransferKind.LOAD, self._saved, CALL_REQUESTS)
        return lambda: self.carry_out(orders)

    def loop_save(self, _: int) -> Callable[[], object]:
        """Save without a runtime, on two threads."""
        keys = self._keys_to_save()
        return lambda: self._on_two_threads(self.save_span, keys)

    def save_span(self, number: int, keys: list[PackedKey]) -> None:
        """Save one span on this thread."""
        with self.store.reserve(keys, self.block_bytes) as lease:
            self.device.gather(GROUP, ROW_IDS, self.blocks(number), lease.slots)
            lease.seal(0, len(keys))
            if lease.commit() != len(keys):
                raise AssertionError("the keys were new")

    def loop_load(self, _: int) -> Callable[[], object]:
        """Load without a runtime what was saved last, on two threads."""
        saved = self._saved
        return lambda: self._on_two_threads(self.load_span, saved)

    def load_span(self, number: int, keys: list[PackedKey]) -> None:
        """Load one span on this thread."""
        with self.store.read(keys) as lease:
            lease.verify(0, len(keys))
            self.device.scatter(GROUP, ROW_IDS, lease.slots, self.blocks(number))
            lease.recheck()

    def _on_two_threads(
        self,
        move: Callable[[int, list[PackedKey]], None],
        spans: Sequence[list[PackedKey]],
    ) -> None:
        """Move each span on whichever thread is free."""
        for _ in self._threads.map(move, range(len(spans)), spans):
            pass

    def memcpy(self, number: int) -> Callable[[], object]:
        """Copy as many bytes, span by span."""

        def call() -> None:
            for at in range(CALL_SPANS):
                self.memcpy_span(number * CALL_SPANS + at)

        return call

    def memcpy_span(self, number: int) -> None:
        """Copy the bytes of one span from the engine's memory into a mapped file."""
        if self._target is None:
            self._target = mapped(self._home, self._source.nbytes)
        start = number * self.span_bytes % len(self._source)
        part = slice(start, start + self.span_bytes)
        np.copyto(self._target[part], self._source[part])

    def _keys_to_save(self) -> list[list[PackedKey]]:
        self._saved = [self.new_keys() for _ in range(CALL_SPANS)]
        return self._saved


@contextlib.contextmanager
def on_slab(
    page_bytes: int,
    *,
    home: Path = MEMORY,
    block_contiguous: bool = False,
    span_bytes: int = SPAN_BYTES,
) -> Iterator[Bench]:
    """Run a bench over a slab that is full."""
    nbytes = POOL_SPANS * SPAN_BYTES
    with tempfile.TemporaryDirectory(prefix="ucm-pipeline-", dir=home) as directory:
        store = SlabStore(
            path=f"{directory}/slab",
            capacity_bytes=nbytes,
            block_bytes=ROWS * page_bytes,
        )
        bench = Bench(
            store,
            page_bytes,
            Path(directory),
            block_contiguous=block_contiguous,
            span_bytes=span_bytes,
            num_spans=nbytes // span_bytes,
        )
        with bench.running():
            for number in range(nbytes // span_bytes // CALL_SPANS):
                bench.loop_save(number)()
            yield bench
