# SPDX-License-Identifier: Apache-2.0
"""
What the simulated engines of the pipeline's worlds compute: blocks, and what is in them.

The content of a block is a function of its key, so that any byte that came too early,
too late or from somewhere else is seen.
"""

import numpy as np
import numpy.typing as npt

from tests.rig import LAYERS, NUM_ROWS, keys_of, layout_of

__all__ = [
    "BLOCK_BYTES",
    "CONTENTS",
    "KEYS",
    "LAYERS",
    "LAYOUT",
    "NEVER",
    "NUMBERS",
    "NUM_BLOCKS",
    "NUM_CONTENTS",
    "NUM_ROWS",
    "PAGE_BYTES",
    "POISON",
    "WrongBytesError",
    "check_bytes",
]

NUM_BLOCKS = 24
PAGE_BYTES = 64
BLOCK_BYTES = NUM_ROWS * PAGE_BYTES
NUM_CONTENTS = 1024
LAYOUT = layout_of(PAGE_BYTES)
POISON = 0xDB
NEVER = np.full((NUM_ROWS, PAGE_BYTES), POISON, dtype=np.uint8)
KEYS = keys_of(*range(NUM_CONTENTS))
NUMBERS = {key: number for number, key in enumerate(KEYS)}
CONTENTS = np.random.default_rng(7).integers(
    0, 256, (NUM_CONTENTS, NUM_ROWS, PAGE_BYTES), dtype=np.uint8
)
"""``[number, row, byte]``: what belongs under each key."""


class WrongBytesError(AssertionError):
    """A block has other bytes than those that were computed for it."""


def check_bytes(
    expected: npt.NDArray[np.uint8], found: npt.NDArray[np.uint8], what: str
) -> None:
    """
    Compare the bytes of a block.

    Raises:
        WrongBytesError: They differ; says what they are instead.
    """
    if np.array_equal(expected, found):
        return
    poisoned = (found == POISON).all(axis=-1).any()
    names = [at for at in range(NUM_CONTENTS) if (CONTENTS[at] == found).all(-1).any()]
    raise WrongBytesError(f"{what}; it has pages of {names}, {poisoned=}")
