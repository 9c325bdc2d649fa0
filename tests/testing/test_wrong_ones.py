# SPDX-License-Identifier: Apache-2.0
"""Stores, devices and backends that break a promise fail the contract that ships with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from tests.backends import test_memory as backends
from tests.devices import test_cpu as devices
from tests.stores import test_memory as stores
from ucm.backends.abc import Fetched, Sealed, Verdict
from ucm.backends.envelope import Envelope
from ucm.backends.memory import MemoryBackend, Shelf
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import LeaseExpiredError
from ucm.stores.leases import seals_of
from ucm.stores.memory import MemoryStore
from ucm.testing.backend_contract import BLOCK
from ucm.testing.lease_contract import NUM_BLOCKS
from ucm.testing.store_blocks import BLOCK_BYTES


class _Borrowing(MemoryBackend):
    """Keeps the memory that it was lent for a put."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self._lent: dict[bytes, Sealed] = {}

    async def put(self, blocks: Any) -> Any:
        """Keep views, and no bytes."""
        self._lent.update({each.key: each for each in blocks})
        return await super().put(blocks)

    def _get(self, key: Any, target: Any) -> Fetched:
        if super()._get(key, target).verdict is not Verdict.DONE:
            return Fetched(Verdict.ABSENT)
        block = self._lent[key]
        header = Envelope(key, len(block.data), block.checksum).encode()
        return Envelope.open(header + block.data, key, target)


class _Late(MemoryBackend):
    """Writes to the memory of a get that was cancelled."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self._owed: list[Any] = []

    async def get(self, keys: Any, targets: Any) -> Any:
        """Pay what is owed, and wait for a turn."""
        owed, self._owed = self._owed, [targets]
        for each in (target for part in owed for target in part):
            each[:1] = b"x"
        await anyio.lowlevel.checkpoint()
        self._owed = []
        return await super().get(keys, targets)


class _Silent(MemoryBackend):
    """Says that it tells all, and tells nothing."""

    def watch(self, tell: Any) -> Any:
        """Take no note."""
        return list(self.shelf.values)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (
            _Borrowing,
            backends.TestMemoryBackend.test_memory_of_a_put_is_the_callers_again,
        ),
        (_Late, backends.TestMemoryBackend.test_memory_of_a_get_is_the_callers_again),
        (_Silent, backends.TestMemoryBackend.test_what_it_watches_it_tells),
    ],
)
def test_backend_that_is_none_fails(
    kind: type[MemoryBackend], broken: Callable[..., Any], tmp_path: Path
) -> None:
    """Memory that is the caller's again is kept or written, or what is watched not told."""

    class Contract(backends.TestMemoryBackend):
        async def open(self, place: Path) -> MemoryBackend:
            return kind(Shelf(9 * 2 * BLOCK))

    with pytest.raises(AssertionError):
        anyio.run(broken, Contract(), tmp_path)


class _SealsLate(MemoryStore):
    """Computes checksums as a lease ends, whatever its slots have become."""

    def publish(self, lease: Any, without: Any) -> int:
        """Seal once more."""
        lease.checksums[:] = seals_of(lease.keys, lease.slots, range(len(lease.keys)))
        return super().publish(lease, without)


class _Elsewhere(MemoryStore):
    """Offers other memory than its slots lie in."""

    @property
    def buffers(self) -> Any:
        """Offer some."""
        return (np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8),)


class _Mute(MemoryStore):
    """Never says that its memory is there."""

    def watch(self, tell: Any) -> None:
        """Say nothing."""


class _Counting(MemoryStore):
    """Takes a look for a use."""

    def contains(self, keys: Any) -> list[bool]:
        """Touch what is there."""
        self.touch(keys)
        return super().contains(keys)


class _Short(MemoryStore):
    """Knows of no fate, and says so once."""

    def fates(self, keys: Any) -> Any:
        """Answer nothing."""
        return []


class _AsTheyLie(MemoryStore):
    """Gives the slots of a read in the order in which they lie, and verifies its own."""

    def read(self, keys: Any) -> Any:
        """Sort them."""
        lease, own = super().read(keys), super().read(keys)
        lease.slots = attrs.evolve(lease.slots, slots=np.sort(lease.slots.slots))
        lease.verify = own.verify  # type: ignore[method-assign]
        return lease


class _FewVerified(MemoryStore):
    """Verifies the first two blocks of those it is asked for."""

    def read(self, keys: Any) -> Any:
        """Leave out the others."""
        lease = super().read(keys)
        verify = lease.verify
        lease.verify = lambda start, stop: verify(start, min(start + 2, stop))  # type: ignore[method-assign]
        return lease


class _OnceVerified(MemoryStore):
    """Verifies each key once, whatever is stored there later."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._seen: set[bytes] = set()

    def read(self, keys: Any) -> Any:
        """Leave out what is known."""
        lease = super().read(keys)
        verify = lease.verify

        def look(start: int, stop: int) -> None:
            for at in range(start, stop):
                if lease.keys[at] not in self._seen:
                    verify(at, at + 1)
                    self._seen.add(lease.keys[at])

        lease.verify = look  # type: ignore[method-assign]
        return lease


class _FirstRechecked(MemoryStore):
    """Looks at the first slot of a lease only, behind its copy."""

    def read(self, keys: Any) -> Any:
        """Have the others be as they may."""
        lease, first = super().read(keys), super().read(keys[:1])
        lease.recheck = first.recheck  # type: ignore[method-assign]
        return lease


class _OneLease(MemoryStore):
    """Ends a read as another one begins."""

    _last: Any = None

    def read(self, keys: Any) -> Any:
        """End the last one."""
        if self._last is not None:
            self._last.close()
        self._last = super().read(keys)
        return self._last


class _OfNumpy(MemoryStore):
    """Counts by numpy."""

    def publish(self, *lease: Any) -> Any:
        """Count."""
        return np.int64(super().publish(*lease))


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (
            _AsTheyLie,
            stores.TestMemoryStore.test_blocks_come_in_the_order_in_which_they_are_asked_for,
        ),
        (
            _OneLease,
            stores.TestMemoryStore.test_blocks_come_in_the_order_in_which_they_are_asked_for,
        ),
        (_FewVerified, stores.TestMemoryStore.test_each_block_of_a_read_is_verified),
        (_OnceVerified, stores.TestMemoryStore.test_each_block_of_a_read_is_verified),
        (_FirstRechecked, stores.TestMemoryStore.test_recycled_slots_are_told),
        (_OfNumpy, stores.TestMemoryStore.test_numbers_are_plain_ones),
        (
            _SealsLate,
            stores.TestMemoryStore.test_bytes_that_change_behind_their_seal_are_not_served,
        ),
        (
            _Elsewhere,
            stores.TestMemoryStore.test_slots_lie_in_the_memory_that_is_offered,
        ),
        (_Mute, stores.TestMemoryStore.test_slots_lie_in_the_memory_that_is_offered),
        (_Counting, stores.TestMemoryStore.test_hints_are_aligned_with_their_keys),
        (_Short, stores.TestMemoryStore.test_hints_are_aligned_with_their_keys),
    ],
)
def test_store_that_is_none_fails(
    kind: type[MemoryStore], broken: Callable[..., Any], monkeypatch: Any
) -> None:
    """What is visible or read is not what was sealed, or a device or a scheduler is told wrong."""
    monkeypatch.setattr("ucm.testing.store_contract._LIMIT_S", 0.0)
    with (
        kind(NUM_BLOCKS, BLOCK_BYTES) as store,
        pytest.raises((AssertionError, pytest.fail.Exception, LeaseExpiredError)),
    ):
        broken(stores.TestMemoryStore(), store)


class _Told(DoneFence):
    """Tells checksums of nothing."""

    tells_digests = True

    def digests(self) -> list[int]:
        """Tell three."""
        return [0, 0, 0]


class _Deaf(DoneFence):
    """Promises to call, and does not."""

    def call_when_over(self, callback: Any) -> bool:
        """Forget the call."""
        return True


class _NeverCalls(CPUDevice):
    """Zeroes, and tells nobody."""

    def clear(self, *given: Any) -> Any:
        """Return a fence that calls nobody."""
        super().clear(*given)
        return _Deaf()


class _Unchecked(CPUDevice):
    """Zeroes those of the blocks that there are."""

    def clear(self, group_id: Any, row_ids: Any, block_ids: Any) -> Any:
        """Leave out the others."""
        there = [each for each in block_ids if 0 <= each < 8]
        return super().clear(group_id, row_ids, there)


class _Lies(CPUDevice):
    """Tells checksums of other bytes."""

    def __init__(self, num_blocks: int | None = None) -> None:
        super().__init__(num_blocks)
        self.tells_digests = True

    def scatter(self, *given: Any) -> Any:
        """Copy, and lie."""
        super().scatter(*given)
        return _Told() if len(given) > 4 else DoneFence()


class _Spoils(CPUDevice):
    """Pins memory and loses what was there."""

    def pin(self, memory: Any) -> str:
        """Zero it."""
        memory[:] = 0
        return ""


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (_NeverCalls, devices.TestCPUDevice.test_clear_calls_once_when_it_is_over),
        (_Unchecked, devices.TestCPUDevice.test_clear_refuses_what_does_not_exist),
        (
            _Lies,
            devices.TestCPUDevice.test_checksums_that_are_told_are_those_of_the_blocks,
        ),
        (_Spoils, devices.TestCPUDevice.test_pinned_memory_is_copied_like_any_other),
    ],
)
def test_device_that_is_none_fails(
    kind: type[CPUDevice], broken: Callable[..., Any], monkeypatch: Any
) -> None:
    """Blocks never come back, or what does not exist is zeroed, or checksums are wrong."""
    monkeypatch.setattr("ucm.testing.fence_contract.TIMEOUT", 0.0)

    class Contract(devices.TestCPUDevice):
        def make_device(self, num_blocks: int) -> CPUDevice:
            return kind(num_blocks)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        broken(Contract())
