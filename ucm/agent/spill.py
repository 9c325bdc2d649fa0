# SPDX-License-Identifier: Apache-2.0
"""
Spill: what is committed in the slab goes to a tier, as far as it comes to it in time.

The backlog is bounded and shared by tenants (``ucm.agent.backlog``), and each block that was offered has one end::

    offered = spilled + skipped + dropped (by reason) + waiting + moving

What the tier does not take by its setting is dropped as well (``ucm.agent.admission``). One that
does not answer, or takes nothing, is tried with one block a time, which waits on behind all others:
it may be one that is never taken, as by a server of several that is away, or never looked for.

A block goes with the checksum that it has in the slab, and is held against it first, or by the tier's
own put as it moves the bytes. The slab does not hold a block while it is read: that its slot is its own
is looked at behind that, and again behind the put, which reads it: what was recycled under it is
taken out of the tier, as far as the tier has answered. Whoever meets it there before, or all the
same, sees that its checksum does not hold.

What is forgotten leaves the backlog, and the tier behind the puts that are under way: what is put
later is read in the slab before, which has it no more. Each such block has one end as well::

    forgotten of the tier = forgotten + unforgotten + what it did not have
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

import anyio
import attrs

from ucm.agent.admission import Admission, Admitter
from ucm.agent.backlog import Backlog, SpillCounts
from ucm.agent.calls import Blocking, Parts, blocks_per_call
from ucm.agent.looking import look_before_put
from ucm.backends.abc import Presence, Sealed, Verdict
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import BlockCorruptError, BlockNotFoundError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import Change, ReadLease, Store

__all__ = ["SpillCounts", "Spiller"]

_SHORTEST_S: Final = 0.001
"""Less than a loop's clock can tell apart would be no wait at all."""
_LATER_S: Final = 10.0
"""So much behind a while in which a tier was not asked it is asked for what waits on."""
_TENANT: Final = attrgetter("tenant")
_TOLD: Final = (Presence.ABSENT, Presence.PRESENT)
_WHY: Final = {Verdict.FULL: Reason.STORE_FULL, Verdict.GARBAGE: Reason.CORRUPT}


@attrs.frozen(eq=False)
class _Read:
    """Blocks of one size, and the lease that tells whether their slots are still their own."""

    blocks: Sequence[Sealed]
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
        self._store = store
        self._backend = backend
        self._can = backend.capabilities
        self._call = call
        self._most_waiting = most_waiting
        self.admitter = Admitter(rule)
        self._waiting = Backlog(most_waiting)
        self._again: dict[PackedKey, int] = {}
        """What a tier that is not served gave no answer for; it comes behind all that waits."""
        self._brought: set[PackedKey] = set()
        """What came from this tier, and was not offered since."""
        self._moving: dict[anyio.Event, dict[PackedKey, int]] = {}
        """What each call of ours is about, by its end."""
        self._forgetting = anyio.Lock()
        self._reading = anyio.Lock(fast_acquire=True)
        """Held by the call whose blocks are held against their checksums, on all cores."""
        self._offered = anyio.Event()
        self._ended = anyio.Event()

    @property
    def num_waiting(self) -> int:
        """Blocks of the backlog."""
        return len(self._waiting) + len(self._again)

    @property
    def num_moving(self) -> int:
        """Blocks on their way."""
        return sum(map(len, self._moving.values()))

    @property
    def has_much(self) -> bool:
        """Whether its tier takes blocks, and there is no room for another page of them."""
        return self.is_served and 2 * self.num_waiting > self._most_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or moves."""
        return not self.num_waiting and not self._moving

    @property
    def is_served(self) -> bool:
        """Whether its tier takes blocks, as far as is known."""
        return not (self._backend.is_open or self._backend.refuses)

    def told(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return attrs.asdict(self.counts) | {
            "dropped": {str(reason): n for reason, n in self.counts.dropped.items()},
            "waiting": self.num_waiting,
            "moving": self.num_moving,
        }

    def offer(self, blocks: Iterable[Change]) -> None:
        """Take blocks that were committed into the backlog, as far as their tenants find room."""
        waiting, taken = self._waiting.keys(), dict[PackedKey, Change]()
        for each in blocks:
            key = each.key
            if key in waiting or key in self._again or key in taken:
                continue
            self.counts.offered += 1
            if key in self._brought:
                self._brought.discard(key)
                self.counts.skipped += 1
            elif each.nbytes > self._can.max_block_bytes:
                self.counts.dropped[Reason.STORE_FULL] += 1
            elif not (self.admitter.takes_all or self.admitter.admits(key)):
                self.counts.dropped[Reason.ADMISSION] += 1
            else:
                taken[key] = each
        if taken and not self._waiting:  # else nobody waits for it
            self._offered.set()
            self._offered = anyio.Event()
        for tenant, alike in itertools.groupby(taken.values(), _TENANT):
            self._add({each.key: each.nbytes for each in alike}, tenant)

    def _add(self, sizes: dict[PackedKey, int], tenant: int) -> None:
        """Have blocks wait, or others make room for them; or drop them."""
        if self.num_waiting + len(sizes) <= self._most_waiting:
            self._waiting.extend(sizes, tenant)
            return
        for key, nbytes in sizes.items():
            if not self._waiting.is_full and self.num_waiting >= self._most_waiting:
                del self._again[next(iter(self._again))]
                self.counts.dropped[Reason.UNAVAILABLE] += 1
            if self._waiting.add(key, nbytes, tenant) is not None:
                self.counts.dropped[Reason.QUEUE_BYTES] += 1

    def withdraw(self, keys: Sequence[PackedKey]) -> None:
        """Drop blocks that the slab no longer has."""
        if not self.admitter.takes_all:
            for key in keys:
                self.admitter.removed(key)
        self._brought.difference_update(keys)
        if self.num_waiting and (num_left := sum(map(self._leaves, keys))):
            self.counts.dropped[Reason.EVICTED] += num_left
            self._tell_end()

    def brought(self, keys: Sequence[PackedKey]) -> None:
        """Know that blocks came from this tier: it need not be asked whether it has them."""
        left = set(filter(self._leaves, keys)) if self.num_waiting else set()
        if left:
            self.counts.skipped += len(left)
            self._tell_end()
        if len(self._brought) + len(keys) > self._most_waiting:
            self._brought.clear()  # it costs questions, no more
        self._brought.update(keys[: self._most_waiting])
        self._brought -= left

    async def forget(
        self, keys: Sequence[PackedKey], taken: set[PackedKey], seconds: float
    ) -> bool:
        """
        Have the tier part with blocks that the slab has parted with.

        Args:
            keys: Distinct ones.
            taken: Where those go that it had.
            seconds: After which it is given up; what is not deleted then may stay.

        Returns:
            Whether it has none of them any more.
        """
        async for part in Parts(keys):
            self.withdraw(part)
        size, num_left = self._can.batch_blocks, len(keys)
        distinct, under_way = frozenset(keys), list(self._moving.items())
        with anyio.move_on_after(seconds):
            for over, moving in under_way:
                if not distinct.isdisjoint(moving):
                    await over.wait()
            async with self._forgetting:  # so that a tier has one such call at a time
                for at in range(0, len(keys), size):
                    some = keys[at : at + size]
                    told = await self._backend.delete(some)
                    done = [verdict is Verdict.DONE for verdict in told]
                    taken.update(itertools.compress(some, done))
                    self.counts.forgotten += sum(done)
                    num_left -= sum(done) + told.count(Verdict.ABSENT)
                    await anyio.lowlevel.checkpoint()  # not each tier waits
        self.counts.unforgotten += num_left
        return not num_left

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
        is_vain = False
        while True:
            while not self.num_waiting:
                await self._offered.wait()
            if (wait_s := self._backend.wait_s) > 0 or is_vain:
                # What waits on may be all that is wrong with a tier: who reads tries before it.
                later_s = 0.0 if self._waiting else _LATER_S
                await anyio.sleep(max(wait_s, _SHORTEST_S) + later_s)
                is_vain = False
            elif sizes := self._take():
                over = anyio.Event()
                self._moving[over] = sizes
                try:
                    await self._spill(sizes)
                finally:
                    del self._moving[over]
                    over.set()
                    self._tell_end()
                # Who is away may answer at once: a loop of that would be nobody else's.
                is_vain = not self._again.keys().isdisjoint(sizes)

    def _leaves(self, key: PackedKey) -> bool:
        """Have a block wait no more; return whether it did."""
        return self._waiting.discard(key) or self._again.pop(key, None) is not None

    def _tell_end(self) -> None:
        if self.is_idle:
            self._ended.set()
            self._ended = anyio.Event()

    def _take(self) -> dict[PackedKey, int]:
        """Return the next blocks, and how many bytes each has."""
        can = self._can
        waiting = self._waiting.first(can.batch_blocks) or self._again
        largest = max(itertools.islice(waiting.values(), can.batch_blocks))
        most = blocks_per_call(can, largest) if self.is_served else 1
        sizes = dict(itertools.islice(waiting.items(), most))
        if waiting is self._again:
            for key in sizes:
                del self._again[key]
        else:
            self._waiting.take(sizes)
        return sizes

    async def _spill(self, sizes: dict[PackedKey, int]) -> None:
        """Bring each block to its end."""
        left = set(sizes)
        unanswered: dict[PackedKey, int] = {}
        try:
            told = await look_before_put(self._backend, list(sizes))
            answers = list(zip(sizes, told, strict=True))
            absent = [key for key, there in answers if there is Presence.ABSENT]
            silent = [key for key, there in answers if there not in _TOLD]
            self.counts.skipped += len(answers) - len(absent) - len(silent)
            unanswered |= {key: sizes[key] for key in silent}
            left.intersection_update(absent)
            absent.sort(key=sizes.__getitem__)
            found: list[_Read] = []
            wrong: dict[PackedKey, Reason] = {}
            for _, alike in itertools.groupby(absent, sizes.__getitem__):
                async with self._reading:
                    await self._call(partial(self._read, list(alike), found, wrong))
            self.counts.dropped.update(wrong.values())
            left -= wrong.keys()
            await self._put(found, left, unanswered)
        finally:  # where the agent stops amid it
            self._return(unanswered)
            if left:
                self.counts.dropped[Reason.SHUTDOWN] += len(left)

    async def _put(
        self,
        found: Sequence[_Read],
        left: set[PackedKey],
        unanswered: dict[PackedKey, int],
    ) -> None:
        if not found:
            return
        blocks = [block for each in found for block in each.blocks]
        verdicts = await self._backend.put(blocks)
        lost = await self._call(lambda: [one for each in found for one in _lost(each)])
        left.difference_update([block.key for block in blocks])
        torn = []
        for block, verdict, is_lost in zip(blocks, verdicts, lost, strict=True):
            if is_lost and verdict is not Verdict.PRESENT:
                if verdict not in _WHY:  # else nothing was stored
                    torn.append(block.key)
                self.counts.dropped[Reason.RECYCLED] += 1
            elif verdict is Verdict.DONE:
                self.counts.spilled += 1
                self.counts.nbytes += block.data.nbytes
            elif verdict is Verdict.PRESENT:
                self.counts.skipped += 1
            elif verdict is Verdict.UNAVAILABLE:
                unanswered[block.key] = len(block.data)
            else:
                self.counts.dropped[_WHY.get(verdict, Reason.ERROR)] += 1
        if torn:
            await self._backend.delete(torn)

    def _return(self, unanswered: dict[PackedKey, int]) -> None:
        """Have blocks wait on, behind all others, that tried a tier which is not served; or drop them."""
        waits: dict[PackedKey, int] = {}
        waiting = self._waiting.keys()
        if unanswered and not self.is_served:
            waits = {
                key: nbytes
                for key, nbytes in unanswered.items()
                if not (key in waiting or key in self._again)  # offered meanwhile
            }
            self._again |= waits
        if num_dropped := len(unanswered) - len(waits):
            self.counts.dropped[Reason.UNAVAILABLE] += num_dropped

    def _read(
        self,
        keys: list[PackedKey],
        found: list[_Read],
        wrong: dict[PackedKey, Reason],
    ) -> None:
        """Find blocks, verified unless the tier does it, on a thread; or say why not."""
        try:
            with contextlib.ExitStack() as undo:
                lease = undo.enter_context(self._store.read(keys))
                if not self._can.verifies:
                    _verify(lease)
                seals = lease.seals(0, len(keys))
                views = list(map(memoryview.toreadonly, lease.slots.views()))
                lease.recheck()  # or they were not these blocks that were looked at
                undo.pop_all()
        except (BlockNotFoundError, BlockCorruptError) as exc:
            if len(keys) == 1:
                is_gone = isinstance(exc, BlockNotFoundError)
                wrong[keys[0]] = Reason.EVICTED if is_gone else Reason.CORRUPT
                return
            middle = len(keys) // 2  # the others are well
            self._read(keys[:middle], found, wrong)
            self._read(keys[middle:], found, wrong)
        except StoreUnavailableError:
            wrong |= dict.fromkeys(keys, Reason.UNAVAILABLE)
        else:
            found.append(_Read(list(map(Sealed, keys, views, seals)), lease))


def _verify(lease: ReadLease) -> None:
    """Hold blocks against their checksums; bytes of a recycled slot are not corrupt."""
    try:
        lease.verify(0, len(lease.keys))
    except BlockCorruptError:
        lease.recheck()
        raise


def _lost(read: _Read) -> list[bool]:
    """End a lease; return whose slots may have been recycled, on a thread."""
    try:
        with read.lease as lease:
            return lease.recycled()
    except StoreUnavailableError:
        return [True] * len(read.blocks)
