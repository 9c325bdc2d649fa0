# SPDX-License-Identifier: Apache-2.0
"""
Blocks in the memory of this process; the model that other stores are tested against.

Threading. One lock guards all bookkeeping; bytes are checksummed outside it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace, PackedKey
from ucm.errors import (
    BlockNotFoundError,
    ConfigError,
    LeaseExpiredError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.fates import Fate
from ucm.plan import HostSlots
from ucm.stores.abc import ReadLease, Store, StoreCapabilities, StoreStats, WriteLease
from ucm.stores.leases import aligned, check_checksum, check_size, seals_of
from ucm.stores.victims import Claim, Room, choose, curb
from ucm.uses import Uses

__all__ = ["MemoryStore"]


@attrs.frozen
class _Entry:
    """A committed block. Identity tells one commit of a key from another."""

    slot: int
    nbytes: int
    checksum: int
    tenant: int


class _MemoryWriteLease(WriteLease):
    takes_digests = True

    def __init__(
        self,
        store: "MemoryStore",
        keys: tuple[PackedKey, ...],
        positions: tuple[int, ...],
        num_stored: int,
        slots: HostSlots,
        moments: list[int],
    ) -> None:
        self.keys = keys
        self.moments = moments
        self.positions = positions
        self.num_stored = num_stored
        self.slots = slots
        self.checksums: list[int | None] = [None] * len(keys)
        self.has_ended = False
        self._store = store

    def seal(self, start: int, stop: int) -> None:
        self._store.check_lease(self)
        part = range(start, stop)
        self.checksums[start:stop] = seals_of(self.keys, self.slots, part)

    def seal_with(self, digests: Sequence[int]) -> None:
        self._store.check_lease(self)
        self.checksums[:] = aligned(digests, self.keys)

    def commit(self, without: Collection[int] = ()) -> int:
        return self._store.publish(self, without)

    def discard(self) -> None:
        self._store.give_back(self)


class _MemoryReadLease(ReadLease):
    takes_digests = True

    def __init__(
        self,
        store: "MemoryStore",
        keys: tuple[PackedKey, ...],
        entries: list[_Entry],
        slots: HostSlots,
    ) -> None:
        self.keys = keys
        self.slots = slots
        self._store = store
        self._entries = entries
        self._has_ended = False

    def verify(self, start: int, stop: int) -> None:
        part = range(start, stop)
        self._compare(part, seals_of(self.keys, self.slots, part))

    def verify_with(self, start: int, digests: Sequence[int]) -> None:
        self._compare(range(start, start + len(digests)), digests)

    def _compare(self, positions: Sequence[int], digests: Iterable[int]) -> None:
        self._check()
        for position, found in zip(positions, digests, strict=True):
            key, entry = self.keys[position], self._entries[position]
            check_size(key, entry.nbytes, self.slots)
            check_checksum(key, found, entry.checksum)

    def recheck(self) -> None:
        gone = self.recycled()
        if True in gone:
            raise BlockNotFoundError(self.keys[gone.index(True)])

    def recycled(self) -> list[bool]:
        self._check()
        return self._store.gone(self.keys, self._entries)

    def close(self) -> None:
        self._has_ended = True

    def _check(self) -> None:
        if self._has_ended:
            raise LeaseExpiredError("the read lease has ended")
        self._store.check_open()


class MemoryStore(Store):
    """
    A fixed pool of slots, evicted least recently used first.

    Args:
        capacity_blocks: Number of slots.
        block_bytes: Bytes of one slot, the largest block.
        clock_ns: Tells the moment of a use that comes without one.
        retain_share: Slots that may count as used at a moment still to come, of all.
        tenant_share: Slots that one tenant may have, of all.

    Raises:
        ConfigError: One of the first two is below 1.
    """

    def __init__(
        self,
        capacity_blocks: int,
        block_bytes: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        retain_share: float = 0.25,
        tenant_share: float = 1.0,
    ) -> None:
        sizes = {"capacity_blocks": capacity_blocks, "block_bytes": block_bytes}
        for name, size in sizes.items():
            if size < 1:
                why, remedy = "nothing fits", "Give at least 1."
                raise ConfigError(f"store.{name}", size, why, remedy)
        self._pool = np.empty((capacity_blocks, block_bytes), dtype=np.uint8)
        self._pool.fill(0)  # touches every page now rather than in the first saves
        self._entries: dict[PackedKey, _Entry] = {}
        self._moments: dict[PackedKey, int] = {}
        self._clock_ns = clock_ns
        self._most_retained = int(retain_share * capacity_blocks)
        self._most_of_tenant = int(tenant_share * capacity_blocks)
        self._writing: dict[PackedKey, int] = {}
        self._free = list(reversed(range(capacity_blocks)))
        self._keyspaces: dict[bytes, KeySpace] = {}
        self._latest = self._num_evicted = self._num_curbed = self._num_over_share = 0
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""
        return StoreCapabilities(
            durable=False,
            shared=False,
            native_buffers=True,
            max_block_bytes=self._pool.shape[1],
        )

    @property
    def buffers(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The pool."""
        return (self._pool,)

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed."""
        with self._using():
            for position, key in enumerate(keys):
                if key not in self._entries:
                    return position
            return len(keys)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether it is committed."""
        with self._using():
            return [key in self._entries for key in keys]

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Mark blocks as used; see ``Store``."""
        with self._using():
            before = [self._moments.get(key, 1 << 63) for key in keys]
            moments = self._moments_of(uses, before)
            for key, moment in zip(keys, moments, strict=True):
                if key in self._entries:
                    self._moments[key] = max(self._moments[key], moment)

    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> WriteLease:
        """Lease one slot for each new key; see ``Store``."""
        if not 1 <= block_bytes <= self._pool.shape[1]:
            raise ValueError(
                f"blocks of {block_bytes} bytes for slots of {self._pool.shape[1]}"
            )
        if len(set(keys)) != len(keys):
            raise ValueError("the keys of a reservation must be distinct")
        with self._using():
            moments = self._moments_of(uses, [0] * len(keys))
            tenants = [0] * len(keys) if uses is None else uses.tenants.tolist()
            wanted = [
                Claim(*each)
                for each in zip(keys, moments, tenants, strict=True)
                if each[0] not in self._entries and each[0] not in self._writing
            ]
            room = self._make_room(wanted, set(keys))
            granted = [at for at, key in enumerate(keys) if key in room.granted]
            rows = np.array(sorted(self._free.pop() for _ in granted), dtype=np.int64)
            lease = _MemoryWriteLease(
                self,
                tuple(keys[at] for at in granted),
                tuple(granted),
                len(keys) - len(wanted),
                HostSlots(self._pool, rows, block_bytes),
                [moments[at] for at in granted],
            )
            self._writing |= {keys[at]: tenants[at] for at in granted}
            return lease

    def read(self, keys: Sequence[PackedKey]) -> ReadLease:
        """Open committed blocks for reading; see ``Store``."""
        with self._using():
            if missing := [key for key in keys if key not in self._entries]:
                raise BlockNotFoundError(missing[0])
            entries = [self._entries[key] for key in keys]
            block_bytes = entries[0].nbytes if entries else self._pool.shape[1]
            rows = np.array([entry.slot for entry in entries], dtype=np.int64)
            slots = HostSlots(self._pool, rows, block_bytes)
            return _MemoryReadLease(self, tuple(keys), entries, slots)

    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """Make committed blocks invisible and free their slots; return how many."""
        with self._using():
            return self._forget(keys)

    def clear(self, prefix: bytes) -> int:
        """Forget every committed block whose packed key starts with *prefix*."""
        with self._using():
            return self._forget([k for k in self._entries if k.startswith(prefix)])

    def describe(self, keyspace: KeySpace) -> None:
        """Keep the text of a key space, for ``keyspaces``."""
        with self._using():
            self._keyspaces[keyspace.digest] = keyspace

    def keyspaces(self) -> dict[bytes, KeySpace]:
        """Return every key space described in this store, by digest."""
        with self._using():
            return dict(self._keyspaces)

    def stats(self) -> StoreStats:
        """Return occupancy and totals."""
        with self._using():
            return StoreStats(
                capacity_blocks=len(self._pool),
                committed_blocks=len(self._entries),
                reserved_blocks=len(self._writing),
                evicted_blocks_total=self._num_evicted,
                curbed_blocks_total=self._num_curbed,
                over_share_blocks_total=self._num_over_share,
                capacity_bytes=self._pool.nbytes,
            )

    def close(self) -> None:
        """End all leases and forget everything. Idempotent."""
        with self._lock:
            self._is_open = False
            self._entries.clear()
            self._writing.clear()
            self._pool = self._pool[:0]  # the memory goes with the last lease

    def check_open(self) -> None:
        """Make sure that the store was not closed."""
        with self._using():
            pass

    def check_lease(self, lease: _MemoryWriteLease) -> None:
        """Make sure that a write lease goes on."""
        with self._lock:
            self._check_lease(lease)

    def publish(self, lease: _MemoryWriteLease, without: Collection[int]) -> int:
        """Make the blocks of a lease visible, but for some, and end it."""
        with self._lock:
            self._check_lease(lease)
            entries, left = {}, []
            for at, slot in enumerate(lease.slots.slots.tolist()):
                key, checksum = lease.keys[at], lease.checksums[at]
                if at in without:
                    left.append(slot)
                elif checksum is None:
                    raise ValueError(f"block {key.hex()} was not sealed")
                else:
                    nbytes, tenant = lease.slots.block_bytes, self._writing[key]
                    entries[key] = _Entry(slot, nbytes, checksum, tenant)
            self._written(lease)
            self._free.extend(reversed(left))
            self._entries |= entries
            self._moments |= dict(zip(lease.keys, lease.moments, strict=True))
            for at in without:
                del self._moments[lease.keys[at]]
            self._published(list(entries))
            lease.has_ended = True
            return len(entries)

    def give_back(self, lease: _MemoryWriteLease) -> None:
        """Free the slots of a lease that goes on."""
        with self._lock:
            if not lease.has_ended and self._is_open:
                self._written(lease)
                self._free.extend(reversed(lease.slots.slots.tolist()))
            lease.has_ended = True

    def gone(self, keys: Sequence[PackedKey], entries: Sequence[_Entry]) -> list[bool]:
        """Return which keys no longer mean these commits."""
        with self._using():
            pairs = zip(keys, entries, strict=True)
            return [self._entries.get(key) is not entry for key, entry in pairs]

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if not self._is_open:
                raise StoreUnavailableError("the store is closed")
            yield

    def _check_lease(self, lease: _MemoryWriteLease) -> None:
        if lease.has_ended or not self._is_open:
            raise LeaseExpiredError("the write lease has ended")

    def _written(self, lease: _MemoryWriteLease) -> None:
        for key in lease.keys:
            del self._writing[key]

    def _published(self, keys: Sequence[PackedKey]) -> None:
        """Do nothing; a store that keeps less lets go of what was committed."""

    def _moments_of(self, uses: Uses | None, before: list[int]) -> list[int]:
        """Return when blocks count as used; now, the first of them last, if not said."""
        count = len(before)
        if uses is None:
            first = max(self._clock_ns() - count, self._latest) + 1
            self._latest = first + count - 1
            return list(range(self._latest, first - 1, -1))
        now = self._clock_ns()
        moments: list[int] = uses.moments.tolist()
        if max(moments, default=0) <= now:
            return moments
        room = self._most_retained - sum(each > now for each in self._moments.values())
        moments, num_curbed = curb(moments, before, now, room)
        self._num_curbed += num_curbed
        return moments

    def _make_room(self, wanted: list[Claim], kept: set[PackedKey]) -> Room:
        """Evict what must go for blocks that want a slot, and none of *kept*."""
        if len(wanted) <= len(self._free) and not any(each.tenant for each in wanted):
            return Room({each.key for each in wanted}, [], 0)  # as ``choose`` would
        shares = Counter(self._writing.values())
        shares.update(entry.tenant for entry in self._entries.values())
        stored = [
            Claim(key, self._moments[key], entry.tenant)
            for key, entry in self._entries.items()
            if key not in kept
        ]
        room = choose(wanted, stored, len(self._free), shares, self._most_of_tenant)
        self._num_evicted += self._forget(room.victims)
        self._num_over_share += room.num_over_share
        if wanted and not room.granted:
            raise StoreFullError("every slot is being written, or used later")
        return room

    def _forget(self, keys: Sequence[PackedKey]) -> int:
        gone = [self._entries.pop(key) for key in keys if key in self._entries]
        for key in keys:
            self._moments.pop(key, None)
        self._free.extend(entry.slot for entry in reversed(gone))
        return len(gone)
