# SPDX-License-Identifier: Apache-2.0
"""Checksums by a simulated accelerator: read where the blocks are, a block at a time."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_ops import Machine, Misuse, Op, overlap
from tests.kit.accelerator_streams import SimStream
from ucm.devices.driver import Digester, Placed, Table, Words

__all__ = ["DigestingDriver", "SimDigester"]


class _Digests(Op):
    """The digests of some blocks, of which any comes first."""

    __slots__ = ("_job", "_left", "_read")

    def __init__(
        self, name: str, job: Words, count: int, read: Callable[[int], list[range]]
    ) -> None:
        super().__init__(name)
        self._job = job
        self._left = list(range(count))
        self._read = read

    def step(self, machine: Machine) -> str:
        """Compute one, unless its bytes are nobody's any more."""
        at = self._left.pop(machine.dice.randrange(len(self._left)))
        self.is_done = not self._left
        name = f"{self.name}.{at}"
        block, seed = map(int, self._job[:2, at])
        chunks = self._read(block)
        if any(overlap(chunk, dead) for chunk in chunks for dead in machine.dead):
            machine.note(Misuse.DEAD_MEMORY, name)
        else:
            data = b"".join(ctypes.string_at(each.start, len(each)) for each in chunks)
            self._job[2, at] = xxh3_64_intdigest(data, seed)
        return name


class SimDigester(Digester):
    """
    That of a simulated driver.

    Args:
        driver: Whose verb ``digest`` it is.
        chunk_bytes: At a time.
    """

    def __init__(self, driver: SimulatedDriver, chunk_bytes: int = 16) -> None:
        self.chunk_bytes = chunk_bytes
        self.driver = driver

    def place(self, words: npt.NDArray[np.int64]) -> Placed:
        """Keep them."""
        placed = words.copy()
        return Placed(placed.ctypes.data, placed)

    def make_memory(self, num_words: int) -> Words:
        """Return memory of the host, which is the device's."""
        return np.zeros(num_words, np.uint64)

    def submit(self, table: Table, job: Words, count: int, stream: SimStream) -> None:
        """Submit them behind what the stream has."""
        driver = self.driver
        kind = ctypes.c_int64 * table.num_chunks
        starts, strides = (
            list(kind.from_address(each.address))
            for each in (table.starts, table.strides)
        )

        def read(block: int) -> list[range]:
            places = [
                start + block * stride
                for start, stride in zip(starts, strides, strict=True)
            ]
            return [range(place, place + self.chunk_bytes) for place in places]

        with driver.entered("digest", breaks_capture=True):
            if stream.index != driver.index:
                driver.hardware.misuse(Misuse.OTHER_DEVICE, f"digest on {stream.name}")
            name = driver.hardware.name("digest")
            stream.ops.append(_Digests(name, job, count, read))


class DigestingDriver(SimulatedDriver):
    """A device that computes checksums too."""

    def make_digester(self) -> Digester | None:
        """Return one."""
        return SimDigester(self)
