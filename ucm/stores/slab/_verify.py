# SPDX-License-Identifier: Apache-2.0
"""Reading every block of a slab once, as fast as one is allowed to, while others use it."""

import time
from collections.abc import Callable, Iterator

import attrs

from ucm.errors import BlockCorruptError, BlockNotFoundError
from ucm.stores.slab._survey import SlabSurvey

__all__ = ["Seen", "verify"]


@attrs.define
class Seen:
    """What was read so far."""

    blocks: int = 0
    nbytes: int = 0
    gone: int = 0
    """Blocks that were evicted or forgotten before they were read."""


def verify(
    survey: SlabSurvey,
    seen: Seen,
    rate: float,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[BlockCorruptError]:
    """
    Compare every block with its checksum; yield what is wrong with each that is damaged.

    Args:
        survey: Where they are.
        seen: Counts along.
        rate: Bytes per second at most.
        wait: Lets so many seconds pass.

    Raises:
        StoreUnavailableError: A file was shortened.
    """
    began = time.monotonic()
    for surveyed in survey.classes:
        into = memoryview(bytearray(surveyed.geometry.slot_bytes))
        for blocks in surveyed.blocks():
            for at in range(len(blocks)):
                seen.blocks += 1
                # A damaged record may say anything, which would be waited for.
                seen.nbytes += min(int(blocks.records["nbytes"][at]), len(into))
                try:
                    surveyed.fetch(blocks, at, into)
                except BlockNotFoundError:
                    seen.gone += 1
                except BlockCorruptError as exc:
                    yield exc
                ahead = seen.nbytes / rate - (time.monotonic() - began)
                if ahead > 0:
                    wait(ahead)
