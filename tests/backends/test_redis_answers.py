# SPDX-License-Identifier: Apache-2.0
"""What answers of a server say of it, by connections of ours and by redis-py."""

import pytest
from redis import exceptions
from redis.exceptions import ResponseError

from ucm.backends._redis_answers import is_silence, refuses

DOWN = "The cluster is down"
READS = f"{DOWN} and only accepts read commands"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([b"OK", None, 1, 0], False),
        ([ResponseError("MISCONF of a snapshot"), b"OK"], True),
        ([ResponseError("READONLY of a replica")], True),
        ([exceptions.ReadOnlyError("of a replica")], True),
        ([ResponseError("NOREPLICAS for it")], True),
        ([exceptions.NoPermissionError("to run it")], True),
        ([ResponseError("OOM of maxmemory"), b"OK"], False),
        ([ResponseError("OOM of maxmemory")], None),
        ([exceptions.OutOfMemoryError("of maxmemory")], None),
        ([ResponseError("LOADING the dataset")], None),
        ([exceptions.BusyLoadingError("the dataset")], None),
        ([ResponseError("MOVED 1 10.0.0.1:6379")], None),
        ([exceptions.MovedError("1 10.0.0.1:6379")], None),
        ([exceptions.TryAgainError("later")], None),
        ([ResponseError("CLUSTERDOWN Hash slot not served")], None),
        ([exceptions.ClusterDownError("Hash slot not served")], None),
        ([ResponseError(f"CLUSTERDOWN {DOWN}")], None),
        ([exceptions.ClusterDownError(DOWN)], None),
        ([ResponseError(f"CLUSTERDOWN {READS}")], True),
        ([exceptions.ClusterDownError(READS)], True),
        ([ConnectionError(), TimeoutError()], None),
        ([ConnectionError(), b"OK"], False),
    ],
)
def test_server_takes_nothing_that_says_so_to_a_write(answers, expected):
    """X-14: not one that is full, that names another, or that says nothing; one that took anything takes."""
    assert expected is refuses(answers)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (TimeoutError(), True),
        (ResponseError("LOADING the dataset"), True),
        (exceptions.BusyLoadingError("the dataset"), True),
        (ResponseError(f"CLUSTERDOWN {DOWN}"), True),
        (exceptions.ClusterDownError(DOWN), True),
        (ResponseError(f"CLUSTERDOWN {READS}"), False),
        (exceptions.ClusterDownError(READS), False),
        (ResponseError("CLUSTERDOWN Hash slot not served"), False),
        (exceptions.ClusterDownError("Hash slot not served"), False),
        (ResponseError("MISCONF of a snapshot"), False),
        (b"CLUSTERDOWN " + DOWN.encode(), False),
        (None, False),
    ],
)
def test_server_is_silent_that_cannot_answer_anything(answer, expected):
    """X-14: such as one that says that its cluster is down, unless it still answers reads, or speaks of a slot."""
    assert expected is is_silence(answer)
