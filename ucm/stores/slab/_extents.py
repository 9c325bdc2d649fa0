# SPDX-License-Identifier: Apache-2.0
"""
How a slab's memory is cut, and which class may have which piece. Pure.

A *class* is a size of slots. The data file is a row of *extents* of one size, each owned
by at most one class; the extent's size is a multiple of every class's slots, so that a
class sees the whole file as slots side by side, of which some have no memory of its own.
"""

from typing import Self

import attrs
import numpy as np
import numpy.typing as npt

from ucm.errors import ConfigError

__all__ = [
    "MOST_SLOT_BYTES",
    "NOBODY",
    "UNUSED",
    "WRITTEN",
    "Geometry",
    "Holding",
    "choose_extent",
    "place_extents",
]

NOBODY = 0
"""Owner of an extent that no class has."""
UNUSED = np.iinfo(np.int64).min
"""When an extent was used in which nothing is stored."""
WRITTEN = np.iinfo(np.int64).max
"""When an extent is used that cannot go now, as a slot of it is being written."""
_PAGE = 4096
_MOST_SLOTS = 2**31 - 1
MOST_SLOT_BYTES = 1 << 33
_EXTENT_BYTES = 64 << 20
_LEAST_EXTENTS = 16
_MANY_DIVISORS = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680),
    *(2520, 5040, 7560, 10080, 15120),
)
_IDLE_NS = 60 * 10**9


@attrs.frozen
class Geometry:
    """
    The slots of one class in a slab.

    Args:
        data_bytes: Of all extents, the last of which may be shorter.
        extent_bytes: Of each.
        slot_bytes: Divides an extent.
    """

    data_bytes: int
    extent_bytes: int
    slot_bytes: int

    @classmethod
    def fit(cls, capacity_bytes: int, block_bytes: int) -> Self:
        """
        Cut a capacity for blocks of that size, and so that others find room later.

        Raises:
            ConfigError: Not a single slot fits, or a size is no size.
        """
        if not 1 <= block_bytes <= MOST_SLOT_BYTES:
            raise ConfigError(
                "store.block_bytes",
                block_bytes,
                f"a block has at least one byte and at most {MOST_SLOT_BYTES}",
                "Give the size of the layout's largest block.",
            )
        slot_bytes = _PAGE * -(-block_bytes // _PAGE)
        data_bytes = _PAGE * (capacity_bytes // _PAGE)
        most = min(_EXTENT_BYTES, data_bytes // _LEAST_EXTENTS) // slot_bytes
        extent_bytes = slot_bytes * max(
            number for number in _MANY_DIVISORS if number <= max(1, most)
        )
        geometry = cls(data_bytes, extent_bytes, slot_bytes)
        geometry.check(capacity_bytes)
        return geometry

    def check(self, capacity_bytes: int) -> None:
        """
        Make sure that there is a slot, and a number for each.

        Raises:
            ConfigError: There is not.
        """
        if not 1 <= self.num_slots <= _MOST_SLOTS:
            least, most = self.slot_bytes, self.slot_bytes * _MOST_SLOTS
            raise ConfigError(
                "store.capacity",
                capacity_bytes,
                f"{capacity_bytes} bytes // {self.slot_bytes} bytes a slot (a block, "
                f"rounded up to {_PAGE}) = {self.num_slots} slots, not 1 to "
                f"{_MOST_SLOTS}",
                f"Give at least {least} bytes; many times that is useful."
                if self.num_slots < 1
                else f"Give at most {most} bytes.",
            )

    def of_class(self, block_bytes: int) -> "Geometry | None":
        """Return the smallest slots that hold such blocks; None if no extent does."""
        pages = self.extent_bytes // _PAGE
        for count in range(pages // -(-block_bytes // _PAGE), 0, -1):
            if pages % count == 0:
                return attrs.evolve(self, slot_bytes=self.extent_bytes // count)
        return None

    @property
    def num_slots(self) -> int:
        """That the class had if it owned all extents."""
        return self.data_bytes // self.slot_bytes

    @property
    def num_extents(self) -> int:
        """Of the slab, the last and shorter one included."""
        return -(-self.data_bytes // self.extent_bytes)

    @property
    def slots_per_extent(self) -> int:
        """Of each but the last."""
        return self.extent_bytes // self.slot_bytes

    def slots_of(self, extent: int) -> npt.NDArray[np.int64]:
        """Return the slots within an extent; of the last one perhaps none."""
        first = extent * self.slots_per_extent
        return np.arange(first, min(first + self.slots_per_extent, self.num_slots))

    @property
    def usable_extents(self) -> int:
        """Extents from the first on that have a slot of this class."""
        return -(-self.num_slots // self.slots_per_extent)


@attrs.frozen(eq=False)
class Holding:
    """
    What somebody who wants an extent knows of all of them.

    Args:
        owners: ``[n]`` slot size of each one's class, or ``NOBODY``.
        used_ns: ``[n]`` when something in it was used last; ``UNUSED`` if never,
            ``WRITTEN`` if it cannot go now.
        live: Classes that some process uses.
    """

    owners: npt.NDArray[np.int64]
    used_ns: npt.NDArray[np.int64]
    live: frozenset[int]


def choose_extent(wanted: int, oldest_ns: int, seen: Holding) -> int | None:
    """
    Return the extent that a class may take from another one, None if it may not.

    Each class that is in use has an equal share, the others none. Who has less than its
    share takes from who has more. Beyond that everything in an extent must have been
    idle for a minute longer than the oldest block of who takes it. Of those that may
    go it is the one that was used least recently.

    Args:
        wanted: The class that needs room.
        oldest_ns: When its own oldest block was used; now if it has none.
        seen: All extents.
    """
    owners = seen.owners
    sizes, counts = np.unique(owners, return_counts=True)
    count_of = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    share = len(owners) // max(1, len(seen.live | {wanted}))
    may_go = seen.used_ns < oldest_ns - _IDLE_NS
    if count_of.get(wanted, 0) < share:
        for other, count in count_of.items():
            if count > (share if other in seen.live else 0):
                may_go |= owners == other
    may_go &= (owners != wanted) & (owners != NOBODY) & (seen.used_ns != WRITTEN)
    extents = np.flatnonzero(may_go)
    if not len(extents):
        return None
    return int(extents[seen.used_ns[extents].argmin()])


def place_extents(used_ns: npt.NDArray[np.int64], num_new: int) -> dict[int, int]:
    """
    Choose what stays of a slab that becomes larger or smaller, and where.

    Args:
        used_ns: ``[n]`` when something in each extent was used last, ``UNUSED`` where
            nothing is stored.
        num_new: Extents afterwards.

    Returns:
        The new place of each extent that stays: those used last, where they are or,
        if that place goes, in the place of one that does not stay.
    """
    stored = np.flatnonzero(used_ns != UNUSED)
    stored = stored[used_ns[stored].argsort(kind="stable")[::-1]]
    kept = set(stored[:num_new].tolist())
    empty = iter([place for place in range(num_new) if place not in kept])
    return {old: old if old < num_new else next(empty) for old in sorted(kept)}
