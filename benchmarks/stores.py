# SPDX-License-Identifier: Apache-2.0
"""
Speed of the slab store, 32 blocks at a time and one alone, beside LMCache and memcpy.

Each side makes the calls of a pipeline, on one thread. A save reserves, has the device copy all
blocks into their slots, seals and commits; the slab is full, so that each save also evicts. A load
reads, has the device copy all blocks out and tell their checksums, compares these and rechecks.
LMCache's local CPU back end, where it can be installed (see ``benchmarks.peers``), holds as much and
is as full, and copies block by block as its own engine does; it keeps no checksums, and its memory
is one process's.

What the machine can do is the same bytes, copied by the same calls of the device into or out of a
plain file that is mapped as the slab's is, and digested there by the same calls, too: where the
kernel gives shared memory no huge pages, no store in it can reach what a copy between two arrays
reaches, and no store with checksums what one without them does.
What a call costs beyond that is told by its parts: index and lease are the call without bytes, checksums
what the call takes longer with them, and the memory is shared for what a mapped file takes
longer than an array. Saves without checksums have the digest replaced by a constant, for which
there is no option; loads without them are of a slab that verifies once.

In memory nobody waits for anything, and what counts is this thread's CPU time: what else
the machine does costs no side its turn. Run ``python -m benchmarks.stores``.
"""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import (
    Figure,
    Note,
    Scale,
    Side,
    Times,
    Told,
    compare,
    main,
    make_keys,
    ratio,
    speed,
)
from benchmarks.memory import GROUP
from benchmarks.peers import LocalCPU, enter, has_lmcache
from ucm.blocks import BlockId, PackedKey, RowId
from ucm.config import Verify
from ucm.devices.cpu import CPUDevice
from ucm.plan import HostSlots
from ucm.prefixes import paged_layout
from ucm.seals import checksum_seeds
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore, _leases
from ucm.stores.slab._files import map_file

BATCH = 32
POOL_BYTES = 512 << 20
MEMORY = Path("/dev/shm")
_MEMORY_S = 60.0
CHECKED = {"64 KB": ">= 0.65", "512 KB": ">= 0.75", "2 MB": ">= 0.85"}
"""Of a slab, as a share of a copy into, or out of, a mapped file with the same checksums."""
BARE = {"save": ">= 0.85", "load": ">= 0.9"}
"""Of one without checksums, as a share of the copy alone."""
SIZES = {"64 KB": 64 << 10, "512 KB": 512 << 10, "2 MB": 2 << 20}
LMCACHE, _HASHED = "LMCache", "mapped file, hashed"
_ROW = (RowId(0),)

_Blocks = npt.NDArray[np.uint8]
_THERE = vars(_leases)
_DIGEST = _THERE["digests_of"]


class Memory:
    """
    Blocks as an engine has them, and the copies that its device makes.

    Args:
        blocks: ``[n, block_bytes]``.
    """

    def __init__(self, blocks: _Blocks) -> None:
        layout = paged_layout({"layer": blocks.shape[1]}, block_tokens=16)
        self._device = CPUDevice()
        self._device.register(layout, {"layer": blocks})

    def gather(self, first: int, slots: HostSlots) -> None:
        """Copy blocks from *first* on into slots."""
        self._device.gather(GROUP, _ROW, _ids(first, slots), slots)

    def scatter(
        self, first: int, slots: HostSlots, seeds: Sequence[int] | None = None
    ) -> Sequence[int]:
        """Copy slots into blocks from *first* on; return their checksums if there are seeds."""
        ids = _ids(first, slots)
        fence = self._device.scatter(GROUP, _ROW, slots, ids, seeds)
        return () if seeds is None else fence.digests()


def _ids(first: int, slots: HostSlots) -> list[BlockId]:
    return list(map(BlockId, range(first, first + len(slots.slots))))


class Slab:
    """
    The sides that move batches of one open slab.

    Args:
        stores: The slab, opened to verify always and once.
        source: What is saved.
        target: Where to load to.
        shared: A plain mapped file where the slab is, as large as its data.
        batch: Blocks of one call.
    """

    def __init__(
        self,
        stores: tuple[SlabStore, SlabStore],
        source: _Blocks,
        target: _Blocks,
        shared: _Blocks,
        batch: int,
    ) -> None:
        self._store, self._trusting = stores
        self._shared, self._array = shared, target
        self._source, self._target = Memory(source), Memory(target)
        self._nbytes = source.shape[1]
        self._batch = batch
        self._held = len(source) // batch
        self._saved: list[Sequence[PackedKey]] = []
        self._seeds = checksum_seeds(make_keys(0, batch))

    def _first(self, number: int) -> int:
        return number % self._held * self._batch

    def _slots(self, pool: _Blocks, number: int) -> HostSlots:
        first = self._first(number)
        return HostSlots(pool, np.arange(first, first + self._batch), self._nbytes)

    def _save(self, number: int, *, copies: bool = True) -> Callable[[], object]:
        keys = make_keys(len(self._saved) * self._batch, self._batch)
        self._saved.append(keys)
        first = self._first(number)

        def call() -> None:
            with self._store.reserve(keys, self._nbytes) as lease:
                if copies:
                    self._source.gather(first, lease.slots)
                lease.seal(0, len(keys))
                if lease.commit() != len(keys):
                    raise AssertionError("the keys were new")

        return call

    def save(self, number: int) -> Callable[[], object]:
        """Store new keys."""
        _THERE["digests_of"] = _DIGEST
        return self._save(number)

    def bare_save(self, number: int) -> Callable[[], object]:
        """Store new keys with nothing for a checksum: they do not verify."""
        _THERE["digests_of"] = return_nothing
        return self._save(number)

    def empty_save(self, number: int) -> Callable[[], object]:
        """Store new keys without their bytes: they do not verify."""
        _THERE["digests_of"] = return_nothing
        return self._save(number, copies=False)

    def load(self, number: int) -> Callable[[], object]:
        """Read what was stored last but some; each block is digested as it is copied."""
        keys, first = self._loaded(number), self._first(number)

        def call() -> None:
            with self._store.read(keys) as lease:
                seeds = checksum_seeds(keys)
                lease.verify_with(0, self._target.scatter(first, lease.slots, seeds))
                lease.recheck()

        return call

    def _loaded(self, number: int) -> Sequence[PackedKey]:
        return self._saved[-1 - number % (self._held - 1)]

    def bare_load(self, number: int, *, copies: bool = True) -> Callable[[], object]:
        """Read it where it was verified before."""
        keys, first = self._loaded(number), self._first(number)

        def call() -> None:
            with self._trusting.read(keys) as lease:
                lease.verify(0, len(keys))
                if copies:
                    self._target.scatter(first, lease.slots)
                lease.recheck()

        return call

    def empty_load(self, number: int) -> Callable[[], object]:
        """Read it where it was verified before, without its bytes."""
        return self.bare_load(number, copies=False)

    def memcpy(self, number: int) -> Callable[[], object]:
        """Copy blocks."""
        slots = self._slots(self._array, number)
        return functools.partial(self._source.gather, self._first(number), slots)

    def copy_save(self, number: int) -> Callable[[], object]:
        """Copy blocks into a file that is mapped, as the slab's is."""
        slots = self._slots(self._shared, number)
        return functools.partial(self._source.gather, self._first(number), slots)

    def copy_load(self, number: int) -> Callable[[], object]:
        """Copy blocks out of a mapped file."""
        slots = self._slots(self._shared, number)
        return functools.partial(self._target.scatter, self._first(number), slots)

    def hashed_save(self, number: int) -> Callable[[], object]:
        """Copy into a mapped file, and digest what is there."""
        copy, slots = self.copy_save(number), self._slots(self._shared, number)

        def call() -> None:
            copy()
            _DIGEST(slots, range(self._batch), self._seeds, 1)

        return call

    def hashed_load(self, number: int) -> Callable[[], object]:
        """Digest what is in a mapped file as it is copied."""
        slots, first = self._slots(self._shared, number), self._first(number)
        return functools.partial(self._target.scatter, first, slots, self._seeds)

    def fill(self) -> None:
        """Store until the slab is full, and verify all of that once."""
        for number in range(self._held):
            self.save(number)()
        for number in range(self._held):
            self.bare_load(number)()


@contextlib.contextmanager
def opened(
    block_bytes: int, nbytes: int, batch: int = BATCH
) -> Iterator[tuple[Slab, LocalCPU | None]]:
    """Open a slab that is full, and the peer if it is there."""
    # As an engine's tensors begin: with a line of the CPU's caches.
    made = torch.ones((2, nbytes // block_bytes, block_bytes), dtype=torch.uint8)
    source, target = made.numpy()
    with (
        tempfile.TemporaryDirectory(prefix="ucm-stores-", dir=MEMORY) as home,
        contextlib.ExitStack() as closing,
    ):
        always, once = (
            closing.enter_context(
                SlabStore(
                    path=f"{home}/slab",
                    capacity_bytes=nbytes,
                    block_bytes=block_bytes,
                    verify=verify,
                )
            )
            for verify in (Verify.ALWAYS, Verify.ONCE)
        )
        await_memory(always)
        shared = mapped(Path(home), nbytes)
        slab = Slab((always, once), source, target, shared.reshape(source.shape), batch)
        slab.fill()
        peer = None
        if has_lmcache():
            peer = LocalCPU(source, target, batch)
            closing.callback(peer.close)
        yield slab, peer


def in_memory(size: str, batch: int, scale: Scale) -> Told:
    """Measure a slab in memory beside LMCache, and what its parts cost."""
    block_bytes, alone = SIZES[size], ", one block" if batch == 1 else ""
    nbytes = POOL_BYTES // 4 if scale.is_quick else POOL_BYTES
    with opened(block_bytes, nbytes, batch) as (slab, peer):
        for verb in ("save", "load"):
            case = f"memory, {size}{alone}, {verb}"
            bare = "no checksums" if verb == "save" else "verified once"
            sides: dict[str, Side] = {
                "slab": getattr(slab, verb),
                bare: getattr(slab, f"bare_{verb}"),
                "mapped file": getattr(slab, f"copy_{verb}"),
                _HASHED: getattr(slab, f"hashed_{verb}"),
                "memcpy": slab.memcpy,
                "no bytes": getattr(slab, f"empty_{verb}"),
            }
            if peer is not None:
                sides[LMCACHE] = getattr(peer, verb)
            often = scale.repeats * (20 if batch == 1 else 1)
            times = compare(sides, scale._replace(repeats=often), time.thread_time)
            slab.fill()  # some of what is stored now does not verify
            if peer is not None:
                yield ratio(times, "slab", LMCACHE, case, ">= 1")
                yield ratio(times, bare, LMCACHE, case)
            yield ratio(
                times, "slab", _HASHED, case, CHECKED[size] if batch > 1 else ""
            )
            yield ratio(
                times, bare, "mapped file", case, BARE[verb] if batch > 1 else ""
            )
            yield ratio(times, "slab", "mapped file", case)
            yield ratio(times, "mapped file", "memcpy", case)
            for side in times:
                if batch > 1 and side != "no bytes":
                    yield speed(times, side, case, batch * block_bytes)
                else:
                    spent = [1e6 * each / batch for each in times[side]]
                    yield Figure.over(case, f"{side}, a block", "us", spent)
            yield parts(times, case, bare, batch)
    if peer is None:
        yield Note(f"memory, {size}{alone}", f"{LMCACHE}: absent; no figure.")


def parts(times: Times, case: str, bare: str, batch: int) -> Note:
    """Say what each part of a call costs, for one block."""
    spent = {
        side: 1e6 * statistics.median(each) / batch for side, each in times.items()
    }
    return Note(
        case,
        f"of {spent['slab']:.1f} us a block: index and lease {spent['no bytes']:.1f}, "
        f"checksums {spent['slab'] - spent[bare]:.1f}, copy {spent['memcpy']:.1f}, and "
        f"{spent['mapped file'] - spent['memcpy']:.1f} because the memory is shared.",
    )


def await_memory(store: Store) -> None:
    """Wait until a store has all its memory: before there is room for some blocks only."""
    until = time.monotonic() + _MEMORY_S
    while (stats := store.stats()).populated_bytes < stats.capacity_bytes:
        if time.monotonic() > until:
            raise TimeoutError(f"the store has no memory yet: {stats}")
        time.sleep(0.01)


def mapped(home: Path, nbytes: int) -> _Blocks:
    """Return touched bytes of a plain file, mapped just as a slab's are."""
    with (home / "mapped").open("x+b") as file:
        file.truncate(nbytes)
        there = np.frombuffer(map_file(file.fileno(), at_once=True), np.uint8)
    there[:] = 1
    return there


def return_nothing(_: object, positions: Sequence[int], *__: object) -> list[int]:
    """Stand in for digests."""
    return [0] * len(positions)


CASES = {
    **{f"memory {size}": functools.partial(in_memory, size, BATCH) for size in SIZES},
    **{
        f"memory {size}, one block": functools.partial(in_memory, size, 1)
        for size in SIZES
    },
}


if __name__ == "__main__":
    enter("benchmarks.stores")
    main("stores", CASES)
