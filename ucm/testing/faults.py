# SPDX-License-Identifier: Apache-2.0
"""
Planned faults: a store and a device that fail, wait or die where they are told to.

Not random: a plan says at which call of which verb what happens. A test that wants a
copy to be under way while something else goes on holds it at a gate and opens the gate
when it has seen enough; nothing sleeps.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import BlockId, GroupId, KeySpace, PackedKey, RowId
from ucm.devices.abc import Device, EventRef, Fence
from ucm.layout import KVLayout
from ucm.plan import HostSlots
from ucm.stores.abc import ReadLease, Store, WriteLease
from ucm.stores.wrap import WrapperStore
from ucm.uses import Uses

__all__ = ["Fault", "FaultDevice", "FaultPlan", "FaultStore", "Gate", "raising"]

_GATE_TIMEOUT_S = 120.0


class Gate:
    """
    Holds a thread until it is opened.

    ``reached`` tells the test that the thread has arrived.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let the thread go on, now and ever after."""
        self._open.set()

    def wait_reached(self) -> None:
        """
        Block the test until a thread is at the gate.

        Raises:
            TimeoutError: None came.
        """
        if not self.reached.wait(_GATE_TIMEOUT_S):
            raise TimeoutError("no thread reached the gate")

    def __call__(self) -> None:
        """
        Stand at the gate; what a fault plan calls.

        Raises:
            TimeoutError: Nobody opened it.
        """
        self.reached.set()
        if not self._open.wait(_GATE_TIMEOUT_S):
            raise TimeoutError("nobody opened the gate")


@attrs.frozen
class Fault:
    """
    What happens at one call.

    Args:
        verb: Name of the store's, lease's or device's method.
        act: Called before the verb itself; raises, waits at a gate, or both.
        nth: At which call of the verb, from 1; 0 for each.
    """

    verb: str
    act: Callable[[], None]
    nth: int = 1


class FaultPlan:
    """Faults by verb and call number; counts calls of all verbs it is asked about."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()

    def at(self, verb: str) -> None:
        """Count a call and do what the plan says."""
        with self._lock:
            self.calls[verb] += 1
            number = self.calls[verb]
        for fault in self._faults:
            if fault.verb == verb and fault.nth in (0, number):
                fault.act()


def raising(error: BaseException) -> Callable[[], None]:
    """Return an act that raises *error*."""

    def act() -> None:
        raise error

    return act


class _FaultWriteLease(WriteLease):
    def __init__(self, inner: WriteLease, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self.keys = inner.keys
        self.takes_digests = inner.takes_digests
        self.positions = inner.positions
        self.num_stored = inner.num_stored
        self.slots = inner.slots

    def seal(self, start: int, stop: int) -> None:
        self._plan.at("seal")
        self._inner.seal(start, stop)

    def seal_with(self, digests: Sequence[int]) -> None:
        self._plan.at("seal")
        self._inner.seal_with(digests)

    def seals(self, start: int, stop: int) -> list[int]:
        return self._inner.seals(start, stop)

    def commit(self, without: Collection[int] = ()) -> int:
        self._plan.at("commit")
        return self._inner.commit(without)

    def discard(self) -> None:
        self._inner.discard()


class _FaultReadLease(ReadLease):
    def __init__(self, inner: ReadLease, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self.takes_digests = inner.takes_digests
        self.skips_verified = inner.skips_verified
        self.keys = inner.keys
        self.slots = inner.slots

    def verify(self, start: int, stop: int) -> None:
        self._plan.at("verify")
        self._inner.verify(start, stop)

    def verify_with(self, start: int, digests: Sequence[int]) -> None:
        self._plan.at("verify")
        self._inner.verify_with(start, digests)

    def recheck(self) -> None:
        self._plan.at("recheck")
        self._inner.recheck()

    def seals(self, start: int, stop: int) -> list[int]:
        return self._inner.seals(start, stop)

    def recycled(self) -> list[bool]:
        self._plan.at("recheck")
        return self._inner.recycled()

    def close(self) -> None:
        self._inner.close()


class FaultStore(WrapperStore):
    """
    A store whose verbs meet a plan first.

    Args:
        inner: The real store.
        plan: What happens when.
    """

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Meet the plan, then forward."""
        self._plan.at("match")
        return super().match(keys)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Meet the plan, then forward."""
        self._plan.at("contains")
        return super().contains(keys)

    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> WriteLease:
        """Meet the plan, then forward; the lease meets it too."""
        self._plan.at("reserve")
        return _FaultWriteLease(super().reserve(keys, block_bytes, uses), self._plan)

    def read(self, keys: Sequence[PackedKey]) -> ReadLease:
        """Meet the plan, then forward; the lease meets it too."""
        self._plan.at("read")
        return _FaultReadLease(super().read(keys), self._plan)

    def describe(self, keyspace: KeySpace) -> None:
        """Meet the plan, then forward."""
        self._plan.at("describe")
        super().describe(keyspace)


class FaultDevice(Device):
    """
    A device whose verbs meet a plan first.

    Args:
        inner: The real device.
        plan: What happens when.
    """

    def __init__(self, inner: Device, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self.is_synchronous = inner.is_synchronous

    @property
    def tells_digests(self) -> bool:
        """Whether the real one does, and nobody has found them wrong."""
        return self._inner.tells_digests

    @tells_digests.setter
    def tells_digests(self, is_so: bool) -> None:
        self._inner.tells_digests = is_so

    def hash_on(self, most_threads: int) -> None:
        """Forward."""
        self._inner.hash_on(most_threads)

    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """Forward."""
        self._inner.register(layout, kv_caches)

    def unregister(self) -> None:
        """Forward."""
        self._inner.unregister()

    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """Forward."""
        return self._inner.pin(memory)

    def stage(self, nbytes: int, slot_bytes: int) -> str:
        """Forward."""
        return self._inner.stage(nbytes, slot_bytes)

    def numa_node(self) -> int | None:
        """Forward."""
        return self._inner.numa_node()

    def describe(self) -> Mapping[str, str]:
        """Forward."""
        return self._inner.describe()

    def begin_step(self, step: int) -> None:
        """Forward."""
        self._inner.begin_step(step)

    def lease(self, event: EventRef | None = None) -> Fence:
        """Forward."""
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
        """Meet the plan, then forward."""
        self._plan.at("gather")
        return self._inner.gather(group_id, row_ids, block_ids, slots, seeds)

    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Meet the plan, then forward."""
        self._plan.at("scatter")
        return self._inner.scatter(group_id, row_ids, slots, block_ids, seeds)

    def clear(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
    ) -> Fence:
        """Meet the plan, then forward."""
        self._plan.at("clear")
        return self._inner.clear(group_id, row_ids, block_ids)

    def close(self) -> None:
        """Forward."""
        self._inner.close()
