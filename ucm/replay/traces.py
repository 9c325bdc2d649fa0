# SPDX-License-Identifier: Apache-2.0
"""
Traces of requests, read and checked.

A trace has one JSON object a line: ``timestamp`` in milliseconds, ``input_length`` in
tokens and ``hash_ids``, one number for each block of the prompt. Equal numbers are equal
blocks behind equal blocks, so that a number has one predecessor wherever it stands.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import attrs

from ucm.errors import UCMError

__all__ = ["Request", "Trace", "TraceError", "apart", "read"]

_NS_PER_MS = 1_000_000
_MAX_MS = 10**12
_MAX_LINE = 1 << 22
_MAX_ID = 1 << 64
_MOST_BLOCKS = 1 << 62
_FIRST = object()


class TraceError(UCMError):
    """A file is no trace; says where and why."""


@attrs.frozen
class Request:
    """
    A prompt that arrives.

    Args:
        moment: Virtual nanoseconds since the start of the trace.
        num_tokens: Of the prompt.
        blocks: Hash ids of its blocks; the last may be partly filled.
    """

    moment: int
    num_tokens: int
    blocks: tuple[int, ...]


@attrs.frozen
class Trace:
    """
    Requests in order of arrival, no two at one moment.

    Args:
        name: For titles.
        block_tokens: Of a whole block.
        requests: All of them.
    """

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    def distinct_blocks(self) -> int:
        """Return how many blocks a store for all of them has."""
        return len({block for each in self.requests for block in each.blocks})

    def used_once(self) -> float:
        """Return the share of the distinct blocks that only one request has."""
        uses: dict[int, int] = {}
        for request in self.requests:
            for block in request.blocks:
                uses[block] = uses.get(block, 0) + 1
        return sum(count == 1 for count in uses.values()) / max(1, len(uses))

    def seconds(self) -> float:
        """Return the time between the first arrival and the last."""
        return (self.requests[-1].moment - self.requests[0].moment) / 1e9


# -- files -------------------------------------------------------------------------


def read(
    path: Path,
    block_tokens: int,
    most_blocks: int = _MOST_BLOCKS,
    told: Callable[[int], None] = lambda so_far: None,
) -> Trace:
    """
    Read a trace; all of it is kept in memory, about 200 bytes a block.

    Args:
        path: The file.
        block_tokens: Of a whole block.
        most_blocks: Of all requests together.
        told: Called with each line, with how many bytes were read.

    Raises:
        TraceError: It cannot be read, or is none; names the line.
    """
    stamps: list[float] = []
    prompts: list[tuple[int, tuple[int, ...]]] = []
    before: dict[int, object] = {}
    num_blocks = num_bytes = 0
    for number, line in enumerate(_lines(path), start=1):
        num_bytes += len(line)  # of ASCII, as JSON is mostly
        told(num_bytes)
        try:
            stamp, num_tokens, blocks = _parse(line, block_tokens)
            _check_prefix(blocks, before)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        if stamps and stamp < stamps[-1]:
            raise TraceError(f"{path}, line {number}: arrives before the line above")
        num_blocks += len(blocks)
        if num_blocks > most_blocks:
            raise TraceError(
                f"{path}, line {number}: over {most_blocks} blocks, more than asked for"
            )
        stamps.append(stamp)
        prompts.append((num_tokens, blocks))
    if not any(blocks for _, blocks in prompts):
        raise TraceError(f"{path}: no request with a block")
    moments = apart(stamps)
    return Trace(
        path.name.removesuffix(".jsonl"),
        block_tokens,
        tuple(
            Request(moment, *prompt)
            for moment, prompt in zip(moments, prompts, strict=True)
        ),
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path}: this is no text") from None


def _parse(line: str, block_tokens: int) -> tuple[float, int, tuple[int, ...]]:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError("no JSON object; was the file cut off?") from None
    except RecursionError:
        raise ValueError("no request") from None
    if not isinstance(fields, dict) or "hash_ids" not in fields:
        raise ValueError("no request: an object with 'hash_ids' is expected")
    stamp, ids = fields.get("timestamp"), fields["hash_ids"]
    if not _is_number(stamp) or not 0 <= stamp < _MAX_MS:
        raise ValueError("'timestamp' has to be milliseconds")
    if not isinstance(ids, list) or not all(_is_id(each) for each in ids):
        raise ValueError("'hash_ids' has to be a list of whole numbers")
    num_tokens = fields.get("input_length", len(ids) * block_tokens)
    if type(num_tokens) is not int:
        raise ValueError("'input_length' has to be a number of tokens")
    # The last block may be partly filled, or left out if it is.
    if not (len(ids) - 1) * block_tokens < num_tokens < (len(ids) + 1) * block_tokens:
        raise ValueError(
            f"{num_tokens} tokens are not {len(ids)} blocks of {block_tokens} tokens"
        )
    return stamp, num_tokens, tuple(ids)


def _is_id(value: object) -> bool:
    return type(value) is int and -_MAX_ID < value < _MAX_ID


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_prefix(blocks: Sequence[int], before: dict[int, object]) -> None:
    """Make sure that each block always stands behind the same one."""
    previous: object = _FIRST
    for block in blocks:
        if before.setdefault(block, previous) != previous:
            raise ValueError(f"block {block} stands behind two others; no prefix hash")
        previous = block


def apart(stamps: Sequence[float]) -> list[int]:
    """
    Return nanoseconds for milliseconds; those of one are spread until the next.

    Raises:
        TraceError: There are too many of one.
    """
    moments: list[int] = []
    first = 0
    while first < len(stamps):
        stop = first
        while stop < len(stamps) and stamps[stop] == stamps[first]:
            stop += 1
        start = int(stamps[first] * _NS_PER_MS)
        end = stamps[stop] if stop < len(stamps) else stamps[first] + 1000
        step = max(1, (int(end * _NS_PER_MS) - start) // (stop - first))
        moments += [start + at * step for at in range(stop - first)]
        first = stop
    if any(later <= earlier for earlier, later in pairwise(moments)):
        raise TraceError("more requests in a millisecond than nanoseconds")
    return moments
