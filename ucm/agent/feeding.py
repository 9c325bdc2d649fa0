# SPDX-License-Identifier: Apache-2.0
"""Who writes the node's ledger: one that follows the slab's changes, and tiers that tell."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import anyio

from ucm.agent.calls import Blocking, Parts
from ucm.agent.ledger import Ledger
from ucm.backends.watched import WatchedBackend
from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.stores.abc import Cursor, Store

__all__ = ["SLAB", "feed_slab", "feed_tiers"]

SLAB: Final = 0
"""Its number among the media."""
_POLL_S: Final = 0.05


async def feed_tiers(ledger: Ledger, tiers: Sequence[WatchedBackend]) -> None:
    """Have tiers tell a ledger, what they have first; others have their turn amid that."""
    gone: list[set[PackedKey]] = [set() for _ in tiers]
    """What went meanwhile."""

    def tell(at: int, key: PackedKey, is_there: bool) -> None:  # noqa: FBT001 - as a backend tells it
        _tell(ledger, SLAB + 1 + at, key, is_there)
        if gone and not is_there:
            gone[at].add(key)

    with ledger.lists():
        found = [tier.watch(partial(tell, at)) for at, tier in enumerate(tiers)]
        for medium, tier in enumerate(tiers, SLAB + 1):
            if not tier.is_told:
                ledger.guess(medium)
        for at, keys in enumerate(found):
            async for some in Parts(keys):
                for key in some:
                    if key not in gone[at]:
                        ledger.stored(SLAB + 1 + at, key)
        gone.clear()


def _tell(ledger: Ledger, medium: int, key: PackedKey, is_there: bool) -> None:  # noqa: FBT001 - likewise
    if is_there:
        ledger.stored(medium, key)
    else:
        ledger.removed(medium, key)


async def feed_slab(ledger: Ledger, store: Store, call: Blocking) -> None:
    """Tell a ledger what is in a slab, and what comes and goes there, until cancelled."""
    cursor: Cursor | None = None
    told: set[PackedKey] = set()
    unlisted: set[PackedKey] = set()
    """Of these, while it is listed anew, what was not seen again."""
    with ExitStack() as listing:
        listing.enter_context(ledger.lists())
        while True:
            try:
                found = await call(partial(store.changes, cursor))
            except StoreUnavailableError:  # who serves the slab knows when it is lost
                await anyio.sleep(_POLL_S)
                continue
            cursor = found.cursor
            if found.begins:
                unlisted = told.copy()
            changes = [(change.key, bool(change.nbytes)) for change in found.told]
            unlisted.difference_update(key for key, _ in changes)
            if found.is_all:
                changes += [(key, False) for key in unlisted]
                unlisted.clear()
            for key, is_there in changes:
                (told.add if is_there else told.discard)(key)
                _tell(ledger, SLAB, key, is_there)
            if found.is_all:
                listing.close()
                await anyio.sleep(_POLL_S)
