# SPDX-License-Identifier: Apache-2.0
"""When blocks count as used: the order in which a store makes room. Pure."""

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["Uses"]


@attrs.frozen(eq=False)
class Uses:
    """
    When some blocks count as used, and who pays for them.

    Of a prefix the deeper blocks are of no use without those before them. So whoever
    knows a prefix gives all of its blocks one moment, less a nanosecond for each token
    before the block: room is made from its end, on all ranks and in all groups at once.

    Args:
        moments: ``[n]`` int64 nanoseconds of the machine's monotonic clock. One that is
            still to come keeps a block for as long as if it was used then.
        tenants: ``[n]`` uint32, whose share of the store it takes; 0: nobody's.
    """

    moments: npt.NDArray[np.int64]
    tenants: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.moments)

    def check(self, count: int) -> None:
        """
        Make sure that these are the uses of so many blocks.

        Raises:
            ValueError: They are not.
        """
        if not count == len(self.moments) == len(self.tenants):
            raise ValueError(f"{len(self.moments)} uses of {count} blocks")
