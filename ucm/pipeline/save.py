# SPDX-License-Identifier: Apache-2.0
"""
The save chain: event wait → gather → transfer → (confirm) → commit.

``EventWait`` lets the item pass when its bytes are written. ``Gather`` copies device
pages straight into the store's slots; with the last row the source is released.
``Transfer`` seals the slots: checksums, and the bytes on their way where the store has
no slots of its own. ``Commit`` publishes. These two run as one call on a thread of their
own, so that blocks are held for as long as the copy takes, however slow the store is; on
an asynchronous device ``GatherWait`` waits for its fence before them. A copy that has
begun is always waited for, also when its ticket is over. ``Confirm`` is there for engines
that overwrite blocks before they say so: it waits until the engine's thread has seen the
copy's end, which is then older than anything that it overwrites later.

Stages of a host's own (``OwnStage``) stand between ``Transfer`` and ``Commit``: behind the
release, so that they hold no blocks, and before anything is visible.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NewType

import anyio
import numpy as np
import numpy.typing as npt

from ucm.blocks import BlockId, GroupId, PackedKey
from ucm.devices.abc import Device, Fence
from ucm.errors import ConfigError, DeviceTimeoutError, StoreError, StoreFullError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.outcomes import outcome_of_save
from ucm.pipeline.stage import STORE_WORKER, Chain, CopyStage, FenceStage, LoopStage
from ucm.pipeline.tickets import Ticket
from ucm.plan import HostSlots
from ucm.reasons import Reason
from ucm.seals import checksum_seeds
from ucm.stores.abc import ReadLease, Store, WriteLease
from ucm.stores.leases import seals_of, told_count

__all__ = [
    "Commit",
    "Confirm",
    "EventWait",
    "Finished",
    "Gather",
    "GatherWait",
    "Gathered",
    "OwnStage",
    "OwnStages",
    "Queued",
    "Ready",
    "Sealed",
    "Transfer",
    "asks_digests",
    "copy_of",
    "copy_over",
    "save_chain",
    "sealed_blocks",
]

_FIRST_LOOK_S = 0.002
_LAST_LOOK_S = 0.05
"""How often a confirmation is looked for; it comes once in a step of the engine, and not
at all while that is idle."""


Queued = NewType("Queued", Item)
"""As taken from the queue."""
Ready = NewType("Ready", Item)
"""Its fence has passed."""
Gathered = NewType("Gathered", Item)
"""Its rows are on their way into the slots; ``copy`` is the fence behind them."""
Sealed = NewType("Sealed", Item)
"""The slots are final if all of the ticket's rows are there: ``is_whole``."""
Finished = NewType("Finished", Item)
"""``outcome`` is the ticket's end, or nothing while rows are missing."""


def copy_over(item: Item, fence: Fence) -> None:
    """End the copy of its rows; with the last ones the ticket's hold on its blocks."""
    item.is_whole = fence.is_done() and item.ticket.copied(item.row_ids)


def copy_of(item: Item) -> Fence:
    """Return the fence behind the copy of its rows."""
    assert item.copy is not None  # behind the stage that copies
    return item.copy


def asks_digests(device: Device, lease: ReadLease | WriteLease) -> bool:
    """Return whether a device can be asked for the checksums of what it copies."""
    return device.tells_digests and lease.takes_digests


class EventWait(FenceStage[Queued, Ready]):
    """Waits for the item's fence."""

    name = "event_wait"

    def awaited(self, given: Queued) -> Fence:
        """Return the item's fence."""
        return given.fence

    def passed(self, given: Queued) -> Ready:
        """Let the item go on."""
        return Ready(given)


class Gather(CopyStage[Ready, Gathered]):
    """Copies pages into slots that the store leases."""

    name = "gather"

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._device = device

    def run(self, given: Ready) -> Gathered:
        """Lease slots with the first rows, then copy this item's rows."""
        ticket = given.ticket
        lease = ticket.write_lease
        if lease is None:
            keys, uses = ticket.span.keys, ticket.span.uses
            lease = self._store.reserve(keys, ticket.block_bytes, uses)
            ticket.own(lease)
            _check_granted(keys, lease)
            if lease.num_stored:
                with contextlib.suppress(StoreError):
                    self._store.touch(keys, uses)
            ticket.write_lease = lease
        if not ticket.guard.begin():
            raise TicketOverError(ticket.guard.taken_back or Reason.OVER)
        whole = False
        try:
            block_ids, slots = _places(ticket, lease)
            where = ticket.span.group_id, given.row_ids, block_ids, slots
            is_all = not given.is_partial and len(block_ids) == len(lease.keys)
            is_beside = not self._device.is_synchronous  # blocks are held no longer
            if is_all and is_beside and asks_digests(self._device, lease):
                fence = self._device.gather(*where, checksum_seeds(lease.keys))
            else:
                fence = self._device.gather(*where)
            whole = True
        finally:
            if not whole:
                ticket.guard.end(last=False)  # released with the last word
        given.copy = fence
        if self._device.is_synchronous:  # for others ``GatherWait`` waits
            copy_over(given, fence)
        else:
            ticket.own(contextlib.closing(fence))
        return Gathered(given)


def _check_granted(keys: tuple[PackedKey, ...], lease: WriteLease) -> None:
    """Refuse a lease that would have blocks stored under keys of others."""
    at = lease.positions
    granted = keys if len(at) == len(keys) else tuple(keys[each] for each in at)
    if tuple(lease.keys) != granted:
        raise StoreError(f"the store leased {len(lease.keys)} keys, not those {at=}")
    told_count("num_stored", lease.num_stored, len(keys) - len(at))


def _places(ticket: Ticket, lease: WriteLease) -> tuple[tuple[BlockId, ...], HostSlots]:
    """Return the blocks that were granted a slot and are not lost, and their slots."""
    block_ids, slots = ticket.span.block_ids, lease.slots
    if len(lease.positions) < len(block_ids):
        block_ids = tuple(block_ids[at] for at in lease.positions)
    if lost := ticket.guard.lost:
        positions = enumerate(lease.positions)
        kept = [at for at, position in positions if position not in lost]
        block_ids = tuple(block_ids[at] for at in kept)
        slots = HostSlots(slots.pool, slots.slots[kept], slots.block_bytes)
    return block_ids, slots


class GatherWait(FenceStage[Gathered, Gathered]):
    """Waits for the device's fence behind the copy; runs also on a settled ticket."""

    name = "gather_wait"
    awaits_copy = True

    def awaited(self, given: Gathered) -> Fence:
        """Return the fence behind the copy."""
        return copy_of(given)

    def passed(self, given: Gathered) -> Gathered:
        """Release the source with the last row."""
        copy_over(given, copy_of(given))
        return given


class Transfer(CopyStage[Gathered, Sealed]):
    """
    Makes the slots' bytes final.

    Args:
        device: Whose checksums of them count, if it tells any. The host computes one of each
            group first: a device that reads only part of a block always tells alike.
    """

    name = "transfer"
    worker = STORE_WORKER

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._proven = set[GroupId]()
        self._doubted = set[GroupId]()

    def run(self, given: Gathered) -> Sealed:
        """Seal all blocks once every row is there."""
        fence = copy_of(given)
        if not fence.is_done():
            raise DeviceTimeoutError("slots were to be sealed before their copy ended")
        fence.land()
        if given.is_whole:
            lease = _lease(given.ticket)
            digests = fence.digests() if fence.tells_digests else ()
            if digests and self._is_proven(given.ticket, lease, digests):
                lease.seal_with(digests)
            else:
                lease.seal(0, len(lease.keys))
        return Sealed(given)

    def _is_proven(
        self, ticket: Ticket, lease: WriteLease, digests: Sequence[int]
    ) -> bool:
        """Return whether the device tells what the host does, of blocks of a group."""
        device, group_id, guard = self._device, ticket.span.group_id, ticket.guard
        if device is None or not device.tells_digests:
            return False
        if group_id in self._proven:
            return True
        if guard.torn or guard.lost:  # what the engine has overwritten proves nothing
            return False
        (wanted,) = seals_of(lease.keys, lease.slots, [0])
        if digests[0] == wanted:
            self._proven.add(group_id)
            return True
        # Once it may have been overwritten, and nobody knows it yet.
        if group_id in self._doubted:
            device.tells_digests = False
        self._doubted.add(group_id)
        return False


class Confirm(LoopStage[Sealed, Sealed]):
    """Waits until the engine's thread knows whether the copy was torn."""

    name = "confirm"

    def try_now(self, given: Sealed) -> Sealed | None:
        """Return at once while rows are missing, or if it is known already."""
        guard = given.ticket.guard
        is_known = not given.is_whole or guard.is_confirmed or guard.torn
        return given if is_known else None

    async def run(self, given: Sealed) -> Sealed:
        """Return when it is known; ``Commit`` looks at what it is."""
        pause = _FIRST_LOOK_S
        while self.try_now(given) is None:  # told on another thread
            await anyio.sleep(pause)
            pause = min(pause * 2, _LAST_LOOK_S)
        return given


class OwnStage(CopyStage[Sealed, Sealed]):
    """
    A stage of a host's own, such as an audit; ``save_chain`` puts it before ``Commit``.

    It runs on the copy thread of the store, for each item of each save, and looks at what
    ``sealed_blocks`` yields. What it raises, whatever it is, fails that save and no other;
    so does another return than what it was given. A ``run`` that does not return is a store
    that hangs: the save ends at its deadline, further ones are refused until it does.
    """

    worker = STORE_WORKER
    is_foreign = True


OwnStages = Chain[Sealed, Sealed]
"""``Chain.start(...).then(...)`` of them."""


def sealed_blocks(given: Sealed) -> Iterator[tuple[PackedKey, npt.NDArray[np.uint8]]]:
    """Yield keys and bytes, not to be changed, of what is about to be committed."""
    if given.is_whole:  # nothing yet while rows are missing
        lease = _lease(given.ticket)
        for at, key in enumerate(lease.keys):
            block = lease.slots.block(at)
            block.flags.writeable = False
            yield key, block


class Commit(CopyStage[Sealed, Finished]):
    """
    Publishes the blocks.

    Args:
        forget: Makes blocks invisible again which were withdrawn amid their commit: whoever
            did so was told that they are not stored, and may have had them forgotten.
    """

    name = "commit"
    worker = STORE_WORKER

    def __init__(
        self, forget: Callable[[Sequence[PackedKey]], object] | None = None
    ) -> None:
        self._forget = forget

    def run(self, given: Sealed) -> Finished:
        """Commit once every row is there, but for blocks overwritten meanwhile."""
        ticket = given.ticket
        if given.is_whole:
            lost = ticket.counting()
            lease = _lease(ticket)
            granted = [at for at, each in enumerate(lease.positions) if each in lost]
            told, left = lease.commit(granted), len(lease.keys) - len(granted)
            if self._forget is not None and _is_withdrawn(ticket):
                self._forget(
                    [k for at, k in enumerate(lease.keys) if at not in granted]
                )
            committed = told_count("commit", told, left)
            stored = int(lease.num_stored) + left - committed
            given.outcome = outcome_of_save(
                len(ticket.span),
                committed=committed,
                stored=stored,
                lost=len(granted),
                lost_as=ticket.guard.lost_as,
            )
        return Finished(given)


def _is_withdrawn(ticket: Ticket) -> bool:
    return ticket.outcome is not None and ticket.outcome.reason is Reason.WITHDRAWN


def _lease(ticket: Ticket) -> WriteLease:
    if ticket.write_lease is None:
        raise StoreFullError(f"transfer {ticket.transfer_id} has no slots")
    return ticket.write_lease


def save_chain(
    store: Store,
    device: Device,
    *,
    confirms: bool = False,
    before_commit: OwnStages | None = None,
) -> Chain[Queued, Finished]:
    """
    Return the save chain for a device.

    Args:
        store: Where blocks go.
        device: Where they come from.
        confirms: The engine overwrites blocks before it calls any hook.
        before_commit: A host's own stages, each an ``OwnStage`` with a name of its own.

    Raises:
        ConfigError: One of these cannot stand there.
    """
    gathered = Chain.start(EventWait()).then(Gather(store, device))
    if not device.is_synchronous:
        gathered = gathered.then(GatherWait())
    sealed = gathered.then(Transfer(device))
    if before_commit is not None:
        _check_own(before_commit, sealed)
        sealed = sealed.join(before_commit)
    if confirms:
        sealed = sealed.then(Confirm())
    return sealed.then(Commit(store.forget))


def _check_own(own: OwnStages, before: Chain[Queued, Sealed]) -> None:
    """Refuse what could hold blocks, or be taken for a stage of ours in the log."""
    stages = (*before.stages, *own.stages, Confirm(), Commit())
    names = Counter(each.name for each in stages)
    for stage in own.stages:
        problem = ""
        if not isinstance(stage, OwnStage) or stage.worker != STORE_WORKER:
            problem = "is no OwnStage, and could hold blocks of the engine"
        elif names[stage.name] > 1:
            problem = "has the name of another stage"
        if problem:
            remedy = (
                "Derive it from ucm.pipeline.save.OwnStage, with a name of its own."
            )
            raise ConfigError("before_commit", stage.name, problem, remedy)
