# SPDX-License-Identifier: Apache-2.0
"""
A store and a device for simulations: they fail, hang, die, damage and lag by seed.

Everything is drawn from the simulation's own generator, so that a seed repeats it.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from tests.kit.simulation import Simulation
from ucm.blocks import BlockId, GroupId, PackedKey, RowId
from ucm.devices.abc import Device, EventRef, Fence
from ucm.errors import DeviceError, StoreFullError, StoreUnavailableError
from ucm.layout import KVLayout
from ucm.plan import HostSlots
from ucm.stores.abc import ReadLease, Store
from ucm.testing.faults import FaultPlan, FaultStore
from ucm.uses import Uses

__all__ = ["LateDevice", "Odds", "SeededFaults", "UnreliableStore"]

_LATE_S = (0.0, 0.0, 0.0, 0.0005, 0.02)
_ASKED = frozenset({"match", "contains", "touch", "describe"})
"""Verbs on the scheduler's thread, which no store may hold up."""


@attrs.frozen(kw_only=True)
class Odds:
    """
    How likely each trouble is, per call of a verb.

    Args:
        fail: Raise what the verb may raise.
        hang: Wait, then go on.
        die: End the calling thread, as a bug in a store's own code could.
        damage: Flip a byte of a stored block before it is read.
        hangs_at: The one verb that hangs; empty for each.
        hangs: How long a hang may last, in seconds.
    """

    fail: float = 0.0
    hang: float = 0.0
    die: float = 0.0
    damage: float = 0.0
    hangs_at: str = ""
    hangs: tuple[float, ...] = (0.001, 0.3, 15.0, 35.0, 100.0)


class SeededFaults(FaultPlan):
    """
    A fault plan that rolls dice at each call.

    Args:
        simulation: Its dice and its clock.
        odds: How likely what is; may be replaced while it runs.
    """

    def __init__(self, simulation: Simulation, odds: Odds) -> None:
        super().__init__()
        self.odds = odds
        self.done: Counter[str] = Counter()
        self._simulation = simulation

    def at(self, verb: str) -> None:
        """
        Let others run, then do what the dice say.

        Raises:
            StoreError: The verb fails.
            SystemExit: The thread dies.
        """
        simulation, odds = self._simulation, self.odds
        simulation.pause()
        if verb == "clear":  # what cannot be zeroed is never given back
            return
        roll = simulation.dice.random()
        if roll < odds.fail:
            self.done[f"fail {verb}"] += 1
            raise _failure(verb)
        if verb in _ASKED:
            return
        if roll < odds.fail + odds.hang:
            if odds.hangs_at not in ("", verb):
                return
            self.done[f"hang {verb}"] += 1
            simulation.sleep(simulation.dice.choice(odds.hangs))
        elif roll < odds.fail + odds.hang + odds.die:
            self.done[f"die {verb}"] += 1
            raise SystemExit


def _failure(verb: str) -> Exception:
    if verb in ("gather", "scatter"):
        return DeviceError(f"{verb} failed by seed")
    if verb == "reserve":
        return StoreFullError("full by seed")
    return StoreUnavailableError(f"{verb} failed by seed")


class UnreliableStore(FaultStore):
    """
    A store that meets seeded faults, and whose blocks rot.

    Args:
        inner: The real store.
        faults: What happens when.
        flip: Changes a byte of a stored block, past the store's own verbs.
        simulation: Its dice.
    """

    def __init__(
        self,
        inner: Store,
        faults: SeededFaults,
        flip: Callable[[PackedKey], None],
        simulation: Simulation,
    ) -> None:
        super().__init__(inner, faults)
        self._faults = faults
        self._flip = flip
        self._simulation = simulation
        self._reading: set[int] = set()

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Meet the faults, then forward."""
        self._faults.at("contains")
        return super().contains(keys)

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Meet the faults, then forward."""
        self._faults.at("touch")
        super().touch(keys, uses)

    def read(self, keys: Sequence[PackedKey]) -> ReadLease:
        """Damage one of the blocks perhaps, meet the faults, then forward."""
        faults, dice = self._faults, self._simulation.dice
        # What rots behind the checksum's back, in the middle of a copy, nobody sees.
        if not self._reading and dice.random() < faults.odds.damage:
            key = dice.choice(keys)
            if super().contains([key])[0] and not self._reading:  # others ran meanwhile
                faults.done["damage"] += 1
                self._flip(key)
        lease = super().read(keys)
        self._reading.add(id(lease))
        close = lease.close

        def closed() -> None:
            self._reading.discard(id(lease))
            close()

        lease.close = closed  # type: ignore[method-assign]
        return lease


class _LateFence(Fence):
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.passed = False
        self._callbacks: list[Callable[[], None]] = []

    def is_done(self) -> bool:
        self._simulation.pause()
        return self.passed

    def wait(self, timeout: float) -> bool:
        return self._simulation.block(lambda: self.passed, timeout, "fence")

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """Call on the stream's thread, or at once."""
        if self.passed:
            callback()
        else:
            self._callbacks.append(callback)
        return True

    def open(self) -> None:
        """Let the stream be past it."""
        self.passed = True
        for callback in self._callbacks:
            callback()


class LateDevice(Device):
    """
    An asynchronous device: copies happen some time after they were asked for.

    Each direction has a stream of its own, which keeps its order; between the two
    there is none. Bytes move when the stream gets there, and only then.

    Args:
        inner: A synchronous device.
        faults: Met before a copy is taken on.
        simulation: Its dice, clock and threads.
    """

    is_synchronous = False

    def __init__(
        self, inner: Device, faults: SeededFaults, simulation: Simulation
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._simulation = simulation
        self._streams = [simulation.threads.queue() for _ in range(2)]
        self._threads = [
            simulation.threads.thread(functools.partial(self._run, at), f"stream-{at}")
            for at in range(2)
        ]

    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """Forward, and start the streams."""
        self._inner.register(layout, kv_caches)
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()

    def unregister(self) -> None:
        """Forward."""
        self._inner.unregister()

    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """Forward."""
        return self._inner.pin(memory)

    def begin_step(self, step: int) -> None:
        """Forward."""
        self._inner.begin_step(step)

    def lease(self, event: EventRef | None = None) -> Fence:
        """Forward: the host computes at once."""
        return self._inner.lease(event)

    def synchronize(self) -> None:
        """Forward."""
        self._inner.synchronize()

    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Queue the copy."""
        self._faults.at("gather")
        return self._put(
            0, lambda: self._inner.gather(group_id, row_ids, block_ids, slots)
        )

    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Queue the copy."""
        self._faults.at("scatter")
        return self._put(
            1, lambda: self._inner.scatter(group_id, row_ids, slots, block_ids)
        )

    def clear(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
    ) -> Fence:
        """Queue it behind the scatters."""
        return self._put(1, lambda: self._inner.clear(group_id, row_ids, block_ids))

    def close(self) -> None:
        """End the streams behind what they have, and forward."""
        for stream, thread in zip(self._streams, self._threads, strict=True):
            stream.put(None)
            if thread.is_alive():
                thread.join(60.0)
        self._inner.close()

    def _put(self, at: int, copy: Callable[[], Fence]) -> Fence:
        fence = _LateFence(self._simulation)
        self._streams[at].put((copy, fence))
        return fence

    def _run(self, at: int) -> None:
        simulation = self._simulation
        while (job := self._streams[at].get()) is not None:
            copy, fence = job
            if simulation.dice.random() < self._faults.odds.hang:
                self._faults.done["hang stream"] += 1
                simulation.sleep(simulation.dice.choice(self._faults.odds.hangs))
            simulation.sleep(simulation.dice.choice(_LATE_S))
            with contextlib.suppress(DeviceError):  # closed meanwhile
                copy()
            fence.open()
