# SPDX-License-Identifier: Apache-2.0
"""
What waits to be spilled to one tier, bounded and shared by tenants, and what became of blocks.

Tenants have their turns one after the other, each with as much as goes with a call; of one tenant
who came first goes first. Where there is no room, whose blocks are the most has the last one
dropped: what comes before it in a prompt is of use without it. A tenant alone may have all the room.

A step costs the same however much waits, and little for each of several blocks. There is nothing of a tenant that
has nothing here.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, KeysView, Mapping

import attrs

from ucm.blocks import PackedKey
from ucm.reasons import Reason

__all__ = ["Backlog", "SpillCounts"]


@attrs.define
class SpillCounts:
    """What became of the blocks that were offered to one tier; see ``ucm.agent.spill``."""

    offered: int = 0
    spilled: int = 0
    skipped: int = 0
    """The tier had them."""
    dropped: Counter[Reason] = attrs.Factory(Counter)
    nbytes: int = 0
    """Of what was spilled."""
    forgotten: int = 0
    """Blocks that were deleted, as somebody wanted them forgotten."""
    unforgotten: int = 0
    """Such that it may still have."""


class Backlog:
    """
    Blocks that wait.

    Args:
        most: Of them; more are dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenant_of: dict[PackedKey, int] = {}
        self._rows: OrderedDict[int, OrderedDict[PackedKey, int]] = OrderedDict()
        """By tenant the bytes of each block; whose turn is next comes first."""
        self._having: dict[int, OrderedDict[int, None]] = {}
        """Tenants by how many blocks they have here."""
        self._largest = 0
        """The largest such number."""

    def __len__(self) -> int:
        return len(self._tenant_of)

    def keys(self) -> KeysView[PackedKey]:
        """Return which blocks wait, now and later."""
        return self._tenant_of.keys()

    @property
    def is_full(self) -> bool:
        """Whether one more has another one dropped."""
        return len(self._tenant_of) >= self._most

    def add(self, key: PackedKey, nbytes: int, tenant: int) -> PackedKey | None:
        """Have a block wait that does not; return what is dropped for it, maybe itself."""
        dropped = None
        if self.is_full:
            has = len(self._rows.get(tenant, ()))
            if self._largest <= has + 1:  # or they would push each other out in turn
                return key
            dropped = self._drop_last()
        self.extend({key: nbytes}, tenant)
        return dropped

    def extend(self, sizes: Mapping[PackedKey, int], tenant: int) -> None:
        """Have blocks of one tenant's wait that do not, and for which there is room."""
        row = self._rows.setdefault(tenant, OrderedDict())
        before = len(row)
        row.update(sizes)
        self._tenant_of.update(dict.fromkeys(sizes, tenant))
        self._count(tenant, before, len(row))

    def discard(self, key: PackedKey) -> bool:
        """Have a block wait no more; return whether it did."""
        tenant = self._tenant_of.pop(key, None)
        if tenant is None:
            return False
        row = self._rows[tenant]
        del row[key]
        self._left(tenant, row, 1)
        return True

    def first(self, count: int) -> dict[PackedKey, int]:
        """Return up to so many of those whose turn is next, and the bytes of each."""
        rows = (row.items() for row in self._rows.values())
        return dict(itertools.islice(itertools.chain.from_iterable(rows), count))

    def take(self, keys: Iterable[PackedKey]) -> None:
        """Have blocks wait no more that do, in the turn of whose they are: the next one is behind all others'."""
        for tenant, alike in itertools.groupby(keys, self._tenant_of.__getitem__):
            row, theirs = self._rows[tenant], list(alike)
            self._rows.move_to_end(tenant)
            for key in theirs:
                del row[key], self._tenant_of[key]
            self._left(tenant, row, len(theirs))

    def _drop_last(self) -> PackedKey:
        tenant = next(iter(self._having[self._largest]))
        row = self._rows[tenant]
        key, _ = row.popitem()
        del self._tenant_of[key]
        self._left(tenant, row, 1)
        return key

    def _left(self, tenant: int, row: OrderedDict[PackedKey, int], count: int) -> None:
        """Take note that so many of a tenant's wait no more."""
        self._count(tenant, len(row) + count, len(row))
        if not row:
            del self._rows[tenant]

    def _count(self, tenant: int, before: int, after: int) -> None:
        if before:
            del self._having[before][tenant]
            if not self._having[before]:
                del self._having[before]
        if after:
            self._having.setdefault(after, OrderedDict())[tenant] = None
        if after > self._largest:
            self._largest = after
        elif self._largest not in self._having:  # or it was the only one
            self._largest = max(self._having, default=0)
