# SPDX-License-Identifier: Apache-2.0
"""
What the values of a block are called, where one is cut into several, and what answers for them say. Pure.

Parts are named by the block's checksum as well: of two machines that put a block at once, with bytes of
their own each, none writes into the other's. The head, of which there is one, says whose are the block's.
"""

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from ucm.backends._redis_answers import is_full
from ucm.backends._redis_servers import AWAY
from ucm.backends._resp import Bulk, Command
from ucm.backends.abc import Fetched, Verdict
from ucm.backends.envelope import GARBAGE, HEADER_BYTES, Envelope
from ucm.blocks import PackedKey

__all__ = [
    "ABSENT",
    "UNSEALED",
    "cuts",
    "head_of",
    "is_whole",
    "judge",
    "name_of",
    "seal_of",
    "silence_of",
    "unlinks",
    "written",
]

ABSENT: Final = Fetched(Verdict.ABSENT)

UNSEALED: Final = b""
"""Of parts as earlier releases named them."""
_PART_BYTES: Final = 1 << 20


def name_of(
    prefix: bytes,
    key: PackedKey,
    part: int,
    seal: bytes = UNSEALED,
    *,
    is_cluster: bool,
) -> bytes:
    """
    Return the name of a value; a cluster has all of a block on one server, by what is in braces.

    https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/ says so.
    """
    tag = b"{%016x}" % xxh3_64_intdigest(key) if is_cluster else b""
    return b"%b%d/%b%b%b" % (prefix, part, tag, key, seal)


def seal_of(checksum: int) -> bytes:
    """Return what is behind the names of parts of a block of this checksum."""
    return b"/%016x" % checksum


def is_whole(nbytes: int) -> bool:
    """Return whether a block of so many bytes is one value."""
    return nbytes <= _PART_BYTES


def cuts(nbytes: int) -> list[tuple[int, int]]:
    """Return where the parts of a block begin and end."""
    starts = [0, *range(_PART_BYTES, nbytes, _PART_BYTES)]
    return list(zip(starts, [*starts[1:], nbytes], strict=True))


def unlinks(names: Sequence[bytes], *, is_cluster: bool) -> list[Command]:
    """Return what removes values at once; a cluster refuses several whose slot moves, unless all are on one side."""
    each = [(name,) for name in names] if is_cluster else [names]
    return [Command((b"UNLINK", *some)) for some in each]


def head_of(answer: object, head: memoryview) -> Envelope | Fetched:
    """Return the head of a block by the answer for so much of its first value, or what there is instead."""
    if answer == Bulk(HEADER_BYTES):
        return Envelope.decode(head) or GARBAGE
    # A part of nothing has no bytes, and neither has one of a value without any.
    return _failed([answer]) or (ABSENT if answer == Bulk(0) else GARBAGE)


def silence_of(head: Envelope | Fetched) -> Verdict | None:
    """Return what is told of a block about whose head nothing was answered; None: something was."""
    verdict = head.verdict if isinstance(head, Fetched) else None
    return verdict if verdict in (Verdict.UNAVAILABLE, Verdict.AWAY) else None


def judge(
    answers: Sequence[object],
    sizes: Sequence[int],
    head: memoryview,
    key: PackedKey,
    known: Envelope | Fetched | None,
) -> Fetched | Envelope:
    """
    Return what became of a block by the answers for each of its values, or its head, if these are not its parts.

    Args:
        answers: Of its head, or all of it; and of its parts, if its head is known.
        sizes: What each of them should have.
        head: What came as its head.
        key: Its key.
        known: The head that names those parts. If another is there by now, the bytes are not its.
    """
    if is_all := list(answers) == list(map(Bulk, sizes)):
        if known is None:
            return Envelope.judge(head, key, sum(sizes) - HEADER_BYTES)
    elif (failed := _failed(answers)) is not None:
        return failed
    elif answers[0] is None:
        return ABSENT
    there = Envelope.decode(head) if answers[0] == Bulk(HEADER_BYTES) else None
    if there is None:
        return GARBAGE
    if there != known:
        return there
    nbytes = sum(sizes) - HEADER_BYTES
    if is_all:
        return Envelope.judge(head, key, nbytes)
    # Of a block of another length no part need be missing.
    return there if None in answers[1:] and there.nbytes == nbytes else GARBAGE


def written(answer: object) -> Verdict:
    """Return what became of a value that was to be set."""
    if answer == b"OK" or answer is True:
        return Verdict.DONE
    if answer is AWAY:
        return Verdict.AWAY
    return Verdict.FULL if is_full(answer) else Verdict.UNAVAILABLE


def _failed(answers: Sequence[object]) -> Fetched | None:
    """Return what became of a block by answers that are no values; None where all are, or none."""
    if any(str(answer).startswith("WRONGTYPE") for answer in answers):
        return GARBAGE
    if any(answer is AWAY for answer in answers):
        return Fetched(Verdict.AWAY)
    if not all(answer is None or isinstance(answer, Bulk) for answer in answers):
        return Fetched(Verdict.UNAVAILABLE)
    return None
