# SPDX-License-Identifier: Apache-2.0
"""
What an agent does for one slab: follows its changes, spills, fetches what is wanted, and forgets.

Whoever wants blocks forgotten has taken them out of the slab before. They go from each tier, behind what
is being put there. What is on its way from a tier by the end of that lands nowhere, and what had landed just
before is taken out of the slab again. What is saved anew meanwhile may go as well: a miss, and no more. A
tier is asked once; what it may still have is counted.

Threading: all of it runs on one loop; the slab's verbs are called on a few threads.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from ucm.agent.admission import Admission
from ucm.agent.budget import Budget
from ucm.agent.calls import Blocking
from ucm.agent.fetch import Fetcher
from ucm.agent.protocol import LONGEST_S
from ucm.agent.spill import Spiller
from ucm.backends._many import together
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import Cursor, Store

__all__ = ["AgentCore", "Forgetting"]

_FIRST: Final = itemgetter(0)
_HAS_MUCH: Final = attrgetter("has_much")
_POLL_S: Final = 0.05
_MOST_FAILED: Final = 10
"""Looks at the changes of a slab in a row; who cannot look so often has lost it."""
_BUDGET_SHARE: Final = 8
"""Of this many slots of a whole slab one may be for fetches: half of what may be retained, where
blocks of one size have it for themselves."""
_TROUBLES: Final = (
    *(Reason.STORE_FULL, Reason.UNAVAILABLE, Reason.ERROR, Reason.QUEUE_BYTES),
)
"""Reasons for which a block is not spilled that somebody can do something about."""
_MOST_FORGOTTEN: Final = 1 << 20
"""Blocks that are being forgotten at a time; beyond it tiers keep theirs."""
_LEAST_FORGOTTEN: Final = 1 << 10
"""A question counts as so many, so that there are no more than a thousand."""
_FORGOTTEN_AT_ONCE: Final = 256
"""Bounds how long the slab's lock is held."""


@attrs.define(eq=False)
class Forgetting:
    """
    Blocks that are being forgotten.

    Args:
        keys: Distinct ones.
        left: Numbers of the tiers that may still have some.
    """

    keys: Sequence[PackedKey]
    left: set[int]
    taken: set[PackedKey] = attrs.Factory(set)
    """Those that a tier had."""
    over: anyio.Event = attrs.Factory(anyio.Event)


class AgentCore:
    """
    Moves blocks between a slab and its tiers.

    Args:
        store: The slab; closed by its owner.
        tiers: The first is asked first; each gets all that is spilled.
        call: For the slab's verbs.
        most_waiting: Blocks of each tier's backlog.
        rules: What each tier takes; all of them everything, if left out.
    """

    def __init__(
        self,
        store: Store,
        tiers: Sequence[BreakerBackend],
        call: Blocking,
        *,
        most_waiting: int = 1 << 16,
        rules: Sequence[Admission] = (),
    ) -> None:
        # Of all that there may be: memory comes, and other sizes of blocks come and go.
        slots = store.stats().capacity_bytes // store.capabilities.max_block_bytes
        self.spillers = [
            Spiller(store, tier, call, most_waiting, rule)
            for tier, rule in zip(
                tiers, rules or [Admission.ALL] * len(tiers), strict=True
            )
        ]
        self.fetcher = Fetcher(
            *(store, tiers, call, Budget(max(1, slots // _BUDGET_SHARE))),
            why_absent=self._why_absent,
            brought=lambda number, keys: self.spillers[number].brought(keys),
        )
        self.fetch, self.drop = self.fetcher.fetch, self.fetcher.drop
        """Bring what is wanted, within ``run`` only; and give up what a want has."""
        self.max_block_bytes = store.capabilities.max_block_bytes
        self.store = store
        self._call = call
        self._cursor: Cursor | None = None
        self._reading = anyio.Lock()
        self._forgettings: set[Forgetting] = set()
        self._tasks: TaskGroup | None = None

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Work until cancelled, or until the slab is lost; calls *ready* once."""
        async with anyio.create_task_group() as self._tasks:
            for spiller in self.spillers:
                self._tasks.start_soon(spiller.run)
            self._tasks.start_soon(self.fetcher.run, ready)
            await self._follow()
            self._tasks.cancel_scope.cancel()

    def forget(self, keys: Sequence[PackedKey]) -> Forgetting:
        """Have tiers part with blocks, whoever waits for that; within ``run`` only."""
        distinct = list(dict.fromkeys(keys))
        forgetting = Forgetting(distinct, set(range(len(self.spillers))))
        sizes = [len(each.keys) for each in (*self._forgettings, forgetting)]
        if sum(max(size, _LEAST_FORGOTTEN) for size in sizes) > _MOST_FORGOTTEN:
            for spiller in self.spillers:
                spiller.counts.unforgotten += len(distinct)
            forgetting.over.set()
            return forgetting
        assert self._tasks is not None
        self._forgettings.add(forgetting)
        self._tasks.start_soon(self._forget, forgetting)
        return forgetting

    async def _forget(self, forgetting: Forgetting) -> None:
        keys = forgetting.keys

        async def forget_in(number: int) -> None:
            spiller = self.spillers[number]
            if await spiller.forget(keys, forgetting.taken, LONGEST_S):
                forgetting.left.discard(number)

        try:
            async with self.fetcher.register.keep_out(keys):
                for at in range(0, len(keys), _FORGOTTEN_AT_ONCE):
                    landed = keys[at : at + _FORGOTTEN_AT_ONCE]
                    with contextlib.suppress(StoreUnavailableError):
                        await self._call(partial(self.store.forget, landed))
                await together(
                    [partial(forget_in, number) for number in forgetting.left]
                )
        finally:
            self._forgettings.discard(forgetting)
            forgetting.over.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to spill to a tier that answers, or to forget."""
        return not self._forgettings and not any(
            spiller.is_served and not spiller.is_idle for spiller in self.spillers
        )

    def totals(self) -> dict[str, object]:
        """Return what was counted since the start, as plain values."""
        return {
            "spilled": [spiller.told() for spiller in self.spillers],
            "fetched": self.fetcher.told(),
        }

    def troubles(self) -> Counter[tuple[int, Reason]]:
        """Return how many blocks each tier did not take, damaged or kept, by its number and why."""
        found: Counter[tuple[int, Reason]] = Counter()
        for number, spiller in enumerate(self.spillers):
            for reason in _TROUBLES:
                found[number, reason] += spiller.counts.dropped[reason]
            found[number, Reason.KEPT] += spiller.counts.unforgotten
        for number, count in self.fetcher.counts.damaged.items():
            found[number, Reason.CORRUPT] += count
        return found

    def _why_absent(self, key: PackedKey, tiers: Sequence[int]) -> Reason:
        """Return why none of these tiers has a block: one that took it may have lost it."""
        refused = [self.spillers[number].admitter.refused(key) for number in tiers]
        return Reason.ADMISSION if refused and all(refused) else Reason.ABSENT

    async def drain(self) -> None:
        """Take in what was committed by now; wait until it is spilled, and others forgotten."""
        with contextlib.suppress(StoreUnavailableError):  # what is known of is spilled
            await self._take_changes()
        for forgetting in list(self._forgettings):
            await forgetting.over.wait()
        for spiller in self.spillers:
            await spiller.drained()

    async def _follow(self) -> None:
        num_failed = 0
        while num_failed < _MOST_FAILED:
            try:
                await self._take_changes(is_patient=True)
                num_failed = 0
            except StoreUnavailableError:  # for a moment, or for good
                num_failed += 1
            await anyio.sleep(_POLL_S)

    async def _take_changes(self, *, is_patient: bool = False) -> None:
        """
        Offer and withdraw what came and went; a listing, if need be, as fast as it is spilled.

        One that had to begin anew, as more has changed meanwhile than the slab remembers, waits
        for nobody: else it might never end, and what changes is told of behind it.
        """
        is_all, num_begun = False, 0
        while not is_all:
            while num_begun == 1 and is_patient and any(map(_HAS_MUCH, self.spillers)):  # noqa: ASYNC110 - no event
                await anyio.sleep(_POLL_S)
            async with self._reading:
                found = await self._call(lambda: self.store.changes(self._cursor))
                self._cursor, is_all = found.cursor, found.is_all
                num_begun += found.begins
                is_there = [bool(change.nbytes) for change in found.told]
                kinds = zip(is_there, found.told, strict=True)
                for is_stored, alike in itertools.groupby(kinds, _FIRST):
                    changes = [change for _, change in alike]
                    for spiller in self.spillers:
                        if is_stored:
                            spiller.offer(changes)
                        else:
                            spiller.withdraw([change.key for change in changes])
