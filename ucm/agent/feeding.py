# SPDX-License-Identifier: Apache-2.0
"""Who writes the node's ledger: one that follows the slab's changes, and tiers that tell."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio

from ucm.agent.calls import Blocking
from ucm.agent.ledger import Ledger
from ucm.backends.watched import WatchedBackend
from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.stores.abc import Cursor, Store

__all__ = ["SLAB", "feed_slab", "feed_tiers"]

SLAB: Final = 0
"""Its number among the media."""
_POLL_S: Final = 0.05


def feed_tiers(ledger: Ledger, tiers: Sequence[WatchedBackend]) -> None:
    """Have tiers tell a ledger, what they have first."""
    for medium, tier in enumerate(tiers, SLAB + 1):
        for key in tier.watch(partial(_tell, ledger, medium)):
            ledger.stored(medium, key)


def _tell(ledger: Ledger, medium: int, key: PackedKey, is_there: bool) -> None:  # noqa: FBT001 - as a backend tells it
    if is_there:
        ledger.stored(medium, key)
    else:
        ledger.removed(medium, key)


async def feed_slab(ledger: Ledger, store: Store, call: Blocking) -> None:
    """Tell a ledger what is in a slab, and what comes and goes there, until cancelled."""
    cursor: Cursor | None = None
    is_listing = False
    while True:
        try:
            found = await call(partial(store.changes, cursor))
        except StoreUnavailableError:  # who serves the slab knows when it is lost
            await anyio.sleep(_POLL_S)
            continue
        cursor = found.cursor
        if found.begins:
            is_listing = True
            ledger.list_anew(SLAB)
        for change in found.told:
            _tell(ledger, SLAB, change.key, bool(change.nbytes))
        if found.is_all:
            if is_listing:
                is_listing = False
                ledger.listed(SLAB)
            await anyio.sleep(_POLL_S)
