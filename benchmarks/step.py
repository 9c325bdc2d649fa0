# SPDX-License-Identifier: Apache-2.0
"""The step whose cost is measured: 64 requests, 1000 blocks, 32 rows."""

from collections.abc import Iterable, Iterator

from benchmarks.harness import Scale
from benchmarks.memory import ROWS

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "BLOCK_TOKENS",
    "DIGEST",
    "PAGE_BYTES",
    "REQUESTS",
    "hashes_of",
    "sizes",
    "spans",
]

REQUESTS, BLOCKS, BLOCK_TOKENS = 64, 1000, 16
PAGE_BYTES = 512
BLOCK_BYTES = ROWS * PAGE_BYTES

DIGEST = bytes(16)


def spans(step: int) -> Iterator[tuple[str, range, range]]:
    """Yield request, engine blocks and numbers of new contents of one step."""
    edges = [request * BLOCKS // REQUESTS for request in range(REQUESTS + 1)]
    for request in range(REQUESTS):
        start, stop = edges[request], edges[request + 1]
        first = step * BLOCKS
        yield (
            f"request-{step}-{request}",
            range(1 + start, 1 + stop),
            range(first + start, first + stop),
        )


def hashes_of(contents: Iterable[int]) -> list[bytes]:
    """Return the engine's hashes of contents."""
    return [number.to_bytes(32, "big") for number in contents]


def sizes(scale: Scale) -> tuple[range, range]:
    """Return the rounds of a case and the steps of a round."""
    return (range(2), range(5)) if scale.is_quick else (range(5), range(200))
