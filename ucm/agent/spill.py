# SPDX-License-Identifier: Apache-2.0
"""
Spill: what is committed in the slab goes to a tier, as far as it comes to it in time.

The backlog is bounded, and each block that was offered has one end::

    offered = spilled + skipped + dropped (by reason) + waiting + moving

What the tier does not take by its setting is dropped as well (``ucm.agent.admission``).

The slab does not hold a block while it is read. So what is put was read, verified and sealed
while the slot was the block's, which is looked at behind the seal; and it is looked at again
behind the put, because the bytes are read then once more: what was recycled under it is
taken out of the tier. Whoever meets it there before sees that its checksum does not hold.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import anyio
import attrs

from ucm.agent.admission import Admission, Admitter
from ucm.agent.calls import Blocking, blocks_per_call
from ucm.agent.looking import look_before_put
from ucm.backends.abc import Presence, Sealed, Verdict, block_checksum
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import BlockCorruptError, BlockNotFoundError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import ReadLease, Store

__all__ = ["SpillCounts", "Spiller"]

_VERDICTS: Final = {
    Verdict.FULL: Reason.STORE_FULL,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
}
_SHORTEST_S: Final = 0.001
"""Less than a loop's clock can tell apart would be no wait at all."""


@attrs.define
class SpillCounts:
    """What became of the blocks that were offered to one tier; see the module's text."""

    offered: int = 0
    spilled: int = 0
    skipped: int = 0
    """The tier had them."""
    dropped: Counter[Reason] = attrs.Factory(Counter)
    nbytes: int = 0
    """Of what was spilled."""


@attrs.frozen(eq=False)
class _Read:
    """A sealed block and the lease that tells whether its slot is still its own."""

    sealed: Sealed
    lease: ReadLease


class Spiller:
    """
    The backlog of one tier.

    Args:
        store: The slab.
        backend: The tier.
        call: For the slab's verbs.
        most_waiting: Blocks of the backlog; more are dropped.
        rule: What the tier takes.
    """

    def __init__(
        self,
        store: Store,
        backend: BreakerBackend,
        call: Blocking,
        most_waiting: int,
        rule: Admission = Admission.ALL,
    ) -> None:
        self.counts = SpillCounts()
        self.num_moving = 0
        self._store = store
        self._backend = backend
        self._can = backend.capabilities
        self._call = call
        self._most_waiting = most_waiting
        self._admitter = Admitter(rule)
        self._waiting: dict[PackedKey, int] = {}
        self._brought: set[PackedKey] = set()
        """What came from this tier, and was not offered since."""
        self._offered = anyio.Event()
        self._ended = anyio.Event()

    @property
    def num_waiting(self) -> int:
        """Blocks of the backlog."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or moves."""
        return not self._waiting and not self.num_moving

    @property
    def is_served(self) -> bool:
        """Whether its tier answers, as far as is known."""
        return not self._backend.is_open

    def told(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return attrs.asdict(self.counts) | {
            "dropped": {str(reason): n for reason, n in self.counts.dropped.items()},
            "waiting": self.num_waiting,
            "moving": self.num_moving,
        }

    def offer(self, key: PackedKey, nbytes: int) -> None:
        """Take a block that was committed into the backlog, if there is room."""
        if key in self._waiting:
            return
        self.counts.offered += 1
        if key in self._brought:
            self._brought.discard(key)
            self.counts.skipped += 1
        elif nbytes > self._can.max_block_bytes:
            self.counts.dropped[Reason.STORE_FULL] += 1
        elif not self._admitter.admits(key):
            self.counts.dropped[Reason.ADMISSION] += 1
        elif len(self._waiting) >= self._most_waiting:
            self.counts.dropped[Reason.QUEUE_BYTES] += 1
        else:
            if not self._waiting:  # else nobody waits for it
                self._offered.set()
                self._offered = anyio.Event()
            self._waiting[key] = nbytes

    def withdraw(self, key: PackedKey) -> None:
        """Drop a block that the slab no longer has."""
        self._admitter.removed(key)
        self._brought.discard(key)
        if self._waiting.pop(key, None) is not None:
            self.counts.dropped[Reason.EVICTED] += 1
            self._tell_end()

    def brought(self, key: PackedKey) -> None:
        """Know that a block came from this tier: it need not be asked whether it has it."""
        if self._waiting.pop(key, None) is not None:
            self.counts.skipped += 1
            self._tell_end()
            return
        if len(self._brought) >= self._most_waiting:
            self._brought.clear()  # it costs questions, no more
        self._brought.add(key)

    def refused(self, key: PackedKey) -> bool:
        """Return whether the tier did not take a block, as far as is remembered."""
        return self._admitter.refused(key)

    async def drained(self) -> None:
        """Wait until nothing waits or moves."""
        while not self.is_idle:
            await self._ended.wait()

    async def run(self) -> None:
        """Spill until cancelled; as many calls at a time as serve the tier best."""
        async with anyio.create_task_group() as tasks:
            for _ in range(self._can.in_flight):
                tasks.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                await self._offered.wait()
            if (wait_s := self._backend.wait_s) > 0:
                await anyio.sleep(max(wait_s, _SHORTEST_S))
            elif keys := self._take():
                self.num_moving += len(keys)
                try:
                    await self._spill(keys)
                finally:
                    self.num_moving -= len(keys)
                    self._tell_end()

    def _tell_end(self) -> None:
        if self.is_idle:
            self._ended.set()
            self._ended = anyio.Event()

    def _take(self) -> list[PackedKey]:
        can = self._can
        largest = max(itertools.islice(self._waiting.values(), can.batch_blocks))
        keys = list(itertools.islice(self._waiting, blocks_per_call(can, largest)))
        for key in keys:
            del self._waiting[key]
        return keys

    async def _spill(self, keys: Sequence[PackedKey]) -> None:
        """Bring each of *keys* to its end."""
        absent = []
        left = set(keys)
        try:
            told = await look_before_put(self._backend, keys)
            for key, there in zip(keys, told, strict=True):
                if there is Presence.ABSENT:
                    absent.append(key)
                    continue
                left.discard(key)
                if there is Presence.PRESENT:
                    self.counts.skipped += 1
                else:
                    self.counts.dropped[Reason.UNAVAILABLE] += 1
            read = await self._call(lambda: [self._read(key) for key in absent])
            found = [each for each in read if isinstance(each, _Read)]
            for key, each in zip(absent, read, strict=True):
                if isinstance(each, Reason):
                    left.discard(key)
                    self.counts.dropped[each] += 1
            await self._put(found, left)
        finally:  # where the agent stops amid it
            if left:
                self.counts.dropped[Reason.SHUTDOWN] += len(left)

    async def _put(self, found: Sequence[_Read], left: set[PackedKey]) -> None:
        if not found:
            return
        verdicts = await self._backend.put([each.sealed for each in found])
        lost = await self._call(lambda: [_is_lost(each.lease) for each in found])
        torn = []
        for each, verdict, is_lost in zip(found, verdicts, lost, strict=True):
            left.discard(each.sealed.key)
            if is_lost and verdict is not Verdict.PRESENT:
                torn.append(each.sealed.key)
                self.counts.dropped[Reason.RECYCLED] += 1
            elif verdict is Verdict.DONE:
                self.counts.spilled += 1
                self.counts.nbytes += len(each.sealed.data)
            elif verdict is Verdict.PRESENT:
                self.counts.skipped += 1
            else:
                self.counts.dropped[_VERDICTS.get(verdict, Reason.ERROR)] += 1
        if torn:
            await self._backend.delete(torn)

    def _read(self, key: PackedKey) -> _Read | Reason:
        """Seal a block where it is, on a thread; or say why not."""
        try:
            with contextlib.ExitStack() as undo:
                lease = undo.enter_context(self._store.read([key]))
                lease.verify(0, 1)
                data = lease.slots.block(0).data.toreadonly()
                sealed = Sealed(key, data, block_checksum(key, data))
                lease.recheck()  # or it was not this block whose checksum was taken
                undo.pop_all()
        except BlockNotFoundError:
            return Reason.EVICTED
        except BlockCorruptError:
            return Reason.CORRUPT
        except StoreUnavailableError:
            return Reason.UNAVAILABLE
        return _Read(sealed, lease)


def _is_lost(lease: ReadLease) -> bool:
    """End a lease; return whether its slot may have been recycled, on a thread."""
    try:
        with lease:
            lease.recheck()
    except (BlockNotFoundError, StoreUnavailableError):
        return True
    return False
