# SPDX-License-Identifier: Apache-2.0
"""What engines want of a slab that has tiers, and the slab as fetches use it."""

import contextlib
import enum
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio
import attrs
import numpy as np

from ucm.agent.calls import Blocking
from ucm.agent.hits import Hits
from ucm.backends.abc import BackendCapabilities
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import StoreFullError
from ucm.reasons import Reason
from ucm.stores.abc import Store, WriteLease
from ucm.uses import Uses

__all__ = ["FetchCounts", "Left", "Slab", "Want"]

_MEMORY: Final = "none"
"""How durable a tier is that the engine would call memory, not storage."""


@attrs.define
class FetchCounts:
    """What became of wants and flights; see the module's text."""

    wants: int = 0
    begun: int = 0
    joined: int = 0
    """Keys of wants for which a flight was on its way."""
    fetched: int = 0
    stored: int = 0
    """Blocks that a save brought meanwhile."""
    failed: Counter[Reason] = attrs.Factory(Counter)
    damaged: Counter[int] = attrs.Factory(Counter)
    """Blocks by the number of the tier, whoever brought them then."""
    nbytes: int = 0
    """Of what was fetched."""

    def told(self) -> dict[str, object]:
        """Return the counts as plain values."""
        failed = {str(reason): n for reason, n in self.failed.items()}
        damaged = {str(tier): n for tier, n in self.damaged.items()}
        return attrs.asdict(self) | {"failed": failed, "damaged": damaged}


@attrs.define(eq=False)
class Want:
    """
    Blocks that a request would load.

    Args:
        keys: In the order in which they are of use: a later one needs those before.
        sizes: The bytes of each.
        deadline: On the loop's clock; what has come by then is what there is.
        hold_s: For how long behind that what was found is kept in the slab.
        compute_s: How long computing them all would take; 0: not known.
        only: Medium and locality of tiers that it may use, empty for any; None: all.
        priority: Of its slots; the lowest comes first.
        tenant: Whose share of the slab, of slots and of tiers' time it takes; 0: nobody's.
        hits: Which hits need which keys, until it is known which one is brought.
    """

    keys: Sequence[PackedKey]
    sizes: Sequence[int]
    deadline: float
    hold_s: float
    compute_s: float = 0.0
    only: Sequence[tuple[str, str]] | None = None
    priority: int = 0
    tenant: int = 0
    hits: Hits | None = None
    reach: int = 0
    """The hit that is brought; 0: none, or it had none."""
    found: int = 0
    """Keys from the start that the slab has, once it is fetched."""
    media: list[int] = attrs.Factory(list)
    """Where each of these was: 0 the slab, tiers behind it."""
    reason: Reason = Reason.NONE
    """Why it is not more."""
    num_slots: int = 0
    """Of the budget, once its flights have ended."""
    taken: anyio.Event = attrs.Factory(anyio.Event)
    """It has slots, of flights that have not ended as well."""
    is_over: bool = False
    """Dropped."""

    @property
    def stay_s(self) -> float:
        """For how many seconds from now on what is found is to be kept."""
        return max(0.0, self.deadline - anyio.current_time()) + self.hold_s

    async def stand_behind(self, others: Sequence[anyio.Event]) -> bool:
        """
        Wait until others have their slots, or it has some itself: they may wait for those.

        Returns:
            Whether all of them have.
        """
        for seated in others:
            if not seated.is_set():
                async with anyio.create_task_group() as tasks:

                    async def first(event: anyio.Event) -> None:
                        await event.wait()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(first, seated)
                    tasks.start_soon(first, self.taken)
            if not seated.is_set():
                return False
        return True

    def settle_on(self, hit: int) -> None:
        """Want what one of its hits needs, and nothing else any more."""
        assert self.hits is not None
        needed = self.hits.needed_for(hit)
        self.keys = [self.keys[at] for at in needed]
        self.sizes = [self.sizes[at] for at in needed]
        self.compute_s *= hit / self.hits.top
        self.reach = hit

    def tiers_of(self, tiers: Sequence[BreakerBackend]) -> tuple[int, ...]:
        """Return the numbers of the tiers that it may use."""
        return tuple(
            number
            for number, tier in enumerate(tiers)
            if self.only is None or _is_one_of(tier.capabilities, self.only)
        )


class Left(enum.Enum):
    """What is with a block that got no slot."""

    THERE = enum.auto()
    WRITTEN = enum.auto()
    """Another writes it."""
    FREE = enum.auto()
    """Nobody does any more, and there is a slot for it now."""
    FULL = enum.auto()


@attrs.frozen
class Slab:
    """
    The slab, as fetches use it.

    Args:
        store: Where blocks go.
        call: For its verbs.
    """

    store: Store
    call: Blocking

    async def pin(self, keys: Sequence[PackedKey], hold_s: float) -> list[bool]:
        """Keep what there is of *keys* for a while, and return which are there."""
        return await self.call(partial(self._pin, keys, hold_s))

    def _pin(self, keys: Sequence[PackedKey], hold_s: float) -> list[bool]:
        self.keep(keys, hold_s)
        return self.store.contains(keys)

    async def has(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which are there."""
        return await self.call(partial(self.store.contains, keys))

    def keep(self, keys: Sequence[PackedKey], hold_s: float) -> None:
        """Keep what there is of *keys* for a while, on a thread."""
        self.store.touch(keys, self.uses(len(keys), hold_s))

    def reserve(
        self, keys: Sequence[PackedKey], nbytes: int, tenant: int
    ) -> WriteLease:
        """Take slots, on a thread; what is kept for others, or for those before, gives none."""
        return self.store.reserve(keys, nbytes, self.uses(len(keys), 0.0, tenant))

    async def look(
        self, keys: Sequence[PackedKey], nbytes: int, tenant: int
    ) -> list[Left]:
        """Return what is with blocks of a prefix that got no slots, as far as it is of use."""
        return await self.call(partial(self._look, keys, nbytes, tenant))

    def _look(self, keys: Sequence[PackedKey], nbytes: int, tenant: int) -> list[Left]:
        """Ask for slots, and give them back: others have what gets none, or all is full."""
        free: set[PackedKey] = set()
        is_full = True
        with (
            contextlib.suppress(StoreFullError),
            self.reserve(keys, nbytes, tenant) as lease,
        ):
            free.update(lease.keys)
            is_full = len(free) + lease.num_stored < len(keys)
        if is_full and len(keys) == 1:
            return [Left.FULL]
        if is_full:  # for some; what is behind the first of these is of no use
            middle = len(keys) // 2
            found = self._look(keys[:middle], nbytes, tenant)
            if Left.FULL in found:
                return found + [Left.FULL] * (len(keys) - middle)
            return found + self._look(keys[middle:], nbytes, tenant)
        return [
            Left.THERE if is_there else Left.FREE if key in free else Left.WRITTEN
            for key, is_there in zip(keys, self.store.contains(keys), strict=True)
        ]

    def uses(self, count: int, hold_s: float, tenant: int = 0) -> Uses:
        """Return when so many blocks of a prefix count as used that are to stay so long."""
        until = time.monotonic_ns() + int(hold_s * 1e9)
        return Uses(until - np.arange(count), np.full(count, tenant, dtype=np.uint32))


def _is_one_of(can: BackendCapabilities, only: Sequence[tuple[str, str]]) -> bool:
    """Return whether a tier is meant by one of these media and localities."""
    media = "", can.medium.lower(), "cpu" if can.durable == _MEMORY else "storage"
    places = "", "remote" if can.shared else "local"
    return any(medium in media and place in places for medium, place in only)
