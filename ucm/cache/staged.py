# SPDX-License-Identifier: Apache-2.0
"""
Stored blocks in memory of the host's own, verified, before anybody asks for them.

For hosts that must know that a load succeeds before they give memory to it, or that take
memory back from a load that lasts. Such a host opens a cache over blocks that are for this
alone, its *slots*: what is staged there can be copied on and cannot fail any more.

Threading: one thread at a time.
"""

import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from ucm.cache.sync import Cache, Load
from ucm.errors import DeviceTimeoutError
from ucm.prefixes import Place
from ucm.threads import SYSTEM, Threads

__all__ = ["Staged"]

_REST: Final = 4
"""For how many times as long as a store was waited for in vain it is hardly waited for."""
_BRIEFLY: Final = 1 / 16
"""Part of a timeout that is waited meanwhile: enough for a store that answers again."""


class Staged:
    """
    Which keys are in which slot; room is made of what was used longest ago.

    Args:
        cache: Over the slots.
        num_slots: How many there are.
        threads: Where the clock comes from.
        tenant: Whose the blocks are, as ``Place`` says.
    """

    def __init__(
        self,
        cache: Cache,
        num_slots: int,
        threads: Threads = SYSTEM,
        *,
        tenant: int = 0,
    ) -> None:
        self._cache = cache
        self._place = Place(tenant=tenant)
        self._clock = threads.monotonic
        self._free = list(range(num_slots - 1, -1, -1))
        self._verified: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        """Of these, what nobody holds, by last use."""
        self._held: Counter[bytes] = Counter()
        self._loads: list[tuple[Load, list[bytes], list[int]]] = []
        self._rests_until = 0.0

    def stage(self, keys: Sequence[bytes], timeout: float) -> int:
        """
        Have stored blocks brought into slots.

        Behind a wait that was in vain others wait briefly for a while: a host asks for
        many prompts in a row, and each would wait for a store that hangs.

        Args:
            keys: Of blocks that follow each other.
            timeout: Seconds to wait; what is not there by then goes on, and is staged
                for who asks later.

        Returns:
            How many, from the first on, are staged.
        """
        now = self._clock()
        until = now + timeout * (_BRIEFLY if now < self._rests_until else 1)
        self._collect()
        if self._leading(keys) < len(keys):
            self._fetch(keys, until)
        leading = self._leading(keys)
        if leading < len(keys) and self._rests_until <= now < until <= self._clock():
            self._rests_until = until + _REST * timeout
        for key in reversed(keys[:leading]):  # the first is the last to go
            if key in self._idle:
                self._idle.move_to_end(key)
        return leading

    def hold(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return the slots of keys, if all are staged; they stay so until ``release``."""
        if self._leading(keys) < len(keys):
            return None
        self._held.update(keys)
        for key in keys:
            self._idle.pop(key, None)
        return [self._verified[key] for key in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        """End a hold."""
        for key in reversed(keys):  # and no other: a host may hold thousands of prompts
            self._held[key] -= 1
            if not self._held[key]:
                self._idle[key] = None
            if self._held[key] <= 0:
                del self._held[key]

    def forget(self) -> None:
        """Have nothing staged any more but what is held."""
        self._collect()
        self._reclaim(len(self._idle), frozenset())

    def _leading(self, keys: Sequence[bytes]) -> int:
        missing = (at for at, key in enumerate(keys) if key not in self._verified)
        return next(missing, len(keys))

    def _fetch(self, keys: Sequence[bytes], until: float) -> None:
        """Have loaded what slab or tiers have and is not on its way; wait for all of it."""
        left = max(until - self._clock(), 0)
        found = self._cache.match(keys, timeout=left)
        self._begin(keys[:found])  # it comes while tiers are asked for the rest
        left = until - self._clock()
        if found < len(keys) and left > 0:
            fetched = self._cache.prefetch(keys, timeout=left, place=self._place)
            if fetched.found > found:
                found = fetched.found
                self._begin(keys[:found])
            else:
                fetched.give_up()  # what it was asked for is on its way already
        asked = frozenset(keys[:found])
        for load, loading, _ in self._loads:
            if not asked.isdisjoint(loading):
                load.wait_until_over(max(until - self._clock(), 0))
        self._collect()

    def _begin(self, keys: Sequence[bytes]) -> None:
        """Have loaded what is stored and neither staged nor on its way."""
        coming = {key for _, loading, _ in self._loads for key in loading}
        there = self._verified
        wanted = [key for key in keys if key not in coming and key not in there]
        self._reclaim(len(wanted) - len(self._free), frozenset(keys))
        wanted = wanted[: len(self._free)]
        if wanted:
            slots = [self._free.pop() for _ in wanted]
            load = self._cache.begin_load(wanted, slots, place=self._place)
            self._loads.append((load, wanted, slots))

    def _collect(self) -> None:
        """Take note of loads that are over."""
        over = [each for each in self._loads if each[0].is_over]
        self._loads = [each for each in self._loads if each not in over]
        for load, keys, slots in over:
            # One that is stuck may still write: nobody gets its slots again.
            with contextlib.suppress(DeviceTimeoutError):
                leading = load.wait().leading
                self._verified.update(zip(keys[:leading], slots[:leading], strict=True))
                self._idle.update(dict.fromkeys(keys[:leading]))
                self._free += slots[leading:]

    def _reclaim(self, count: int, kept: frozenset[bytes]) -> None:
        """Take slots of what was used longest ago, *count* at most."""
        if count <= 0:
            return
        spare = (key for key in self._idle if key not in kept)
        for key in list(itertools.islice(spare, count)):
            del self._idle[key]
            self._free.append(self._verified.pop(key))
