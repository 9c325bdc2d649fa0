# SPDX-License-Identifier: Apache-2.0
"""
The slab store's verbs.

Threading. Every verb may be called from any thread. Those that only look (``match``,
``contains``, ``touch``, ``read``) take no lock; those that change the index hold its
lock for the length of one change. The set of open leases is guarded by a lock of its
own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace, PackedKey
from ucm.config import HugePages, StoreConfig, Verify
from ucm.errors import BlockNotFoundError, ConfigError
from ucm.fates import Fate, Told
from ucm.plan import HostSlots
from ucm.stores.abc import (
    Changes,
    Cursor,
    Store,
    StoreCapabilities,
    StoreGrowth,
    StoreStats,
)
from ucm.stores.slab._audit import audit
from ucm.stores.slab._chains import NO_SLOT
from ucm.stores.slab._changes import changes_since
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._keyspaces import describe, read_all
from ucm.stores.slab._layout import Limits, Sighting, Word
from ucm.stores.slab._leases import SlabReadLease, SlabWriteLease, Verified
from ucm.stores.slab._memory import MemoryWishes
from ucm.stores.slab._opened import OpenedSlab
from ucm.stores.slab._peers import Peer, open_peers
from ucm.stores.slab._survey import SlabSurvey, told_as_store_error
from ucm.uses import Uses

__all__ = ["SlabStore"]

_LOOK_UP_STEP = 1024
_FEW = 12
"""So few keys are looked at one by one, and of more the first is: most differ there."""
_SCHEDULER_WAITS = 0.004
_TOTALS = (Word.NUM_EVICTED, Word.NUM_CURBED, Word.NUM_OVER_SHARE)


class SlabStore(Store):
    """
    Blocks in fixed slots of one file that all processes of a node share.

    The slots are memory, and end with the machine. There is no server: each process that opens the directory joins, and may die at
    any moment without harm to the others.

    Args:
        path: The slab's directory; made if its parent exists.
        capacity_bytes: Of all slots together, for the whole node.
        block_bytes: The largest block to be stored.
        index_only: Do not map the slots; ``reserve`` and ``read`` are refused. A slab
            that is there is taken whatever its capacity: looking blocks up asks for none.
        huge_pages: Whether the slots come in huge pages.
        numa: On which nodes of the machine they lie.
        verify: How often the bytes of a block are held against its checksum.
        open_timeout: Seconds to wait at most for others that create the slab.
        lock_timeout: Seconds to wait at most for others that change the index.
        retain_share: Slots that may count as used at a moment still to come, of all that
            blocks of this size can have (see ``SlotIndex.num_to_have``);
            beyond it that moment is now.
        tenant_share: Slots that one tenant may have, of as many; beyond it the tenant makes
            room among its own. Of more than 65535 tenants some share a share.
        joins_only: Take a slab that is there as it is; make none, and cut none anew.

    Raises:
        ConfigError: ``store.path``, ``store.capacity``, ``store.block_bytes``,
            ``store.huge_pages`` or ``store.numa`` cannot be used;
            says why and what to do.
        StoreUnavailableError: Others held a lock for too long.
    """

    def __init__(
        self,
        *,
        path: str,
        capacity_bytes: int,
        block_bytes: int,
        index_only: bool = False,
        huge_pages: HugePages = HugePages.AUTO,
        numa: str = "off",
        verify: Verify = Verify.ALWAYS,
        open_timeout: float = 120.0,
        lock_timeout: float = 5.0,
        retain_share: float = 0.25,
        tenant_share: float = 1.0,
        joins_only: bool = False,
    ) -> None:
        self._slab = OpenedSlab(
            Path(path),
            Geometry.fit(capacity_bytes, block_bytes),
            index_only=index_only,
            open_timeout=open_timeout,
            lock_timeout=lock_timeout,
            wishes=MemoryWishes(huge_pages, numa),
            joins_only=joins_only,
        )
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            native_buffers=True,
            max_block_bytes=self._slab.geometry.slot_bytes,
            caveat=self._slab.caveat,
        )
        self._slab.index.limits = Limits(retain_share, tenant_share)
        self._before = [int(self._slab.index.header[word]) for word in _TOTALS]
        self._verified: Verified | None = None
        if verify is Verify.ONCE and not index_only:
            self._verified = np.zeros(self._slab.geometry.num_slots, dtype=np.uint64)
        self._leases: set[SlabWriteLease] = set()
        self._peers: tuple[Peer, ...] = ()
        self._leases_lock = threading.Lock()

    @classmethod
    def open_configured(
        cls, config: StoreConfig, *, block_bytes: int, index_only: bool
    ) -> "SlabStore":
        """
        Open the slab that a configuration names.

        A process that only asks the index gives up on its lock within a moment: the
        scheduler must not wait for a process that was stopped.
        """
        return cls(
            path=config.path,
            capacity_bytes=config.capacity,
            block_bytes=block_bytes,
            index_only=index_only,
            lock_timeout=_SCHEDULER_WAITS if index_only else 5.0,
            retain_share=config.retain_share,
            tenant_share=config.tenant_share,
            huge_pages=config.huge_pages,
            numa=config.numa,
            verify=config.verify,
        )

    @classmethod
    def join(
        cls, path: Path, *, block_bytes: int, index_only: bool = False
    ) -> "SlabStore":
        """
        Open a slab that is there, as large and for as long as it is; never make one.

        Args:
            path: Its directory.
            block_bytes: The largest block to be looked up or stored.
            index_only: See the class.

        Raises:
            StoreUnavailableError: There is no slab that is ours, its extents are smaller
                than such a block, or others held a lock for too long.
        """
        with SlabSurvey(path) as survey:
            manifest = survey.manifest
        with told_as_store_error(path):
            return cls(
                path=str(path),
                capacity_bytes=manifest.data_bytes,
                block_bytes=block_bytes,
                index_only=index_only,
                open_timeout=10.0,
                joins_only=True,
            )

    @property
    def is_growing(self) -> bool:
        """Whether more memory may still come to it in the background."""
        populator = self._slab.populator
        return populator is not None and populator.is_growing

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do; constant while it is open."""
        return self._capabilities

    @property
    def directory(self) -> Path:
        """Its own; ``status/`` below it belongs to who serves there."""
        return self._slab.root

    @property
    def buffers(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The slots."""
        return () if self._slab.pool is None else (self._slab.pool,)

    def watch(self, tell: Callable[[StoreGrowth], None]) -> None:
        """Have *tell* called as memory comes; see ``Store``."""
        self._slab.watch(tell)

    def hash_on(self, most_threads: int) -> None:
        """Let so many threads compute checksums at once; see ``Store``."""
        self._slab.most_hashing = most_threads

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed; takes no lock."""
        self._slab.check_index()
        few = keys if len(keys) <= _FEW else keys[:1]
        num_before = self._slab.index.num_there(few)
        if num_before < len(few):
            return num_before
        for seen in self._look_up(keys[num_before:]):
            first = int(seen.committed.argmin())
            if not seen.committed[first]:
                return num_before + first
            num_before += len(seen.committed)
        return num_before

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether it is committed; takes no lock."""
        self._slab.check_index()
        if len(keys) <= _FEW:
            return [slot != NO_SLOT for slot in map(self._slab.index.slot_of, keys)]
        return [
            each for seen in self._look_up(keys) for each in seen.committed.tolist()
        ]

    def fates(self, keys: Sequence[PackedKey]) -> list[Told]:
        """Return what has become of blocks, for people; takes no lock."""
        self._slab.check_index()
        return list(map(self._slab.index.fate_of, keys))

    def everywhere(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether any class has it; see ``Store``. Takes no lock."""
        return [
            is_ours
            or any(peer.fate_of(key).fate is Fate.STORED for peer in self._peers)
            for key, is_ours in zip(keys, self.contains(keys), strict=True)
        ]

    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """Mark blocks as used, see ``Store``; takes no lock."""
        self._slab.check_index()
        index = self._slab.index
        moments = index.stamps_of(uses, len(keys))
        if len(keys) <= _FEW:
            slots = np.array([index.slot_of(key) for key in keys], dtype=np.int64)
            index.touch(slots[slots != NO_SLOT], moments[slots != NO_SLOT])
            return
        start = 0
        for seen in self._look_up(keys):
            stop = start + len(seen.slots)
            index.touch(seen.slots[seen.committed], moments[start:stop][seen.committed])
            start = stop

    def _look_up(self, keys: Sequence[PackedKey]) -> Iterator[Sighting]:
        """Look keys up as they are asked for; many at once would leave the caches."""
        index = self._slab.index
        for start in range(0, len(keys), _LOOK_UP_STEP):
            yield index.glance(index.batch(keys[start : start + _LOOK_UP_STEP]))

    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> SlabWriteLease:
        """Lease one slot for each new key; see ``Store``."""
        slab = self._slab
        slab.check()
        if slab.pool is None:
            raise ValueError("this store was opened for its index only")
        if not 1 <= block_bytes <= self._capabilities.max_block_bytes:
            raise ValueError(
                f"blocks of {block_bytes} bytes for slots of "
                f"{self._capabilities.max_block_bytes}"
            )
        if len(set(keys)) != len(keys):
            raise ValueError("the keys of a reservation must be distinct")
        if uses is not None:  # under a lock it would be taken for damage
            uses.check(len(keys))
        with self._leases_lock:
            owed = [lease for lease in self._leases if lease.is_owed]
        for lease in owed:
            lease.discard()
            if lease.is_owed:  # nor would the lock be free for the others
                break
        batch = slab.index.batch(keys)
        grant = slab.supply.reserve(batch, int(block_bytes), slab.owner_id, uses)
        slots = HostSlots(slab.pool, grant.slots, block_bytes)
        lease = SlabWriteLease(slab, tuple(keys), grant, slots, self._forget)
        with self._leases_lock:
            self._leases.add(lease)
        return lease

    def read(self, keys: Sequence[PackedKey]) -> SlabReadLease:
        """Open committed blocks for reading; see ``Store``. Takes no lock."""
        slab = self._slab
        slab.check()
        if slab.pool is None:
            raise ValueError("this store was opened for its index only")
        index = slab.index
        seen = index.look_up(index.batch(keys))
        committed = seen.committed.tolist()
        if False in committed:
            raise BlockNotFoundError(keys[committed.index(False)])
        block_bytes = slab.geometry.slot_bytes
        if len(keys):  # what a damaged record says is found by ``verify``
            block_bytes = max(1, min(int(seen.nbytes[0]), block_bytes))
        slots = HostSlots(slab.pool, seen.slots, block_bytes)
        return SlabReadLease(slab, tuple(keys), seen, slots, self._verified)

    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """Make committed blocks invisible and free their slots; return how many."""
        self._slab.check()
        return self._slab.index.forget(self._slab.index.batch(keys), fate)

    def clear(self, prefix: bytes) -> int:
        """Forget every committed block whose packed key starts with *prefix*."""
        self._slab.check()
        return self._slab.index.clear(prefix)

    def describe(self, keyspace: KeySpace) -> None:
        """Keep the text of a key space beside the blocks; the newest 64 are kept."""
        self._slab.check()
        describe(self._slab.directory, keyspace)

    def keyspaces(self) -> dict[bytes, KeySpace]:
        """
        Return every key space that is kept, by digest.

        Raises:
            StoreError: A file is damaged, or named after another key space.
            StoreUnavailableError: A file cannot be read.
        """
        self._slab.check()
        with contextlib.suppress(ConfigError, OSError):  # what is described counts more
            self._peers = open_peers(self._slab.directory, self._peers)
        return read_all(self._slab.directory)

    def stats(self) -> StoreStats:
        """Return occupancy and totals, both for the whole node."""
        self._slab.check()
        header, geometry = self._slab.index.header, self._slab.geometry
        evicted, curbed, over_share = (
            int(header[word]) - before
            for word, before in zip(_TOTALS, self._before, strict=True)
        )
        return StoreStats(
            capacity_blocks=self._slab.index.num_to_have(),
            committed_blocks=int(header[Word.NUM_COMMITTED]),
            reserved_blocks=int(header[Word.NUM_RESERVED]),
            evicted_blocks_total=evicted,
            curbed_blocks_total=curbed,
            over_share_blocks_total=over_share,
            capacity_bytes=geometry.data_bytes,
            populated_bytes=min(
                self._slab.arena.num_populated * geometry.extent_bytes,
                geometry.data_bytes,
            ),
        )

    def changes(self, cursor: Cursor | None) -> Changes:
        """Return what was stored and removed since; see ``Store``."""
        self._slab.check()
        return changes_since(self._slab.index, cursor)

    def audit(self) -> list[str]:
        """
        Check that records, chains, free stack and counts agree.

        Returns:
            What is wrong, one sentence each; nothing is changed.
        """
        self._slab.check()
        return audit(self._slab.index)

    def close(self) -> None:
        """End all leases and leave the slab; committed blocks stay. Idempotent."""
        self._slab.close()  # frees whatever we had reserved
        with self._leases_lock:
            leases = list(self._leases)
        for lease in leases:
            lease.discard()

    def _forget(self, lease: SlabWriteLease) -> None:
        with self._leases_lock:
            self._leases.discard(lease)
