# SPDX-License-Identifier: Apache-2.0
"""
What waits to be spilled to one tier: bounded, and shared by tenants.

Tenants have their turns one after the other, each with as much as goes with a call; of one tenant
who came first goes first. Where there is no room, whose blocks are the most has the last one
dropped: what comes before it in a prompt is of use without it. A tenant alone may have all the room.

Each step costs the same however much waits. There is nothing of a tenant that has nothing here.
"""

import itertools
from collections import OrderedDict

from ucm.blocks import PackedKey

__all__ = ["Backlog"]


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

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._tenant_of

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
        row = self._rows.setdefault(tenant, OrderedDict())
        row[key] = nbytes
        self._tenant_of[key] = tenant
        self._count(tenant, len(row) - 1, len(row))
        return dropped

    def discard(self, key: PackedKey) -> bool:
        """Have a block wait no more; return whether it did."""
        tenant = self._tenant_of.pop(key, None)
        if tenant is None:
            return False
        row = self._rows[tenant]
        del row[key]
        self._left(tenant, row)
        return True

    def first(self, count: int) -> dict[PackedKey, int]:
        """Return up to so many of those whose turn is next, and the bytes of each."""
        rows = (row.items() for row in self._rows.values())
        return dict(itertools.islice(itertools.chain.from_iterable(rows), count))

    def take(self, key: PackedKey) -> bool:
        """Do as ``discard``, in the turn of whose it is: the next one is behind all others'."""
        if key in self._tenant_of:
            self._rows.move_to_end(self._tenant_of[key])
        return self.discard(key)

    def _drop_last(self) -> PackedKey:
        tenant = next(iter(self._having[self._largest]))
        row = self._rows[tenant]
        key, _ = row.popitem()
        del self._tenant_of[key]
        self._left(tenant, row)
        return key

    def _left(self, tenant: int, row: OrderedDict[PackedKey, int]) -> None:
        """Take note that one of a tenant's waits no more."""
        self._count(tenant, len(row) + 1, len(row))
        if not row:
            del self._rows[tenant]

    def _count(self, tenant: int, before: int, after: int) -> None:
        if before:
            del self._having[before][tenant]
            if not self._having[before]:
                del self._having[before]
        if after:
            self._having.setdefault(after, OrderedDict())[tenant] = None
        if after > self._largest or self._largest not in self._having:
            self._largest = after  # or it was the only one, with one more
