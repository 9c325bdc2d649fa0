# SPDX-License-Identifier: Apache-2.0
"""Which committed slots were used least recently; called under the index lock."""

import numpy as np
import numpy.typing as npt

from ucm.stores.slab._layout import SlotState

__all__ = ["NEVER", "OldestFirst"]

NEVER = np.iinfo(np.int64).max
"""Stamp of a slot that holds nothing to evict."""
_MIN_LISTED = 256
_LISTED_SHARE = 16


class OldestFirst:
    """
    Hands out victims, least recently used first, from a list made now and then.

    Stamps only grow. A listed slot whose stamp has not moved is therefore still older
    than everything that is not in the list, however old the list is, and ordering all
    stamps is paid once for a sixteenth of them.

    Args:
        stamps: ``[num_slots]`` int64, last use; shared.
        state: ``[num_slots]`` uint8; shared.
    """

    def __init__(
        self, stamps: npt.NDArray[np.int64], state: npt.NDArray[np.uint8]
    ) -> None:
        self._stamps = stamps
        self._state = state
        self._listed = np.empty((2, 0), dtype=np.int64)  # slots and their stamps

    def pick(self, count: int) -> npt.NDArray[np.int64]:
        """Return up to *count* committed slots; fewer only if there are no more."""
        picked = self._take(count)
        if len(picked) < count:
            self._list(count)
            picked = self._take(count)
        return picked

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        picked = [np.empty(0, dtype=np.int64)]
        while count and self._listed.shape[1]:
            slots, stamps = self._listed[:, :count]
            self._listed = self._listed[:, count:]
            unchanged = (self._stamps[slots] == stamps) & (
                self._state[slots] == SlotState.COMMITTED
            )
            picked.append(slots[unchanged])
            count -= len(picked[-1])
        return np.concatenate(picked)

    def _list(self, count: int) -> None:
        num_slots = len(self._stamps)
        count = min(num_slots, max(count, _MIN_LISTED, num_slots // _LISTED_SHARE))
        slots = np.argpartition(self._stamps, count - 1)[:count]
        stamps = self._stamps[slots]
        order = np.argsort(stamps)
        order = order[stamps[order] != NEVER]
        self._listed = np.stack((slots[order], stamps[order]))
