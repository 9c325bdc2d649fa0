# SPDX-License-Identifier: Apache-2.0
"""
The load chain: event wait → fetch → scatter → (verify) → publish.

``EventWait`` lets the item pass when its destination may be overwritten. ``Fetch``
opens the blocks in the store; ``Scatter`` copies slots into device pages and verifies
their checksums; ``Publish`` makes sure that the device is done and that no slot was
recycled meanwhile. Any doubt fails the whole ticket, and the engine recomputes.

Nobody reads the blocks of a load that brings all rows before ``Publish`` gives them back,
so that checksums need not come first. A device that computes them itself tells what it has got,
and ``Publish`` compares that. Any other accelerator copies while threads that do nothing
else compute them (``Verify``), and the copy thread goes on to the next ticket: a load takes
the longer of the two. A synchronous one tells those of what it is just about to copy, or is
given piece by piece, each just verified and still in the CPU's cache. Rows that are loaded layer by layer are read as soon
as they are there: they are verified first.

What such a load has written is zeroed before its blocks are given back if it fails: see
``BlockGuard``.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Final, NewType

from ucm.devices.abc import Device, Fence
from ucm.errors import BlockCorruptError, DeviceTimeoutError, StoreError
from ucm.fates import Fate
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.outcomes import Outcome, OutcomeKind
from ucm.pipeline.save import (
    EventWait,
    Finished,
    Queued,
    Ready,
    asks_digests,
    copy_of,
    copy_over,
)
from ucm.pipeline.stage import VERIFY_WORKER, Chain, CopyStage, FenceStage
from ucm.pipeline.tickets import Ticket
from ucm.pipeline.waiting import has_passed
from ucm.reasons import Reason
from ucm.seals import checksum_seeds
from ucm.stores.abc import ReadLease, Store
from ucm.stores.leases import aligned, seals_of

__all__ = [
    "Fetch",
    "Fetched",
    "Publish",
    "PublishVerified",
    "Scatter",
    "ScatterWait",
    "Scattered",
    "Verify",
    "load_chain",
]

_PIECE_BYTES: Final = 8 << 20
"""Verified and copied at a time where the CPU does not tell checksums. Pieces of 4 MB cost as much, 1 and 2 MB up to
a fifth more, in calls, and 16 MB up to a tenth: they leave the last cache. A save is copied
whole: sealed piece by piece it took as long, and held its blocks for longer."""


Fetched = NewType("Fetched", Item)
"""Its ticket's blocks are in host slots; they are verified if it brings rows of them."""
Scattered = NewType("Scattered", Item)
"""Its rows are on their way into pages, or there; ``failure`` says if they are wrong."""


class Fetch(CopyStage[Ready, Fetched]):
    """
    Opens blocks, and verifies some at once.

    Those whose rows are read one by one, and one that is said to have another size than
    its group's: no device would take it.
    """

    name = "fetch"

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, given: Ready) -> Fetched:
        """Open with the first rows."""
        ticket = given.ticket
        lease = ticket.read_lease
        if lease is None:
            lease = self._store.read(ticket.span.keys)
            ticket.own(lease)
            if tuple(lease.keys) != ticket.span.keys:
                told = f"the store opened {len(lease.keys)} blocks, not those of "
                raise StoreError(f"{told}{len(ticket.span)} keys that it was asked for")
            if lease.slots.block_bytes != ticket.block_bytes:  # as the first one's
                with self._store.read(lease.keys[:1]) as first:
                    _verify(self._store, first, 0, 1)
            if given.is_partial:
                _verify(self._store, lease, 0, len(lease.keys))
            ticket.read_lease = lease
        return Fetched(given)


def _verify(store: Store, lease: ReadLease, start: int, stop: int) -> None:
    """Verify some blocks; a corrupt one is forgotten at once."""
    try:
        lease.verify(start, stop)
    except BlockCorruptError:
        _forget_corrupt(store, lease, lambda at: lease.verify(at, at + 1))
        raise


def _forget_corrupt(
    store: Store, lease: ReadLease, verify: Callable[[int], None]
) -> None:
    """
    Forget every block of a span that does not verify.

    Where one is damaged others may be: each left in the store would cost one more load
    that fails.
    """
    corrupt = []
    for position, key in enumerate(lease.keys):
        try:
            verify(position)
        except BlockCorruptError:
            corrupt.append(key)
    lease.recheck()  # bytes of a slot that was recycled by now are not corrupt
    with contextlib.suppress(StoreError):  # the corruption is the news
        store.forget(corrupt, Fate.CORRUPT)


def _lease(item: Item) -> ReadLease:
    lease = item.ticket.read_lease
    assert lease is not None  # behind ``Fetch``
    return lease


class Scatter(CopyStage[Fetched, Scattered]):
    """Copies slots into pages; verifies them where ``Verify`` does not."""

    name = "scatter"

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._device = device

    def run(self, given: Fetched) -> Scattered:
        """Start the copy unless the destination was taken back."""
        lease = _lease(given)
        is_asked = not given.is_partial and asks_digests(self._device, lease)
        is_told = is_asked and not lease.skips_verified
        if self._device.is_synchronous and not (given.is_partial or is_told):
            self._copy_pieces(given)
        else:
            self._copy_at_once(given, is_asked=is_asked)
        return Scattered(given)

    def _copy_at_once(self, given: Fetched, *, is_asked: bool) -> None:
        """Copy what is verified, has its checksums told, or is verified meanwhile."""
        num_blocks = len(_lease(given).keys)
        given.copy = fence = self._copy(given, 0, num_blocks, is_asked=is_asked)
        if self._device.is_synchronous:
            copy_over(given, fence)
            if is_asked and not fence.tells_digests:
                _verify(self._store, _lease(given), 0, num_blocks)
        elif not given.is_partial:  # a store that hangs must hold no blocks
            ended = functools.partial(_end_if_passed, fence, given.ticket)
            fence.call_when_over(ended)

    def _copy_pieces(self, given: Fetched) -> None:
        """Verify and copy piece by piece."""
        ticket, lease = given.ticket, _lease(given)
        num_blocks = len(lease.keys)
        step = max(1, _PIECE_BYTES // lease.slots.block_bytes)
        for at in range(0, num_blocks, step):
            stop = min(at + step, num_blocks)
            _verify(self._store, lease, at, stop)
            fence = self._copy(given, at, stop)
            if stop < num_blocks:
                ticket.guard.end(last=False)  # a store that hangs must hold no blocks
        given.copy = fence
        copy_over(given, fence)

    def _copy(
        self, given: Fetched, start: int, stop: int, *, is_asked: bool = False
    ) -> Fence:
        ticket, slots = given.ticket, _lease(given).slots
        guard, span = ticket.guard, ticket.span
        if not guard.begin():
            raise TicketOverError(guard.taken_back or Reason.OVER)
        whole = False
        try:
            where = span.group_id, given.row_ids
            part = slots.part(start, stop), span.block_ids[start:stop]
            if is_asked:
                seeds = checksum_seeds(span.keys[start:stop])
                fence = self._device.scatter(*where, *part, seeds)
            else:
                fence = self._device.scatter(*where, *part)
            whole = True
        finally:
            if not whole:
                guard.end(last=False)  # released with the last word
        if not given.is_partial:
            clear = functools.partial(self._device.clear, span.group_id)
            guard.soil(functools.partial(clear, given.row_ids, span.block_ids))
        return fence


def _end_if_passed(fence: Fence, ticket: Ticket) -> None:
    if has_passed(fence):
        ticket.guard.end(last=False)


class Verify(CopyStage[Scattered, Scattered]):
    """Verifies what the device copies meanwhile; not rows, which ``Fetch`` has verified."""

    name = "verify"
    worker = VERIFY_WORKER

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_for(self, item: Item) -> bool:
        """Return whether somebody wants to know, and nobody else verifies it."""
        if item.is_partial or copy_of(item).tells_digests:
            return False
        return item.ticket.outcome is None

    def run(self, given: Scattered) -> Scattered:
        """Verify all; what is wrong is told behind the copy, which goes on."""
        lease = _lease(given)
        try:
            _verify(self._store, lease, 0, len(lease.keys))
        except Exception as exc:  # noqa: BLE001 - ``Publish`` raises it, behind the copy
            given.failure = exc
        return given


class PublishVerified(CopyStage[Scattered, Scattered]):
    """Publishes what was copied while it was verified: nobody else has to look at it."""

    name = "publish"
    worker = VERIFY_WORKER

    def is_for(self, item: Item) -> bool:
        """Return whether all is there and right."""
        if item.is_partial or copy_of(item).tells_digests or item.failure is not None:
            return False
        return has_passed(copy_of(item))

    def run(self, given: Scattered) -> Scattered:
        """End the copy, and give the blocks back."""
        copy_over(given, copy_of(given))
        _publish(given)
        return given


class ScatterWait(FenceStage[Scattered, Scattered]):
    """Waits for the device's fence behind the copy; runs also on a settled ticket."""

    name = "scatter_wait"
    awaits_copy = True

    def awaited(self, given: Scattered) -> Fence:
        """Return the fence behind the copy."""
        return copy_of(given)

    def passed(self, given: Scattered) -> Scattered:
        """End the copy; rows that are not right are nobody's."""
        if given.failure is None and not given.has_failed:
            copy_over(given, copy_of(given))
        else:
            given.ticket.guard.end(last=False)
        return given


class Publish(CopyStage[Scattered, Finished]):
    """
    Tells whether what landed is the block; on one thread, as rows come in order.

    Where the device tells the checksums of what it has got, they are compared here.
    """

    name = "publish"

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._device = device

    def run(self, given: Scattered) -> Finished:
        """Recheck the slots once every row is there, and give the blocks back."""
        if not copy_of(given).is_done():
            raise DeviceTimeoutError("blocks were to be published before their copy")
        if given.failure is not None:
            raise given.failure
        if copy_of(given).tells_digests:
            self._compare(_lease(given), copy_of(given).digests())
        if given.is_whole:
            _publish(given)
        return Finished(given)

    def _compare(self, lease: ReadLease, digests: Sequence[int]) -> None:
        """
        Compare what the device has got with what was stored.

        Raises:
            BlockCorruptError: It is not the same. If the host reads something else in the
                slots, link or device are not to be trusted: it computes from then on.
        """
        try:
            lease.verify_with(0, aligned(digests, lease.keys))
        except BlockCorruptError as exc:
            found = list(seals_of(lease.keys, lease.slots, range(len(lease.keys))))
            _forget_corrupt(
                self._store, lease, lambda at: lease.verify_with(at, [found[at]])
            )
            if found == list(digests):
                raise
            self._device.tells_digests = False
            why = "the device has something else than its slot: the host computes "
            raise BlockCorruptError(exc.key, f"{why}checksums from now on") from exc


def _publish(given: Scattered) -> None:
    """Give blocks back that are verified and copied, unless a slot was recycled."""
    lease, guard = _lease(given), given.ticket.guard
    lease.recheck()
    if not guard.publish():
        raise TicketOverError(guard.taken_back or Reason.OVER)
    lease.close()
    num_blocks = len(given.ticket.span)
    given.outcome = Outcome(OutcomeKind.COMMITTED, committed=num_blocks)


def load_chain(store: Store, device: Device) -> Chain[Queued, Finished]:
    """Return the load chain for a device: fused where it is synchronous."""
    fetched = Chain.start(EventWait()).then(Fetch(store))
    scattered = fetched.then(Scatter(store, device))
    if not device.is_synchronous:
        scattered = scattered.then(Verify(store)).then(PublishVerified())
        scattered = scattered.then(ScatterWait())
    return scattered.then(Publish(store, device))
