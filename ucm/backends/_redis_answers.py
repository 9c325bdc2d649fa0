# SPDX-License-Identifier: Apache-2.0
"""
What an answer of Valkey or Redis says of the server.

Errors come as text by connections of ours, and by redis-py as classes, which cut the word off by which they
know it.
"""

from collections.abc import Sequence
from typing import Final

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as NoConnectionError

__all__ = [
    "ERRORS",
    "are_silent",
    "failures",
    "is_down",
    "is_elsewhere",
    "is_full",
    "is_refusal",
    "is_silence",
    "is_unserved",
    "refused_by",
    "refuses",
]

_NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""What redis-py raises over words that no server says."""
ERRORS: Final = (RedisError, RedisClusterException, OSError, *_NONSENSE)
"""What asking raises."""
_ELSEWHERE: Final = (AskError, TryAgainError, ClusterDownError)
"""redis-py's; that for MOVED is one of the first."""
_DOWN: Final = "The cluster is down"
_UNSERVED: Final = "Hash slot not served"
_READS: Final = "only accepts read commands"
"""Behind it, of a server that is set to answer reads all the same."""


def failures(answers: Sequence[object]) -> list[int]:
    """Return where errors are among answers, mostly nowhere."""
    return [at for at, one in enumerate(answers) if isinstance(one, Exception)]


def are_silent(answers: Sequence[object]) -> bool:
    """Return whether a server has not answered all that it was asked."""
    return any(is_silence(answers[at]) for at in failures(answers))


def is_silence(answer: object) -> bool:
    """Return whether a server has said nothing, or that it cannot answer anything yet."""
    if is_down(answer):
        return _READS not in str(answer)
    if isinstance(answer, ResponseError):
        return str(answer).startswith("LOADING")
    return isinstance(answer, ERRORS)


def is_down(answer: object) -> bool:
    """
    Return whether a server says that its cluster is down, for all or for writes alone.

    That is what it sees: one that is cut off from most others says so, while these are well.
    """
    return isinstance(answer, ResponseError) and _DOWN in str(answer)


def is_unserved(answer: object) -> bool:
    """Return whether a server says that a block is no server's affair, while its cluster is well."""
    return isinstance(answer, ResponseError) and _UNSERVED in str(answer)


def is_elsewhere(answer: object) -> bool:
    """Return whether another server may know, or the same by another connection."""
    if isinstance(answer, ResponseError):
        return str(answer).startswith(("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"))
    return isinstance(answer, ConnectionError | NoConnectionError)


def is_full(answer: object) -> bool:
    """Return whether a server has no room, and makes none."""
    return isinstance(answer, OutOfMemoryError) or str(answer).startswith("OOM")


def is_refusal(answer: object) -> bool:
    """Return whether a server answers to a write that it takes nothing, and not for want of room."""
    if is_down(answer):
        return not is_silence(answer)
    if not isinstance(answer, ResponseError) or isinstance(answer, _ELSEWHERE):
        return False
    return not (is_silence(answer) or is_full(answer) or is_elsewhere(answer))


def refuses(answers: Sequence[object]) -> bool | None:
    """Return whether a server takes nothing, by its answers to writes; None: these do not say."""
    failed = failures(answers)
    if any(is_refusal(answers[at]) for at in failed):
        return True
    return None if len(failed) == len(answers) else False


def refused_by(exc: BaseException | None) -> str:
    """Return what a server calls it that it refuses credentials; empty where an error is another one."""
    while exc is not None:
        if isinstance(exc, AuthenticationError | AuthorizationError):
            return type(exc).__name__
        # A cluster's client says that none is there.
        exc = exc.__cause__ or exc.__context__
    return ""
