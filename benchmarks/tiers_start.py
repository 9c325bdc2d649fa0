# SPDX-License-Identifier: Apache-2.0
"""How long a disk takes to start, by how it was left: ``benchmarks.tiers``."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from benchmarks.harness import Figure, Scale, Side, Told, compare, make_keys
from ucm.backends.abc import Sealed, Verdict, block_checksum
from ucm.backends.disk import DiskBackend

__all__ = ["start"]

CLOSED, KILLED, LOST = "closed", "killed", "without an index"
NBYTES, BATCH = 64 << 10, 64


class Disk:
    """
    A disk that is full, opened and left again and again.

    Args:
        home: Where it is.
        count: Blocks.
    """

    def __init__(self, home: Path, count: int) -> None:
        self._home = home
        self._count = count
        self._backend: DiskBackend | None = None
        self._num_put = 0

    async def open(self) -> None:
        """Open it."""
        settings = {
            "path": str(self._home / "disk"),
            "capacity": self._count * (NBYTES + 4096) * 65 // 64,
        }
        self._backend = await DiskBackend.open_configured(settings, "tiers.0")

    async def put(self, count: int) -> None:
        """Put blocks that were never there; the oldest go once it is full."""
        assert self._backend is not None
        data = memoryview(bytes(NBYTES))
        for _ in range(0, count, BATCH):
            keys = make_keys(self._num_put, BATCH)
            self._num_put += BATCH
            blocks = [Sealed(key, data, block_checksum(key, data)) for key in keys]
            if set(await self._backend.put(blocks)) != {Verdict.DONE}:
                raise AssertionError("the disk failed")

    async def close(self) -> None:
        """Leave it as it should be left; sees that all of it was found."""
        if self._backend is not None:
            found = (await self._backend.stats()).blocks
            if self._num_put >= self._count and (found or 0) < self._count * 15 // 16:
                raise AssertionError(f"{found} of {self._count} blocks are there")
            await self._backend.aclose()
            self._backend = None

    async def leave_closed(self) -> None:
        """Be closed in order."""
        await self.close()

    async def leave_killed(self) -> None:
        """Be left amid its work, as by a death, with blocks put since it was opened."""
        if self._backend is None:
            await self.open()
        assert self._backend is not None
        await self.put(16 * BATCH)
        backend = vars(self._backend)
        await backend["_crew"].aclose()
        for drive in backend["_drives"]:
            drive.close(is_used=False)
        self._backend = None

    async def leave_lost(self) -> None:
        """Have no index, as every disk before there was one."""
        await self.close()
        (self._home / "disk" / "index").unlink()


def start(scale: Scale) -> Told:
    """Measure how long it takes to open a disk that is full."""
    count = 1 << (12 if scale.is_quick else 15)
    case = f"disk, {count} blocks of 64 KB, start"
    few = scale._replace(repeats=1, samples=min(scale.samples, 3))
    with (
        tempfile.TemporaryDirectory(prefix="ucm-start-", dir=scale.directory) as home,
        start_blocking_portal() as portal,
    ):
        disk = Disk(Path(home), count)
        portal.call(disk.open)
        portal.call(disk.put, count)

        def side(leave: Callable[[], object]) -> Side:
            def prepare(_: int) -> Callable[[], object]:
                portal.call(leave)
                return lambda: portal.call(disk.open)

            return prepare

        sides = {
            CLOSED: side(disk.leave_closed),
            KILLED: side(disk.leave_killed),
            LOST: side(disk.leave_lost),
        }
        for what, clock in (("", time.perf_counter), (", CPU", time.process_time)):
            times = compare(sides, few, clock)
            for name, values in times.items():
                each = [1e6 * one / count for one in values]
                yield Figure.over(case, f"{name}{what}, a block", "us", each)
            for name in (CLOSED, KILLED):
                pairs = zip(times[name], times[LOST], strict=True)
                shares = [one / other for one, other in pairs]
                yield Figure.over(case, f"{name} / {LOST}{what}", "ratio", shares)
        portal.call(disk.close)
