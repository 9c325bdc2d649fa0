# SPDX-License-Identifier: Apache-2.0
"""
How many of the slab's slots wants may have: granted whole, one after the other, and fairly.

The lowest priority comes first. Of one priority it is the turn of the tenant that has the least
then; of those that have as much, of whose turn is the longest ago; of one tenant, of who came
first. Nothing is set aside: a tenant alone may have everything.

Who wants much is not passed over for ever. A tenant whose turn has not come while as many slots
as there are were granted to others of its priority is *due*, and comes before all that are not.
Only those come before it that are due for longer, each of them once. So what is granted of this
priority between two turns of a tenant that waits is less than twice of all there is, and one want
of each other tenant that waited before it. Who is next and finds too little left is waited for.
"""

import bisect
import heapq
import itertools
from collections import Counter, OrderedDict, deque
from functools import partial
from operator import attrgetter

import anyio
import attrs

__all__ = ["Budget", "Place"]

_ARRIVAL = attrgetter("arrival")
_SPARE = 64
"""Ranks that are no more true, beside as many as are."""
_MOST_CHANGED = 1024
"""Changes of what tenants have that are known one by one."""


@attrs.define(eq=False)
class Place:
    """Where one who waits stands: by priority, the lowest first, by tenant, and by arrival."""

    priority: int
    tenant: int = 0
    """Who is none of a tenant's is of one that has this number."""
    arrival: int = 0
    count: int = 0
    came: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False)
class _Row:
    """Those of one tenant and one priority that wait."""

    since: int
    """How many slots of this priority were granted by its last turn, or when it began to wait."""
    places: list[Place] = attrs.Factory(list)
    """By arrival."""


@attrs.define(eq=False)
class _Rows:
    """Those of one priority that wait."""

    num_seen: int
    """How many changes of what tenants have the ranks allow for."""
    num_granted: int = 0
    of: OrderedDict[int, _Row] = attrs.Factory(OrderedDict)
    """By tenant; whose turn is the longest ago comes first."""
    ranks: list[tuple[int, int, int, int]] = attrs.Factory(list)
    """A heap: of each tenant what it has, its last turn, its first arrival, and its number; and some
    of these as they were before."""


class Budget:
    """
    Slots that fetched blocks may take, by priority, and then shared by tenants.

    A turn costs about the same however many tenants wait, and at however many priorities; there is
    nothing of a tenant that does not, and has none.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self.held: Counter[int] = Counter()
        """By tenant that has some."""
        self.num_waiting = 0
        """Those who wait for slots."""
        self._arrivals = itertools.count()
        self._changed: deque[int] = deque(maxlen=_MOST_CHANGED)
        """Whose slots became more or less, the last ones."""
        self._num_changed = 0
        self._rows: dict[int, _Rows] = {}
        """By priority."""

    async def acquire(self, count: int, place: Place) -> None:
        """Wait for *count* slots, ``total`` at most, at a place that may be moved on."""
        place.arrival, place.count = next(self._arrivals), count
        self._stand(place)
        self._serve()  # also where others wait: it may come before them all
        is_ours = False
        try:
            await place.came.wait()
            is_ours = True
        finally:
            if not is_ours:  # cancelled, maybe just as our turn came
                if place.came.is_set():
                    self.release(count, place.tenant)
                else:
                    self._leave(place)
                    self._serve()

    def move_on(self, place: Place, priority: int) -> None:
        """Let one who waits come as early as *priority* does, if that is earlier."""
        if priority < place.priority:
            if is_waiting := place.count and not place.came.is_set():
                self._leave(place)
            place.priority = priority
            if is_waiting:
                self._stand(place)
                self._serve()

    def take(self, count: int, tenant: int) -> bool:
        """Take *count* slots before all who wait, if they are left; return whether."""
        is_enough = count <= self.left
        self._give(tenant, count * is_enough)
        self._serve()  # the next one may be another by now
        return is_enough

    def release(self, count: int, tenant: int) -> None:
        """Give slots of a tenant's back."""
        self._give(tenant, -count)
        self._serve()

    def pass_on(self, count: int, tenant: int, to: int) -> None:
        """Have slots be another tenant's that were granted for this one."""
        self._give(tenant, -count)
        self._give(to, count)
        self._serve()

    def _give(self, tenant: int, count: int) -> None:
        self.left -= count
        self.held[tenant] += count
        if not self.held[tenant]:
            del self.held[tenant]
        self._changed.append(tenant)
        self._num_changed += 1

    def _stand(self, place: Place) -> None:
        rows = self._rows.setdefault(place.priority, _Rows(self._num_changed))
        if place.tenant not in rows.of:
            rows.of[place.tenant] = _Row(rows.num_granted)
        bisect.insort(rows.of[place.tenant].places, place, key=_ARRIVAL)
        self._rank(rows, place.tenant)
        self.num_waiting += 1

    def _leave(self, place: Place) -> None:
        """Have one wait no more, and forget of its tenant what is known for those who wait."""
        rows = self._rows[place.priority]
        rows.of[place.tenant].places.remove(place)
        self.num_waiting -= 1
        if not rows.of[place.tenant].places:
            del rows.of[place.tenant]
        self._rank(rows, place.tenant)
        if not rows.of:
            del self._rows[place.priority]

    def _serve(self) -> None:
        while self.left and self._rows:
            rows = self._rows[min(self._rows)]
            place = self._next(rows)
            if place.count > self.left:
                return
            rows.num_granted += place.count
            row = rows.of[place.tenant]
            row.since = rows.num_granted
            rows.of.move_to_end(place.tenant)
            self._leave(place)
            self._give(place.tenant, place.count)
            place.came.set()

    def _next(self, rows: _Rows) -> Place:
        row = next(iter(rows.of.values()))
        if rows.num_granted - row.since >= self.total:  # it is due
            return row.places[0]
        self._catch_up(rows)
        while (rank := rows.ranks[0]) != self._rank_of(rows, rank[-1]):
            heapq.heappop(rows.ranks)
        return rows.of[rank[-1]].places[0]

    def _catch_up(self, rows: _Rows) -> None:
        """Have ranks say what tenants have now: only here, of all priorities for one."""
        num_new, rows.num_seen = self._num_changed - rows.num_seen, self._num_changed
        if num_new > len(self._changed):
            self._rank_all(rows)
            return
        for tenant in set(itertools.islice(reversed(self._changed), num_new)):
            self._rank(rows, tenant)

    def _rank(self, rows: _Rows, tenant: int) -> None:
        """Take note of where a tenant stands now, if it waits."""
        rank = self._rank_of(rows, tenant)
        if rank is not None:
            heapq.heappush(rows.ranks, rank)
        if len(rows.ranks) > 2 * len(rows.of) + _SPARE:
            self._rank_all(rows)

    def _rank_all(self, rows: _Rows) -> None:
        rows.ranks = list(filter(None, map(partial(self._rank_of, rows), rows.of)))
        heapq.heapify(rows.ranks)

    def _rank_of(self, rows: _Rows, tenant: int) -> tuple[int, int, int, int] | None:
        row = rows.of.get(tenant)
        if row is None:
            return None
        return self.held[tenant], row.since, row.places[0].arrival, tenant
