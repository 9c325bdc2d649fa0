# SPDX-License-Identifier: Apache-2.0
"""
Checksums of blocks that the accelerator computes itself, where they lie in its memory.

The same ones as the host's (``ucm.seals``), of the bytes that the engine has: of a save those
that were copied, of a load those that have arrived. The device reads a hundred times as
fast as a core does, and the host's memory is left to the link. A *digester* is the
runtime's part; what is computed, when and into which memory, is decided here.

Of a group whose pages cannot be cut into whole chunks the host computes them, as it does
of parts of blocks, and of copies by way of staging memory.

Threading: ``learn`` and ``forget`` run alone; ``begin`` on any thread.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm.devices._paged import Int64s, PagedCopy
from ucm.devices._pages import Pages
from ucm.devices.abc import Fence
from ucm.devices.driver import Digester, Driver, Stream, Table, Words
from ucm.errors import DeviceError
from ucm.threads import Lock, Threads

__all__ = ["DeviceDigests", "Submit", "check", "find_digests"]

_abandoned: list[object] = []
"""Nobody else gets this memory while the process lives."""

Submit = Callable[[Stream], Callable[[Fence], Fence]]
"""
Has the digests of a copy's blocks computed, behind it in a stream. What is returned makes
of a fence behind both one that tells them.
"""

_WORD_BYTES: Final = 8
_NUM_JOBS: Final = 16
"""Copies under way that have theirs computed; of more the host computes them."""
_MOST_BLOCKS: Final = 2048
"""Of such a copy. A copy of 128 MB has as many where blocks have 64 KB."""


class _DigestsFence(Fence):
    """
    A fence behind a copy, and behind the digests of what was copied.

    Args:
        fence: Behind both.
        memory: Lent to the copy: blocks, seeds and, behind the fence, digests.
        count: Of blocks.
        give_back: Called once with the memory, when the digests have been read.
        lock: Its own.
    """

    __slots__ = ("_count", "_fence", "_give_back", "_lock", "_memory", "_told")

    tells_digests = True

    def __init__(
        self,
        fence: Fence,
        memory: Words,
        count: int,
        give_back: Callable[[Words], None],
        lock: Lock,
    ) -> None:
        self._fence = fence
        self._memory = memory
        self._count = count
        self._give_back = give_back
        self._lock = lock
        self._told: list[int] | None = None
        fence.call_when_over(self._over)

    def is_done(self) -> bool:
        return self._fence.is_done()

    def wait(self, timeout: float) -> bool:
        return self._fence.wait(timeout)

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        return self._fence.call_when_over(callback)

    def digests(self) -> list[int]:
        if not self._fence.is_done():
            raise DeviceError("digests were asked for before their copy has ended")
        return self._read()

    def _over(self) -> None:
        # Of a device that has failed nobody knows what it still writes: never given back.
        with contextlib.suppress(DeviceError):
            if self._fence.is_done():
                self._read()

    def _read(self) -> list[int]:
        """Return the digests, which are there; the first time, give the memory back."""
        with self._lock:
            if self._told is None:
                self._told = self._memory[2, : self._count].tolist()
                self._give_back(self._memory)
            return self._told


class DeviceDigests:
    """
    Decides what is computed where.

    Args:
        digester: Computes.
        threads: Where locks come from.
    """

    def __init__(self, digester: Digester, threads: Threads) -> None:
        self._digester = digester
        self._threads = threads
        self.tables: dict[Pages, Table] = {}
        """By group; of one that is not there the host computes them."""
        self._words = digester.make_memory(_NUM_JOBS * 3 * _MOST_BLOCKS)
        self._free = deque(self._words.reshape(_NUM_JOBS, 3, _MOST_BLOCKS))
        """Blocks, seeds and digests of a copy each."""

    def learn(self, groups: Iterable[Pages]) -> None:
        """Take note of where the blocks of groups are."""
        for pages in groups:
            if (chunks := _chunks(pages, self._digester.chunk_bytes)) is not None:
                starts, strides = map(self._digester.place, chunks)
                self.tables[pages] = Table(starts, strides, len(chunks[0]))

    def forget(self) -> None:
        """Let go of what was learned, unless a copy that was given up may still read it."""
        if len(self._free) < _NUM_JOBS:
            _abandoned.append((self._words, self.tables))
        self.tables = {}

    def begin(self, copy: PagedCopy[Pages]) -> Submit | None:
        """Prepare the digests of a copy's blocks; None: the host is to compute them."""
        table, count = self.tables.get(copy.group), len(copy.blocks)
        if copy.seeds is None or table is None or not copy.is_whole:
            return None
        if count > _MOST_BLOCKS:
            return None
        try:
            memory = self._free.popleft()
        except IndexError:
            return None
        memory[2, :count] = 0  # what is not written fits nothing
        memory[0, :count] = copy.blocks
        memory[1, :count] = np.array(copy.seeds, np.uint64)
        lent = memory, count, self._free.append, self._threads.lock()

        def submit(stream: Stream) -> Callable[[Fence], Fence]:
            self._digester.submit(table, memory, count, stream)
            return lambda fence: _DigestsFence(fence, *lent)

        return submit


def _chunks(pages: Pages, chunk_bytes: int) -> tuple[Int64s, Int64s] | None:
    """Return where the chunks of block 0 are, and their strides; None if that is nowhere."""
    sizes = pages.nbytes % chunk_bytes
    if sizes.any() or (pages.starts % _WORD_BYTES + pages.strides % _WORD_BYTES).any():
        return None
    counts = pages.nbytes // chunk_bytes
    within = np.concatenate([np.arange(count) for count in counts.tolist()])
    starts = np.repeat(pages.starts, counts) + within * chunk_bytes
    return starts, np.repeat(pages.strides, counts)


def find_digests(
    driver: Driver, stream: Stream, threads: Threads
) -> DeviceDigests | None:
    """
    Return what computes a device's checksums; None where nothing does.

    Args:
        driver: Of the device.
        stream: Of the device too.
        threads: Where locks come from.

    Raises:
        OSError: The device cannot, or computes others.
        RuntimeError: The device has failed.
    """
    if (digester := driver.make_digester()) is None:
        return None
    check(digester, stream, driver.synchronize)
    return DeviceDigests(digester, threads)


def check(digester: Digester, stream: Stream, wait: Callable[[], None]) -> None:
    """
    Have digests computed that are known.

    Args:
        digester: That of a driver.
        stream: Of its device.
        wait: Returns when the device has done what it has.

    Raises:
        OSError: They are wrong.
        RuntimeError: The device has failed.
    """
    num_chunks, seeds = 67, (0, 2**64 - 1, 0x9E3779B97F4A7C15)
    count = len(seeds)
    dice = np.random.default_rng(0)
    shape = (count, num_chunks * digester.chunk_bytes)
    data = dice.integers(0, 256, shape, np.uint8)
    placed = digester.place(data.view(np.int64).reshape(-1))
    within = np.arange(num_chunks, dtype=np.int64) * digester.chunk_bytes
    table = Table(
        digester.place(placed.address + within),
        digester.place(np.full(num_chunks, shape[1], np.int64)),
        num_chunks,
    )
    memory = digester.make_memory(3 * count).reshape(3, count)
    memory[0], memory[1] = np.arange(count)[::-1], np.array(seeds, np.uint64)
    try:
        digester.submit(table, memory, count, stream)
    except RuntimeError as exc:  # one that stays is found by whoever waits
        raise OSError(str(exc)) from exc
    finally:
        wait()
    wanted = [
        xxh3_64_intdigest(block.data, seed)
        for block, seed in zip(data[::-1], seeds, strict=True)
    ]
    if (found := memory[2].tolist()) != wanted:
        raise OSError(
            f"its checksums are wrong: {found[0]:016x} is not {wanted[0]:016x}"
        )
