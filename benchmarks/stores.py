# SPDX-License-Identifier: Apache-2.0
"""
Speed of the slab store, saving and loading spans of 16 MB, against memcpy.

A save reserves, copies each block into its slot, seals and commits; the slab is full,
so that each save also evicts. A load reads, verifies, copies out and rechecks. On the
disk, one plain file per block (written under another name, then renamed; never synced)
stands beside the slab: less than any store with a file per block has to do.

The measure is the same bytes, copied in pieces of a block into or out of a plain file
that is mapped as the slab's is: where the kernel gives shared memory no huge pages, no
store can reach what memcpy reaches between two arrays, which have them. That stands
beside it for orientation.
Without checksums the digest is replaced by a constant; there is no such option. Run
``python -m benchmarks.stores``.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.harness import (
    Figure,
    Note,
    Scale,
    Side,
    Told,
    compare,
    main,
    make_keys,
    ratio,
    speed,
)
from ucm.blocks import PackedKey
from ucm.stores.slab import SlabStore
from ucm.stores.slab._files import map_file

SPAN_BYTES = 16 << 20
SPANS = 32
MEMORY = Path("/dev/shm")
CHECKED = {"64 KB": ">= 0.65", "512 KB": ">= 0.75", "2 MB": ">= 0.85"}
"""Of a slab with checksums, as a share of a copy into, or out of, a mapped file."""
SIZES = {"64 KB": 64 << 10, "512 KB": 512 << 10, "2 MB": 2 << 20}

_Blocks = npt.NDArray[np.uint8]


class Slab:
    """
    The sides that move spans of one open slab.

    Args:
        store: The slab.
        source: What is saved.
        target: Where to load to.
        shared: A plain mapped file where the slab is, as large as its data.
    """

    def __init__(
        self, store: SlabStore, source: _Blocks, target: _Blocks, shared: _Blocks
    ) -> None:
        self._store = store
        self._shared = shared
        self._source = source
        self._target = target
        self._span = SPAN_BYTES // source.shape[1]
        self._spans = len(source) // self._span
        self._saved: list[Sequence[PackedKey]] = []

    def _part(self, blocks: _Blocks, number: int) -> _Blocks:
        at = number % self._spans * self._span
        return blocks[at : at + self._span]

    def save(self, number: int) -> Callable[[], object]:
        """Store new keys."""
        keys = make_keys(len(self._saved) * self._span, self._span)
        self._saved.append(keys)
        source = self._part(self._source, number)

        def call() -> None:
            with self._store.reserve(keys, source.shape[1]) as lease:
                for position, block in enumerate(source):
                    np.copyto(lease.slots.block(position), block)
                lease.seal(0, len(keys))
                if lease.commit() != len(keys):
                    raise AssertionError("the keys were new")

        return call

    def load(self, number: int) -> Callable[[], object]:
        """Read what was stored last but some."""
        keys = self._saved[-1 - number % (self._spans - 1)]
        target = self._part(self._target, number)

        def call() -> None:
            with self._store.read(keys) as lease:
                lease.verify(0, len(keys))
                for position, block in enumerate(target):
                    np.copyto(block, lease.slots.block(position))
                lease.recheck()

        return call

    def memcpy(self, number: int) -> Callable[[], object]:
        """Copy blocks one by one."""
        return self._copy(self._source, self._target, number)

    def copy_save(self, number: int) -> Callable[[], object]:
        """Copy blocks one by one into a file that is mapped, as the slab's is."""
        return self._copy(self._source, self._shared, number)

    def copy_load(self, number: int) -> Callable[[], object]:
        """Copy blocks one by one out of a mapped file."""
        return self._copy(self._shared, self._target, number)

    def _copy(
        self, source: _Blocks, target: _Blocks, number: int
    ) -> Callable[[], object]:
        pairs = list(
            zip(self._part(target, number), self._part(source, number), strict=True)
        )

        def call() -> None:
            for to, block in pairs:
                np.copyto(to, block)

        return call

    def fill(self) -> None:
        """Store until the slab is full."""
        for number in range(self._spans):
            self.save(number)()


class Files:
    """One file per block."""

    def __init__(self, home: Path, source: _Blocks, target: _Blocks) -> None:
        self._home = home
        self._span = SPAN_BYTES // source.shape[1]
        self._source, self._target = source[: self._span], target[: self._span]
        self._first = 0

    def save(self, _: int) -> Callable[[], object]:
        """Write and rename; what was written before is removed first, untimed."""
        for position in range(self._span):
            (self._home / f"{self._first + position}").unlink(missing_ok=True)
        self._first += self._span

        def call() -> None:
            for position, block in enumerate(self._source):
                temporary = self._home / "temporary"
                with temporary.open("xb", buffering=0) as file:
                    file.write(block.data)
                temporary.rename(self._home / f"{self._first + position}")

        return call

    def load(self, _: int) -> Callable[[], object]:
        """Read all files of the last save."""

        def call() -> None:
            for position, block in enumerate(self._target):
                path = self._home / f"{self._first + position}"
                with path.open("rb", buffering=0) as file:
                    file.readinto(block.data)

        return call


def mapped(home: Path, nbytes: int, *, in_memory: bool) -> _Blocks:
    """Return touched bytes of a plain file, mapped just as a slab's are."""
    with (home / "mapped").open("x+b") as file:
        file.truncate(nbytes)
        there = np.frombuffer(map_file(file.fileno(), in_memory=in_memory), np.uint8)
    there[:] = 1
    return there


@contextlib.contextmanager
def opened(parent: Path, block_bytes: int, spans: int) -> Iterator[tuple[Slab, Files]]:
    """Open a slab that is full, and a directory beside it."""
    blocks = spans * SPAN_BYTES // block_bytes
    source = np.ones((blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    target[:] = 1  # touches every page
    with (
        tempfile.TemporaryDirectory(prefix="ucm-stores-", dir=parent) as home,
        SlabStore(
            path=f"{home}/slab",
            capacity_bytes=spans * SPAN_BYTES,
            block_bytes=block_bytes,
        ) as store,
    ):
        shared = mapped(Path(home), source.nbytes, in_memory=parent == MEMORY)
        slab = Slab(store, source, target, shared.reshape(source.shape))
        slab.fill()
        files = Path(home) / "files"
        files.mkdir()
        yield slab, Files(files, source, target)


def measure(where: str, size: str, scale: Scale) -> Told:
    """Measure one slab, with checksums and without."""
    in_memory = where == "memory"
    block_bytes = SIZES[size]
    parent = MEMORY if in_memory else scale.directory
    spans = 8 if scale.is_quick else SPANS
    with opened(parent, block_bytes, spans) as (slab, files):
        for verb, bare in (("save", ">= 0.85"), ("load", ">= 0.9")):
            case = f"{where}, {size}, {verb}"
            slab_side: Side = getattr(slab, verb)
            copy: Side = getattr(slab, f"copy_{verb}")
            plain: dict[str, Side] = {"mapped file": copy, "memcpy": slab.memcpy}
            times = compare({"slab": slab_side, **plain}, scale)
            target = CHECKED[size] if in_memory else ""
            yield ratio(times, "slab", "mapped file", case, target)
            yield ratio(times, "slab", "memcpy", case)
            yield ratio(times, "mapped file", "memcpy", case)
            for side in times:
                yield speed(times, side, case, SPAN_BYTES)
            with mock.patch("ucm.stores.slab._leases._digest", return_nothing):
                # What is stored meanwhile does not verify: see the fill below.
                if verb == "load":
                    slab.fill()
                sides = {"slab, no checksums": slab_side, "mapped file": copy}
                times = compare(sides, scale)
            target = bare if in_memory else ""
            yield ratio(times, "slab, no checksums", "mapped file", case, target)
            slab.fill()
        if not in_memory:
            yield from against_files(slab, files, size, scale)
            yield Note(
                f"disk, {size}",
                "no peer is installed: a plain file per block, which does less than any "
                "of them, stands in. O_DIRECT: the slab has none, no figure.",
            )


def return_nothing(*_: object) -> int:
    """Stand in for a digest."""
    return 0


def against_files(
    slab: Slab, files: Files, size: str, scale: Scale
) -> Iterator[Figure]:
    """Measure beside one plain file per block."""
    scale = scale._replace(samples=min(scale.samples, 5), repeats=1)
    for verb, target in (("save", ">= 5"), ("load", ">= 1")):
        case = f"disk, {size}, {verb}"
        sides = {"slab": getattr(slab, verb), "file per block": getattr(files, verb)}
        times = compare(sides, scale)
        yield ratio(times, "slab", "file per block", case, target)
        yield speed(times, "file per block", case, SPAN_BYTES)


CASES = {
    f"{where} {size}": functools.partial(measure, where, size)
    for where in ("memory", "disk")
    for size in SIZES
}


if __name__ == "__main__":
    main("stores", CASES)
